"""The image that experiments run in: building it, and running a command of this repository inside."""
