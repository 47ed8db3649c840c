"""Builds a built-in model or the user's own with portable first weights, and finds its source files."""
