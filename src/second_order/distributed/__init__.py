"""Who computes what, and how it travels."""
