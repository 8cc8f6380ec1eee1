"""The optimizers, one file a system."""
