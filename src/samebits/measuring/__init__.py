"""Measuring a training: timed slices beside references, the phases of a step, rooflines, rounding."""
