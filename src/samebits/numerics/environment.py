"""Variables that torch, CUDA and cuBLAS read when they start."""

import os

from samebits.errors import UserError

ENVIRONMENT = {
    # cuBLAS is deterministic only with a fixed workspace; PyTorch knows these two.
    "CUBLAS_WORKSPACE_CONFIG": (":4096:8", ":16:8"),
    # The order in which NVML counts.
    "CUDA_DEVICE_ORDER": ("PCI_BUS_ID",),
    # cuBLAS 13 may make products of float64 numbers out of shorter ones, which exact has not been shown to stand.
    "CUBLAS_EMULATE_DOUBLE_PRECISION": ("0",),
    # torch.cuda.is_available() must not start CUDA before the fork.
    "PYTORCH_NVML_BASED_CUDA_CHECK": ("1",),
    # torch 2.13 compiles some products of a GPU by Triton, which fails where there is no C compiler (pytorch#196977).
    "TORCH_DISABLE_NATIVE_JIT": ("1", "0"),
}
"""What each may be set to; the first is set where the user has not set it."""


def prepare_environment() -> None:
    """Set ``ENVIRONMENT``; called before torch is imported, and again before anything may start CUDA.

    Raises:
        UserError: one of them is set to what would break a training.
    """
    for name, accepted in ENVIRONMENT.items():
        given = os.environ.get(name) or accepted[0]  # Compose passes what is not set as empty
        if given not in accepted:
            raise UserError(f"{name}: got {given!r}, accepts {' or '.join(accepted)}", hint=f"unset {name}")
        os.environ[name] = given
