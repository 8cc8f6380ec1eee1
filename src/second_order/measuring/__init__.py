"""The curvature of a trained model, measured over its data, and given to other packages."""
