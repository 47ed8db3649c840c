"""Compiled forms of exact functions for CPUs."""
