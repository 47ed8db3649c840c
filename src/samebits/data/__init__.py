"""Synthetic data sets with a known floor, the same bytes on every host, and how batches are fed."""
