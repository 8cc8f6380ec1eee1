"""What a wrapper of ``torch.optim`` owes its surroundings: groups, checkpoints, warnings."""
