"""Small parts that every folder may use."""
