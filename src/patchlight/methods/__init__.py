"""The methods, a room for each family. `base.py` says what one is; the rooms register theirs when first asked for."""
