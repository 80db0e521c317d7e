"""The model: where things are inside a Vision Transformer, read from the model. `load.py` is the door."""
