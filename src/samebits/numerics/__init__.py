"""How numbers are computed: the one place that names kernels, precision switches and determinism flags.

``interface`` is what a training loop asks of its numerics, and there are two of them: ``fast`` is PyTorch's own
arithmetic, ``exact`` gives the same bits on every host. ``portable`` is the same on every host under both, and needs
NumPy alone: random numbers and elementary functions. ``initialization`` draws a model's first weights with it.
"""
