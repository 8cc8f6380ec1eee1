"""What is saved of an optimizer, and files."""
