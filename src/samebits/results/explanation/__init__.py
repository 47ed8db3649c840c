"""Explanations of a step's time: causes with evidence, and remedies with predicted gains; made without torch."""
