"""What all command lines share."""

HELP_OPTIONS = {"help_option_names": ["-h", "--help"], "max_content_width": 100}
"""Settings of every click command."""
