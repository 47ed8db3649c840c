"""Results for people: verdicts, the comparison of runs, explanations, scaling curves, and the report."""
