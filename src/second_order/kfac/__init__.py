"""The K-FAC step: statistics, averages, inverses, and preconditioned gradients."""
