"""The methods, one module per family. `base.py` defines what a method is; modules register theirs when first needed."""
