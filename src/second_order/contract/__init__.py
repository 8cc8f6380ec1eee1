"""The duties of a wrapper of ``torch.optim`` optimizers: groups, checkpoints, warnings."""
