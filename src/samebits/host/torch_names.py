"""PyTorch's private names: which ones the kit uses, and what follows where a version of PyTorch has none of them.

A public name stays over versions; a private one may move with any. ``require_torch_names`` refuses such a PyTorch by
name. ``docs/reference/torch-names.md`` lists the names with the files that use them.
"""

from __future__ import annotations

import importlib.util
import re
import sys
from contextlib import nullcontext
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

from samebits.errors import HostError, few
from samebits.here import install_command
from samebits.host.software import torch_build

if TYPE_CHECKING:
    from collections.abc import Callable


class TorchName(NamedTuple):
    """A private name, as a path from ``torch`` where a part may be called with numbers, and what the kit does with it.

    ``fallback`` is what happens without the name, where every use goes on. Else a PyTorch that lacks it is refused.
    """

    path: str
    use: str
    fallback: str = ""


_REPLACED = (
    "_cdist_backward _cdist_forward _conj_physical _embedding_bag _embedding_bag_backward _embedding_bag_forward_only "
    "_embedding_bag_per_sample_weights_backward _fft_c2c _fft_c2r _fft_r2c _grouped_mm _index_put_impl _log_softmax "
    "_log_softmax_backward_data _pdist_backward _pdist_forward _softmax _softmax_backward_data _to_copy "
    "_weight_norm_interface _weight_norm_interface_backward"
)

NAMES = (
    # The dispatcher, and what stands above it.
    TorchName("torch.utils._python_dispatch.TorchDispatchMode", "sees each operation of a pass"),
    TorchName(
        "torch.utils._python_dispatch.TorchDispatchMode._should_skip_dynamo",
        "leaves out the guard against being compiled, which imports the compiler",
        "the guard costs time",
    ),
    TorchName("torch.utils._python_dispatch._disable_current_modes", "records passes on a CPU below all other modes"),
    TorchName("torch._C._DisableTorchDispatch", "runs code that is exact by itself without the engine"),
    TorchName("torch._C.DisableTorchFunction", "reads a gradient where exact refuses access"),
    TorchName("torch._C._storage_Use_Count", "finds whether a model still holds weights of the step before"),
    TorchName("torch._ops.HigherOrderOperator", "refuses control flow as an operation"),
    TorchName("torch.ops.aten.add.Tensor._schema", "finds what an operation writes to, and its rates of dropout"),
    TorchName("torch._decomp.decomposition_table", "decomposes operations into exact ones"),
    TorchName("torch.utils._pytree.tree_leaves", "finds the tensors among arguments"),
    TorchName("torch.utils._pytree.tree_map_only", "keeps the memory of the tensors among arguments"),
    TorchName(
        "torch._C._functorch._set_vmap_fallback_warning_enabled",
        "keeps vmap from warning of an operation without a rule",
        "it warns once for each",
    ),
    TorchName("torch._C._functorch.is_batchedtensor", "finds what vmap shows in the place of a tensor of all shards"),
    TorchName("torch._C._functorch.get_unwrapped", "asks it whether it requires a gradient"),
    TorchName("torch._C._functorch.get_interpreter_stack", "knows a transform of the model's own within one pass"),
    # Autograd.
    TorchName("torch.autograd.graph._engine_run_backward", "runs a backward pass within the modes of exact"),
    TorchName("torch.autograd.Function._backward_cls", "knows the parameters of an exact pass"),
    TorchName("torch._C._autograd._get_sequence_nr", "names the line of an operation in forward"),
    TorchName("torch._C._current_autograd_node", "names the operation of a backward pass"),
    TorchName("torch.autograd.graph.Node._sequence_nr", "finds its operation in forward"),
    TorchName("torch.Tensor._version", "notices that a tensor was written to"),
    TorchName("torch.Tensor._backward_hooks", "refuses a hook for a gradient"),
    TorchName("torch.Tensor._post_accumulate_grad_hooks", "refuses a hook for a gradient"),
    # Modules and wrappers.
    TorchName("torch.nn.Module()._forward_pre_hooks", "finds weights that weight_norm computes before each call"),
    TorchName("torch.nn.Module()._parameters", "puts other tensors in the place of parameters"),
    TorchName("torch.nn.Module()._compiled_call_impl", "refuses a compiled module under exact"),
    TorchName("torch.nn.Module()._replicate_for_data_parallel()._is_replica", "knows a replica of DataParallel"),
    TorchName("torch.nn.RNN(1, 1)._flat_weights", "gives recurrent layers their parameters under exact"),
    TorchName("torch.nn.RNN(1, 1)._flat_weight_refs", "keeps recurrent layers from making that list anew"),
    TorchName("torch.nn.RNN(1, 1)._flat_weights_names", "finds the parameters of recurrent layers"),
    TorchName("torch.nn.modules.batchnorm._BatchNorm", "names a BatchNorm, whose statistics depend on the split"),
    TorchName("torch.nn.modules.batchnorm._NormBase", "refuses running statistics under exact"),
    TorchName("torch._C._distributed_c10d.Reducer._rebuild_buckets", "checks that all gradients were reduced"),
    # Memory and random numbers.
    TorchName("torch.UntypedStorage._cdata", "tells whether two tensors share memory"),
    TorchName("torch.default_generator._cdata", "tells whether a generator is the default one"),
    # Kernels and the compiler.
    TorchName("torch._C._get_cpu_capability", "answers a model alike on every host under exact"),
    TorchName("torch._C._jit_set_texpr_fuser_enabled", "switches the fuser of TorchScript"),
    TorchName("torch._inductor.config.deterministic", "makes compiled code repeat itself"),
    TorchName(
        "torch._int_mm", "multiplies 8-bit integers in place of float64 numbers on GPUs under exact", "float64 is used"
    ),
    TorchName("torch._dynamo", "is imported before workers are forked, which saves each of them seconds"),
    TorchName("torch._dynamo.eval_frame._stance", "notices that forward changes the stance of the compiler"),
    TorchName("torch._dynamo.eval_frame.OptimizedModule", "refuses a compiled module under exact"),
    TorchName(
        "torch._dynamo.eval_frame.OptimizedModule._orig_mod",
        "leaves out the memory of a compiled module",
        "only the memory of its tensors outside kernels is counted",
    ),
    # Operations.
    *(TorchName(f"torch.ops.aten.{name}", "is replaced by an exact version") for name in _REPLACED.split()),
    TorchName("torch.ops.aten._unsafe_view", "launches no kernel"),
    TorchName("torch.ops.aten._local_scalar_dense", "is a read for which the host waits"),
    TorchName("torch.ops.aten._scaled_dot_product_flash_attention_for_cpu", "is counted as products"),
    TorchName("torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward", "is counted as products"),
    TorchName("torch.ops.aten._index_put_impl_", "may have tensors of two devices"),
    TorchName("torch.ops.aten._pack_padded_sequence", "may have tensors of two devices"),
)
"""Every private name of PyTorch in the sources; a test compares them."""


