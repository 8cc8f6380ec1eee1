"""State of the training run that an optimizer shares with its curvature."""
