"""Synthetic datasets with a known floor and the same bytes on every host, and a user's own arrays."""
