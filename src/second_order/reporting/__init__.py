"""Tables that users read."""
