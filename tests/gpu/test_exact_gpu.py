"""Exact numerics on real GPUs: the CPU's bits."""

import json
import subprocess
import sys
from itertools import permutations, product

import pytest
import torch

import exact_probe
from conftest import MODEL_OF_TASK, ROOT, small
from samebits.hashes import sha256
from samebits.host import count_gpus
from samebits.host.variables import KERNELS, PRODUCTS
from samebits.numerics.exact import activations, elementary, integer_products
from samebits.numerics.exact.compiled import check as check_kernels
from samebits.numerics.exact.compiled.library import OF_NUMBERS, mapped, using
from samebits.numerics.exact.products import matmul
from samebits.numerics.exact.self_test import cases, check
from samebits.numerics.exact.self_test.numbers import digest
from samebits.params import parse_params
from samebits.records.card import read_card
from samebits.strategies.placement import Devices
from samebits.training.checkpoints import CheckpointRecord, Checkpoints
from samebits.training.meters import StepClock
from samebits.training.placement import place
from samebits.training.setup import Setup
from samebits.training.weights import weights_digest
from samebits.training.worker import make_worker

pytestmark = pytest.mark.gpus(1)
GOLDEN = json.loads((ROOT / "tests/golden/exact.json").read_text())


@pytest.mark.cuda_here
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize("model", exact_probe.MODELS)
@pytest.mark.parametrize("together", [True, False])
@pytest.mark.parametrize("kernels", ["compiled", "python"])
def test_the_golden_hashes_of_the_cpu(model, optimizer, together, kernels, monkeypatch):
    monkeypatch.setenv(KERNELS, kernels)
    weights, _ = exact_probe.train(model, optimizer, 2, together=together, device="cuda")
    assert weights == GOLDEN[f"{model} {optimizer}"]


@pytest.mark.cuda_here
@pytest.mark.parametrize("model", exact_probe.MODELS)
@pytest.mark.parametrize("kernels", ["compiled", "python"])
def test_products_of_integers_give_the_golden_hashes_of_the_cpu(model, kernels, monkeypatch):
    if torch.cuda.get_device_capability() < (7, 5):
        pytest.skip("this GPU has no products of 8-bit integers")
    device = torch.device("cuda", torch.cuda.current_device())
    monkeypatch.setenv(KERNELS, kernels)
    monkeypatch.setenv(PRODUCTS, "int8")
    for least in ("LEAST", "LEAST_SIDE"):
        monkeypatch.setattr(integer_products, least, 1)
    integer_products.start([device])
    assert integer_products.are_used(device)
    weights, _ = exact_probe.train(model, "adamw", 2, device=str(device))
    integer_products.start([])
    assert weights == GOLDEN[f"{model} adamw"]


@pytest.mark.cuda_here
@pytest.mark.parametrize("function", [*elementary.FUNCTIONS, activations.gelu, activations.gelu_slope])
def test_functions_have_the_bits_of_the_cpu(function):
    bits = torch.arange(0, 2**32, 9973, dtype=torch.int64).to(torch.int32)
    x = bits.view(torch.float32).double()
    here, there = function(x), function(x.cuda()).cpu()
    assert torch.equal(here.isnan(), there.isnan())
    assert torch.equal(here.nan_to_num(0.0).view(torch.int64), there.nan_to_num(0.0).view(torch.int64))


@pytest.mark.cuda_here
def test_compiled_kernels_have_the_bits_of_the_cpu():
    devices = [torch.device("cuda", index) for index in range(torch.cuda.device_count())]
    assert [check_kernels.start(device) for device in devices] == [None] * len(devices)
    x = torch.arange(0, 2**32, 9973, dtype=torch.int64).to(torch.int32).view(torch.float32)
    for function, device in product(OF_NUMBERS, devices):
        found = mapped(function, x.to(device))
        with using(None):
            assert found is None or digest([found.cpu()]) == digest([function(x.double()).float()]), function.__name__


@pytest.mark.cuda_here
def test_the_self_test_passes_on_every_gpu_and_between_them():
    devices = [torch.device("cuda", index) for index in range(torch.cuda.device_count())]
    assert [check.wrong_cases(device, cases.CASES) for device in devices] == [[]] * len(devices)
    assert [pair for pair in permutations(devices, 2) if not check.arrives(*pair)] == []


@pytest.mark.cuda_here
def test_the_self_test_finds_shorter_products(monkeypatch):
    monkeypatch.setattr(cases, "exact_matmul", lambda a, b: (a.float() @ b.float()).double())
    products = [name for name in cases.CASES if name.startswith("product ") and "float32" not in name]
    assert check.wrong_cases(torch.device("cuda", 0), products) == products


