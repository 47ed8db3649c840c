"""Exact numerics on real GPUs: the CPU's bits."""

import json

import pytest
import torch

import exact_probe
from conftest import MODEL_OF_TASK, ROOT, small
from samebits.files import sha256
from samebits.host import count_gpus
from samebits.numerics.exact import elementary
from samebits.numerics.exact.products import matmul

pytestmark = pytest.mark.gpus(1)
GOLDEN = json.loads((ROOT / "tests/golden/exact.json").read_text())


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize("model", exact_probe.MODELS)
@pytest.mark.parametrize("whole", [True, False])
def test_the_golden_hashes_of_the_cpu(model, optimizer, whole):
    found = exact_probe.train(model, optimizer, 2, whole=whole, device="cuda")[0]
    assert found == GOLDEN[f"{model} {optimizer} {'whole' if whole else 'by shards'}"]


@pytest.mark.parametrize(
    "name", ["exp", "expm1", "log", "tanh", "erf", "sin", "cos", "sqrt", "rsqrt", "sigmoid", "gelu"]
)
def test_functions_have_the_bits_of_the_cpu(name):
    bits = torch.arange(0, 2**32, 9973, dtype=torch.int64).to(torch.int32)
    x = bits.view(torch.float32).double()
    function = getattr(elementary, name)
    here, there = function(x), function(x.cuda()).cpu()
    assert torch.equal(here.isnan(), there.isnan())
    assert torch.equal(here.nan_to_num(0.0).view(torch.int64), there.nan_to_num(0.0).view(torch.int64))


@pytest.mark.parametrize("shape", [(64, 1000, 32), (1, 1, 1), (257, 4097, 3)])
def test_products_have_the_bits_of_the_cpu(shape):
    torch.manual_seed(0)
    rows, terms, columns = shape
    a, b = torch.randn(rows, terms), torch.randn(terms, columns).exp()
    assert torch.equal(matmul(a, b), matmul(a.cuda(), b.cuda()).cpu())


def run(stage, strategy, data, out, *arguments, **environ):
    options = [
        "--strategy",
        strategy,
        "--numerics",
        "exact",
        "--no-tracking",
        "--data-dir",
        str(data),
        "--out-dir",
        out,
    ]
    done = stage.fresh("train", *options, *arguments, **environ)
    assert done.returncode == 0, done.stderr
    return [sha256(stage.folder / out / name) for name in ("model.safetensors", "losses.csv")]


@pytest.mark.parametrize("task", list(MODEL_OF_TASK))
def test_trainings_have_the_bits_of_the_cpu(task, stage, data_dir):
    """Also when DataParallel and DistributedDataParallel share GPUs, in numbers that do not divide the shards."""
    params = stage.write_params(small(task, oversubscribe=True, optimizer={"name": "adamw", "lr": 0.003}))
    data = data_dir(params)
    expected = run(stage, "single", data, "cpu", CUDA_VISIBLE_DEVICES="")
    assert run(stage, "single", data, "gpu") == expected
    for strategy in ("dp", "ddp"):
        for count in sorted({2, 3, count_gpus() + 1}):
            if count <= 8:
                found = run(stage, strategy, data, f"{strategy}{count}", "--num-devices", str(count))
                assert found == expected, (strategy, count)
