"""Kronecker-factored curvature: capture, statistics, running averages, damped solves."""