@pytest.mark.cuda_here
@pytest.mark.parametrize("shape", [(64, 1000, 32), (1, 1, 1), (257, 4097, 3), (768, 8192, 640)])
def test_products_have_the_bits_of_the_cpu(shape):
    torch.manual_seed(0)
    rows, terms, columns = shape
    a, b = torch.randn(rows, terms), torch.randn(terms, columns).exp()
    assert torch.equal(matmul(a, b), matmul(a.cuda(), b.cuda()).cpu())


@pytest.mark.timeout(1800)
def test_every_operation_has_the_bits_of_the_cpu():
    """All that exact computes of PyTorch's own test database, forward and backward; in a process of its own, because
    the database freezes PyTorch's switches."""
    script = ROOT / "tests/numerics/operations_on_gpu.py"
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout)
    assert found["computed"] > 3000
    assert found["different"] == {}


def trainable(params, folder, device):
    card = read_card(folder / "card.json")
    placement, split = place("single", params, "exact", Devices(gpus=int(device == "cuda"), cores=1))
    setup = Setup(params, "exact", card, split=split, worker=make_worker(placement, params.train))
    setup.enter_process()
    made = setup.trainable(setup.place(setup.build()), setup.batches(setup.load(folder)))
    made.reset()
    return made


def steps(made, start, stop):
    return made.mean_losses(made.run(start, made.rates(start, stop), StepClock(made.worker.device)))


@pytest.mark.cuda_here
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize(("first", "then"), [("cpu", "cuda"), ("cuda", "cpu"), ("cuda", "cuda")])
def test_a_checkpoint_goes_on_on_another_device(first, then, optimizer, data_dir, tmp_path):
    raw = small("tokens", numerics=["exact"], optimizer={"name": optimizer, "lr": 0.003}, clip_grad_norm=1.0)
    params = parse_params(raw)
    folder = data_dir(params)
    whole = trainable(params, folder, "cpu")
    expected = steps(whole, 0, 8)
    begun, kept = trainable(params, folder, first), Checkpoints("one", 0, tmp_path)
    losses = steps(begun, 0, 4)
    tensors, state = begun.state_dict()
    kept.save(4, tensors, CheckpointRecord(state=state, seconds=1.0, resumed=(), place="here", elsewhere=False))
    tensors, record = kept.load(4)
    other = trainable(params, folder, then)
    other.load_state_dict(tensors, record.state)
    assert losses + steps(other, 4, 8) == expected
    assert weights_digest(other.model) == weights_digest(whole.model)
    kept.delete()


def train(stage, strategy, data, *arguments, **environ):
    """Hashes of weights and losses."""
    stage.train_fresh(data, strategy, "--numerics", "exact", *arguments, **environ)
    return [sha256(stage.folder / "out" / name) for name in ("model.safetensors", "losses.csv")]


@pytest.fixture(scope="module")
def of_the_cpu():
    """Hashes by task, each made once."""
    return {}


MORE = "one more than there are"


@pytest.mark.shares_a_gpu
@pytest.mark.parametrize(("strategy", "count"), [("single", 1), ("ddp", 1), *product(("dp", "ddp"), (2, 3, MORE))])
@pytest.mark.parametrize("task", list(MODEL_OF_TASK))
def test_trainings_have_the_bits_of_the_cpu(task, strategy, count, stage, data_dir, of_the_cpu):
    """Also when DataParallel and DistributedDataParallel share GPUs, in numbers that do not divide the shards."""
    raw = small(task, oversubscribe=True, optimizer={"name": "adamw", "lr": 0.003}) | {"exact": {"shards": 16}}
    params = stage.write_params(raw)
    data = data_dir(params)
    if task not in of_the_cpu:
        of_the_cpu[task] = train(stage, "single", data, CUDA_VISIBLE_DEVICES="")
    number = count_gpus() + 1 if count == MORE else count
    if count == MORE and number <= 3:
        pytest.skip(f"{number} devices are another case")
    if number > params.exact.shards:
        pytest.skip(f"{number} devices are more than there are shards")
    arguments = () if strategy == "single" else ("--num-devices", str(number))
    assert train(stage, strategy, data, *arguments) == of_the_cpu[task]


@pytest.mark.parametrize("task", list(MODEL_OF_TASK))
def test_an_evaluation_has_the_bits_of_the_cpu(task, stage, data_dir):
    params = stage.write_params(small(task))
    data = data_dir(params)
    train(stage, "single", data)
    found = []
    for environ in ({"CUDA_VISIBLE_DEVICES": ""}, {}):
        done = stage.fresh("evaluate", "out", "--data-dir", str(data), **environ)
        assert done.returncode == 0, done.stderr
        found.append(json.loads((stage.folder / "reports/evaluation/out.json").read_text()))
    assert found[0] == found[1]
