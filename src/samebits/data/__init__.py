"""Synthetic data sets with a known floor, the same bytes on every host, and a user's own arrays."""
