"""The K-FAC step: statistics, averages, solves, preconditioned gradients, and who does which."""
