"""Kronecker-factored curvature: capture, statistics, running averages, inverses."""
