"""MLflow: local logs are delivered to it by a process of its own, and runs are recorded again from their files."""
