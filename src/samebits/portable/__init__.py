"""Numbers that are the same on every host, from NumPy's basic operations alone."""
