"""The curvature of a model in the formats of other packages, a file for each."""
