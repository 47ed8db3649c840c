"""Switches of PyTorch's that a model or its factory could throw."""

from __future__ import annotations

import sys

import torch


def switches() -> dict[str, object]:
    """PyTorch's process-wide switches that could change how a pass is computed."""
    compiler = "torch._dynamo" in sys.modules
    return {
        "set_num_threads": torch.get_num_threads(),
        "set_default_dtype": torch.get_default_dtype(),
        "set_float32_matmul_precision": _matmul_precision(),
        "use_deterministic_algorithms": torch.get_deterministic_debug_mode(),
        "set_grad_enabled": torch.is_grad_enabled(),
        "autocast": torch.is_autocast_enabled("cpu"),
        "mkldnn": (torch.backends.mkldnn.enabled, torch.backends.mkldnn.deterministic),
        "set_stance": torch._dynamo.eval_frame._stance.stance if compiler else "default",
    }


def switched(before: dict[str, object]) -> str | None:
    """The first of PyTorch's switches that has changed; None if none has."""
    return next((name for name, value in switches().items() if value != before[name]), None)


def _matmul_precision() -> str:
    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:  # set by old and new names, which PyTorch does not mix
        return "mixed"
