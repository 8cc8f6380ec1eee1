"""The curvature of a trained model, by passes over its data."""
