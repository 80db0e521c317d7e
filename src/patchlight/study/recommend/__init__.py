"""Which explanation to trust: methods race under metrics on one's own images, and the verdict is words and a table."""
