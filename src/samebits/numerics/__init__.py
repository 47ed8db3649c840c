"""How numbers are computed: the one place that names kernels, precision switches and determinism flags.

``elementary`` and ``random`` are the same on every host and need NumPy alone; ``fast`` is PyTorch's own
arithmetic, and ``initialization`` draws a model's first weights from ``random``.
"""
