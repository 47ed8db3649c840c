"""Checks of the host, the repository and the user's model before a training, each with a hint if it fails."""
