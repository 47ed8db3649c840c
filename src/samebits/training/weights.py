"""Weights as one safetensors file with the model's own names, for any strategy and for plain PyTorch."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from samebits.errors import UserError
from samebits.files import atomic, regular
from samebits.hashes import sha256

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor, nn

_WRAPPER_PREFIXES = ("module.", "_orig_mod.")


def save_weights(state: dict[str, Tensor], path: Path) -> str:
    """Write the unwrapped model's parameters and buffers and return the SHA-256 of the file.

    A tied tensor is stored once for each of its names, because the format refuses shared memory. The file holds only
    tensors: no commit, no time.
    """
    tensors = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in state.items()}
    with atomic(path) as temporary:
        save_file(tensors, temporary)
    return sha256(path)


def weights_digest(model: nn.Module) -> str:
    """SHA-256 of names, types, shapes and bytes of all parameters and buffers, also of buffers that are not saved."""
    digest = hashlib.sha256()
    for name, tensor in sorted({**dict(model.named_buffers()), **model.state_dict()}.items()):
        value = tensor.detach().cpu().contiguous()
        digest.update(f"{name} {value.dtype} {tuple(value.shape)}\n".encode())
        digest.update(value.view(-1).view(torch.uint8).numpy() if value.numel() else b"")
    return digest.hexdigest()


def load_weights(model: nn.Module, path: Path) -> list[str]:
    """Load a file into ``model`` with ``strict=True`` and return notes for the user.

    If all names have the prefix of a wrapper (``module.`` of ``DataParallel`` and ``DistributedDataParallel``,
    ``_orig_mod.`` of ``torch.compile``), the prefix is removed, with a note.

    Raises:
        UserError: the file cannot be read, or its names or shapes are not those of the model.
    """
    try:
        tensors = load_file(regular(path))
    except (OSError, SafetensorError) as error:
        raise UserError(f"{path}: not a safetensors file: {error}", hint="train again, or name another file") from None
    tensors, notes = _unwrapped(tensors, model)
    try:
        model.load_state_dict(tensors, strict=True)
    except RuntimeError as error:
        details = " ".join(str(error).split())
        hint = "use the model and kwargs that the file was saved with"
        raise UserError(f"{path}: not the weights of this model: {details}", hint=hint) from None
    return notes


def _unwrapped(tensors: dict[str, Tensor], model: nn.Module) -> tuple[dict[str, Tensor], list[str]]:
    notes = []
    names = set(model.state_dict())
    while tensors and not names & set(tensors):
        prefix = next((p for p in _WRAPPER_PREFIXES if all(name.startswith(p) for name in tensors)), None)
        if prefix is None:
            break
        tensors = {name.removeprefix(prefix): tensor for name, tensor in tensors.items()}
        notes.append(f"the checkpoint was saved from a wrapped model; the prefix {prefix!r} was taken off its names")
    return tensors, notes
