"""Which explanation to trust: methods race under metrics on the user's images, and the verdict is words and a table."""
