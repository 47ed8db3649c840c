"""Environment variables that torch, CUDA and cuBLAS read when they start."""

from __future__ import annotations

import os

from samebits.files import own_folder
from samebits.host.variables import KERNELS, PRODUCTS, SHARDS, chosen, require_one_of

ENVIRONMENT = {
    # cuBLAS is deterministic only with a fixed workspace; PyTorch accepts these two.
    "CUBLAS_WORKSPACE_CONFIG": (":4096:8", ":16:8"),
    # NVML numbers devices in this order.
    "CUDA_DEVICE_ORDER": ("PCI_BUS_ID",),
    # cuBLAS 13 may emulate float64 products by shorter ones; nobody has shown that exact keeps its bits then.
    "CUBLAS_EMULATE_DOUBLE_PRECISION": ("0",),
    # cuBLAS 12.9 may emulate float32 products by bfloat16 ones, which are no longer what fp32 says.
    "CUBLAS_EMULATE_SINGLE_PRECISION": ("0",),
    # torch.cuda.is_available() must not start CUDA before the fork.
    "PYTORCH_NVML_BASED_CUDA_CHECK": ("1",),
    # torch 2.13 compiles some products of a GPU by Triton, which fails where there is no C compiler (pytorch#196977).
    "TORCH_DISABLE_NATIVE_JIT": ("1", "0"),
}
"""Accepted values by variable; the first is the default."""


_COMPILED = {"TORCHINDUCTOR_CACHE_DIR": "inductor", "TRITON_CACHE_DIR": "triton"}
"""Folders of code that PyTorch has compiled and loads again; its own default is a predictable path in /tmp."""


def prepare_environment() -> None:
    """Set ``ENVIRONMENT``, and folders for compiled code that nobody else can write to.

    Call it before torch is imported, and again before anything may start CUDA.

    Raises:
        UserError: a variable has a value that would break a training.
    """
    for name, accepted in ENVIRONMENT.items():
        given = os.environ.get(name) or accepted[0]  # Compose passes an unset variable as an empty one
        require_one_of(accepted, name, given)
        os.environ[name] = given
    for name in (KERNELS, PRODUCTS, SHARDS):
        chosen(name)
    if not all(os.environ.get(name) for name in _COMPILED):
        folder = own_folder()
        for name, below in _COMPILED.items():
            os.environ[name] = os.environ.get(name) or str(folder / below)
