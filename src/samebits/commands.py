"""What all command lines share."""

HELP_OPTIONS = {"help_option_names": ["-h", "--help"]}
"""Settings of every click command."""
