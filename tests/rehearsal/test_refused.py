"""What exact calls, against what CUDA has no kernel for, computes in a changing order, or contracts."""

from contextlib import contextmanager, nullcontext
from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode, _pop_mode_temporarily

import exact_probe
from operations_on_cuda import as_in_training
from operations_probe import NO_MODE, attempt, samples_of, tensors
from refused_on_cuda import name_of
from samebits.errors import UserError
from samebits.host.variables import KERNELS
from samebits.numerics.exact import convolution, engine, losses, numerics, of_shards, parameters
from samebits.numerics.exact.compiled import library
from samebits.numerics.exact.engine import Engine
from samebits.numerics.exact.operations import registry
from samebits.numerics.initialization import portable_initialization

REFUSED = (Path(__file__).parent / "refused.txt").read_text(encoding="utf-8").splitlines()
"""PyTorch's own words, which ``refused_on_cuda.py`` collects."""

FLOATS = ("float32", "float64")
CONTRACTED = "nvcc contracts a product and a sum in one kernel, unless told not to (-fmad)"
FUNCTION = "CUDA's mathematical functions round in other ways than the CPU's (CUDA C++ Programming Guide, appendix)"
ORDER = "the order of a kernel's sum depends on the device, and float32 terms are on no grid"
FUNCTIONS = (
    "exp", "exp2", "expm1", "log", "log2", "log10", "log1p", "sin", "cos", "tan", "sinh", "cosh", "tanh", "asin",
    "acos", "atan", "atan2", "erf", "erfc", "erfinv", "lgamma", "digamma", "pow", "rsqrt", "hypot", "logsumexp",
    "sigmoid", "silu", "gelu", "softplus", "log_sigmoid_forward", "elu", "hardswish", "mish", "_softmax",
    "_log_softmax", "tanh_backward", "sigmoid_backward", "gelu_backward", "silu_backward",
)  # fmt: skip
NOT_ALIKE = {
    **dict.fromkeys(("addcmul", "addcdiv", "lerp", "add with alpha", "sub with alpha"), (FLOATS, CONTRACTED)),
    **dict.fromkeys(("addmm", "addmv", "addr", "addbmm", "baddbmm"), (FLOATS, CONTRACTED)),
    **dict.fromkeys(
        ("native_layer_norm", "native_layer_norm_backward", "native_group_norm", "native_group_norm_backward"),
        (FLOATS, CONTRACTED),
    ),
    **dict.fromkeys(FUNCTIONS, (FLOATS, FUNCTION)),
    "sqrt": (("float32",), "the CPU's float32 root is not correctly rounded, CUDA's is"),
    **dict.fromkeys(("mm", "bmm", "mv", "dot", "convolution", "sum", "cumsum"), (("float32",), ORDER)),
    **dict.fromkeys(("index_add", "scatter_add", "scatter_reduce"), (("float32",), ORDER)),
    **dict.fromkeys(("mean", "var", "std", "var_mean", "std_mean", "prod", "cumprod"), (FLOATS, ORDER)),
    **dict.fromkeys(("linalg_vector_norm", "norm", "mse_loss", "nll_loss_forward"), (FLOATS, ORDER)),
}
"""Operations with the types for which a GPU's result is not the CPU's, and why. Sums of float64 numbers stand on grids.

What refuses at once stands in ``refused.txt``; this is what no error tells.
"""
ALIKE = {
    (name, str(dtype).removeprefix("torch."))
    for group in registry.ALIKE
    for name in f"{group.free} {group.integers} {group.inner}".split()
    for dtype in group.types
}
"""Operations, with the type of the first tensor, for which the registry says that a GPU's result is the CPU's.

``exact`` may call no other: what stands neither here nor in ``NOT_ALIKE`` nobody has thought about.
"""


class _Calls(TorchDispatchMode):
    """Keeps (operation, type of its first tensor) of every call that reaches a kernel, with who made it."""

    def __init__(self):
        super().__init__()
        self.made, self.by = {}, ""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        with self:
            parts = func.decompose(*args, **kwargs)
        if parts is not NotImplemented:
            return parts
        overload = name_of(func)
        name = overload.partition(".")[0]
        if name == "scatter_reduce" and "prod" not in args:
            overload += " without products"  # the others have a deterministic kernel
        if kwargs.get("alpha", 1) != 1 and name in ("add", "sub"):
            name += " with alpha"
        given = tensors((args, kwargs))
        elsewhere = (kwargs.get("device") or torch.device("cpu")).type == "meta"  # where nothing is computed
        one = not given or elsewhere or (given[0].numel() <= 1 and NOT_ALIKE.get(name, ((), ""))[1] == ORDER)
        if not one:  # one term has no order
            self.made.setdefault((name, overload, str(given[0].dtype).removeprefix("torch.")), self.by)
        return func(*args, **kwargs)


