"""Why a speed-up is what it is, and what to change: causes with their evidence, and predicted gains; without torch."""
