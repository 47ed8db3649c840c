"""Launches the worker processes of a training and runs their work."""
