"""The split step of FOSI: the base outside the extreme eigenvectors, Newton inside."""
