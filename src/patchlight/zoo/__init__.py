"""The bundled model and photographs. Importing this package imports no framework."""
