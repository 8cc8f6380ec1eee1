"""Small functions that every folder can use."""
