"""The ranks' division of work, and the messages between them."""
