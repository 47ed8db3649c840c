"""How numbers are computed: the one place that names kernels, precision switches and determinism flags.

``interface`` is what a training loop asks of its numerics. There are two of them: ``fast`` is PyTorch's own arithmetic,
``exact`` gives the same bits on every host. ``initialization`` draws a model's first weights from
``samebits.portable``, which is the same on every host under both.
"""
