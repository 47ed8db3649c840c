"""Measures a training: timed slices beside references, phases of a step, rooflines, rounding."""
