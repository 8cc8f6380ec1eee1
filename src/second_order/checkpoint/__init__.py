"""The state of an optimizer in checkpoints, and files."""
