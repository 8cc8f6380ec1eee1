"""The training run as an optimizer and its curvature share it."""
