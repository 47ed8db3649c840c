"""The training loop and its parts: placement, workers, batches, checkpoints, evaluation."""
