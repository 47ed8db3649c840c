"""Which of PyTorch's kernels a process may use where several compute the same function."""

import torch


def choose_kernels(*, fused: bool) -> None:
    """Let PyTorch choose as it does by default, or without ``fused`` only forms made of ATen's plain operations."""
    torch.backends.cuda.enable_flash_sdp(fused)
    torch.backends.cuda.enable_mem_efficient_sdp(fused)
    torch.backends.cuda.enable_cudnn_sdp(fused)
    torch.backends.cuda.enable_math_sdp(True)
    torch.backends.mha.set_fastpath_enabled(fused)
    torch.backends.opt_einsum.enabled = fused and torch.backends.opt_einsum.is_available()
    torch._C._jit_set_texpr_fuser_enabled(fused)
