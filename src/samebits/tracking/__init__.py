"""Delivery of local logs to MLflow by a separate process, and recording of runs from their files."""