@contextmanager
def _without_engine():
    """As ``engine.below``, but ``_Calls`` stays."""
    with _pop_mode_temporarily() if isinstance(_get_current_dispatch_mode(), Engine) else nullcontext():
        yield


def _hits(calls):
    """What stands in one of the lists, each with who called it."""
    refused = {line.partition(":")[0]: line for line in REFUSED}
    hits = {}
    for (name, overload, dtype), by in calls.made.items():
        types, why = NOT_ALIKE.get(name, ((), ""))
        if dtype in types:
            hits[f"{name} {dtype}"] = f"{by}: {why}"
        if line := refused.get(f"{overload} {dtype}"):
            hits[f"{overload} {dtype}"] = f"{by}: {line}"
        if (name, dtype) not in ALIKE:
            hits.setdefault(
                f"{name} {dtype}", f"{by}: nobody has said whether a GPU gives the same, see ALIKE in registry.py"
            )
    return hits


def test_a_call_that_stands_in_a_list_is_found():
    calls = _Calls()
    with calls:
        torch.add(torch.ones(2), torch.ones(2), alpha=2)
        torch.ones(2, 2, dtype=torch.int64) @ torch.ones(2, 2, dtype=torch.int64)
        torch.ones(2).sum()
        torch.ones(2, dtype=torch.float64).sum()
        torch.ones(2).erfc()
        torch.special.ndtri(torch.ones(2))
    hits = _hits(calls)
    assert set(hits) >= {"add with alpha float32", "mm.default int64", "sum float32", "special_ndtri float32"}
    assert "nobody has said" in hits["special_ndtri float32"]
    assert "sum float64" not in hits


def test_no_operation_is_said_to_be_alike_and_not_alike():
    assert {(name, dtype) for name, dtype in ALIKE if dtype in NOT_ALIKE.get(name, ((), ""))[0]} == set()


def test_names_in_the_lists_are_operations():
    names = {name.partition(" ")[0].partition(".")[0] for name in (*NOT_ALIKE, *REFUSED, *(name for name, _ in ALIKE))}
    assert {name for name in names if not hasattr(torch.ops.aten, name)} == set()


@pytest.fixture(autouse=True)
def _as_on_a_gpu(monkeypatch):
    """Operations as on a GPU: without what is compiled for CPUs, and convolutions by their windows."""
    monkeypatch.setenv(KERNELS, "python")
    monkeypatch.setattr(convolution, "_is_native", lambda _: False)
    with library.using(None):
        yield


MODELS = [pytest.param(name, marks=() if name == "mlp" else pytest.mark.slow) for name in exact_probe.MODELS]


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("together", [True, False])
def test_trainings_call_nothing_of_the_lists(model, together, monkeypatch):
    for place in (engine, losses, of_shards, parameters, numerics):
        monkeypatch.setattr(place, "below", _without_engine)
    calls = _Calls()
    calls.by = model
    for optimizer in exact_probe.CHOSEN:
        with calls:
            exact_probe.train(model, optimizer, 2, together=together, steps=2, clip_grad_norm=1.0)
    assert {name for name, _, dtype in calls.made if dtype == "float64"} & {"mm", "bmm"}
    assert _hits(calls) == {}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_exact_versions_call_nothing_of_the_lists(monkeypatch):
    from torch.testing._internal.common_methods_invocations import op_db  # takes seconds

    torch.backends.__allow_nonbracketed_mutation_flag = True  # importing it forbids this to all tests that follow
    monkeypatch.setattr(engine, "below", _without_engine)
    calls = _Calls()
    for op in op_db:
        if op.name in NO_MODE:
            continue
        calls.by = op.name
        with portable_initialization(0):
            samples = [sample for dtype in (torch.float32, torch.int64) for sample in samples_of(op, dtype)]
        for sample in samples:
            try:
                with calls:
                    attempt(op, sample, as_in_training())
            except UserError:
                continue
            except Exception:  # noqa: BLE001 - a sample that PyTorch itself refuses
                continue
    assert len(calls.made) > 200
    assert _hits(calls) == {}
