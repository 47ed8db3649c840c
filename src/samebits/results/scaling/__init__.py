"""Scaling curves: trainings on 1, 2, 4 ... devices, the cost model fitted to them, and projections."""