def missing_torch_names() -> list[str]:
    """Names without a fallback that the imported torch lacks.

    A submodule that nothing has imported yet counts as complete, because importing the compiler takes seconds.
    """
    return [name.path for name in NAMES if not name.fallback and not _has(name.path)]


def _has(path: str) -> bool:
    found: Any = sys.modules["torch"]
    at = "torch"
    for part in path.split(".")[1:]:
        name, called, numbers = part.partition("(")
        at = f"{at}.{name}"
        if at in sys.modules:
            found = sys.modules[at]
        elif hasattr(found, "__path__") and importlib.util.find_spec(at):
            return True
        elif hasattr(found, name):
            found = getattr(found, name)
        else:
            return False
        found = _result_of(found, numbers) if called else found
    return True


@cache
def _result_of(function: Callable[..., object], numbers: str) -> object:
    """The result of a call, which many paths share, unseen by modes that watch a training, and without a draw."""
    torch = sys.modules["torch"]
    unseen = getattr(torch._C, "_DisableTorchDispatch", nullcontext)
    with unseen(), torch.device("meta"):
        return function(*map(int, re.findall(r"\d+", numbers)))


def require_torch_names() -> None:
    """Refuse a torch without a private name that the kit needs; torch must be imported.

    Raises:
        HostError: names are missing.
    """
    if missing := missing_torch_names():
        raise HostError(
            f"torch {torch_build().version} lacks private names that samebits uses: {few(missing)}",
            hint=install_command(),
        )
