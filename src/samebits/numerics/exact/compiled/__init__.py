"""Compiled forms of exact functions for CPUs."""

HINT = "install gcc or clang, or pip install ziglang; without them exact gives the same bits more slowly"
"""What to do where they cannot be compiled."""
