"""What makes the bundled files; not part of the package."""
