"""The training loop and what it needs: strategies, placement, batches, checkpoints, timed slices."""
