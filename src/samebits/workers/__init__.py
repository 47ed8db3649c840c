"""The processes of a training: launching them, and what each one does."""
