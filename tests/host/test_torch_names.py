"""PyTorch's private names: each is listed, and a PyTorch without one goes on or is refused by name."""

import re
import subprocess
import sys

import pytest
import torch

import torch_names
from samebits.errors import HostError
from samebits.host.torch_names import NAMES, missing_torch_names, require_torch_names


@pytest.fixture(scope="module")
def sources():
    return torch_names.uses()


def test_each_private_name_in_the_sources_is_listed(sources):
    used, unlisted = sources
    assert unlisted == []
    assert {one.path for one in NAMES} - used.keys() == set()


def test_a_name_has_a_fallback_only_where_each_use_goes_on_without_it(sources):
    fallbacks = {one.path for one in NAMES if one.fallback}
    unguarded = {path for path, uses in sources[0].items() if not all(use.guarded for use in uses)}
    assert fallbacks & unguarded == set()


def test_what_the_walk_finds(tmp_path):
    (tmp_path / "module.py").write_text(
        "from torch._new import thing\n"
        "import torch._C._other\n"
        "x = torch._C._DisableTorchDispatch()\n"
        "y = tensor._version, tensor._grad_fn, self._own\n"
        "self._own = getattr(module, '_is_replica', False)\n"
        "try:\n    from torch.utils._pytree import tree_leaves\nexcept ImportError:\n    pass\n"
        "z = sys.modules['torch._dynamo']\n"
        "with suppress(AttributeError):\n    torch._C._functorch._set_vmap_fallback_warning_enabled(False)\n"
    )
    used, unlisted = torch_names.uses(tmp_path)
    assert unlisted == ["module.py:1: torch._new.thing", "module.py:2: torch._C._other", "module.py:4: _grad_fn"]
    assert {path: [(use.line, use.guarded) for use in uses] for path, uses in used.items()} == {
        "torch._C._DisableTorchDispatch": [(3, False)],
        "torch.Tensor._version": [(4, False)],
        "torch.nn.Module()._replicate_for_data_parallel()._is_replica": [(5, True)],
        "torch.utils._pytree.tree_leaves": [(7, True)],
        "torch._C._functorch._set_vmap_fallback_warning_enabled": [(12, True)],
        "torch._dynamo": [(10, False)],
    }


def test_this_torch_has_them():
    import torch._dynamo  # noqa: F401 - its names are there only now

    assert missing_torch_names() == []


@pytest.mark.parametrize(
    ("holder", "name", "path"),
    [
        (torch._C, "_DisableTorchDispatch", "torch._C._DisableTorchDispatch"),
        (torch.utils._pytree, "tree_leaves", "torch.utils._pytree.tree_leaves"),
        (torch.nn.Module, "_compiled_call_impl", "torch.nn.Module()._compiled_call_impl"),
        (torch.autograd.graph.Node, "_sequence_nr", "torch.autograd.graph.Node._sequence_nr"),
    ],
)
def test_a_missing_name_is_refused(holder, name, path, monkeypatch):
    monkeypatch.delattr(holder, name)
    said = rf"^torch 2.* lacks private names that samebits uses: {re.escape(path)}\. hint: "
    with pytest.raises(HostError, match=said):
        require_torch_names()


def test_a_name_that_is_missing_at_import_ends_a_command_by_its_name(tmp_path):
    """And not in the traceback of a bug."""
    code = (
        "import sys, torch.utils._pytree; del torch.utils._pytree.tree_leaves\n"
        "from samebits.cli import main; sys.argv = ['samebits', 'doctor', '--memory']; main()"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 3, done.stderr
    last = done.stderr.splitlines()[-1]
    assert "lacks private names that samebits uses: torch.utils._pytree.tree_leaves" in last
    assert "Traceback" not in done.stderr
