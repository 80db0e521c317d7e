"""`python -m tools.docs` makes the documentation: pages are staged, the reference is written, Sphinx builds them."""
