"""The modules of the built-in models."""
