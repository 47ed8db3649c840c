"""The strategies in one process: what they hand to PyTorch, and what they do with random streams."""

import sys
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._utils import ExceptionWrapper

from samebits.errors import HostError, UserError
from samebits.params import parse_params
from samebits.strategies import STRATEGIES, replicas
from samebits.strategies.ddp import DDP, DDPOptions
from samebits.strategies.dp import DP
from samebits.strategies.interface import Wrapping
from samebits.strategies.placement import Devices
from samebits.training import collectives
from samebits.training.placement import place
from samebits.training.worker import Worker, make_worker
from samples import placed

PARAMS = parse_params({"train": {"oversubscribe": True, "num_devices": 2}})
CPU = torch.device("cpu")
DATA_PARALLEL = sys.modules["torch.nn.parallel.data_parallel"]  # the package has a function of that name


def make(strategy, *, gpus, params=PARAMS):
    return make_worker(placed(strategy, params, gpus=gpus)[0], params.train)


@pytest.fixture
def as_rank(monkeypatch, port):
    """Make this process a rank of so many."""

    def be(rank, world_size, **environ):
        meeting = {"WORLD_SIZE": world_size, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        for name, value in {"RANK": rank, "LOCAL_RANK": rank, **meeting, **environ}.items():
            monkeypatch.setenv(name, str(value))

    return be


def test_workers_that_torchrun_starts_again_find_nothing_of_those_before(as_rank, port):
    """Its store outlives them, with the keys by which they have told each other of what is done."""
    kept = dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
    for attempt in (0, 1):
        as_rank(0, 1, TORCHELASTIC_USE_AGENT_STORE=True, TORCHELASTIC_RESTART_COUNT=attempt)
        before = kept.num_keys()
        worker = make("ddp", gpus=0)
        worker.setup()
        worker.ranks.first_alone(lambda: None)
        worker.close()
        assert kept.num_keys() > before


@pytest.mark.parametrize(
    ("work", "late", "looks"), [(0.0, 0.0, 1), (0.001, 0.0004, 8), (0.02, 0.003, 40), (9, 0.05, 250)]
)
def test_ranks_soon_see_that_the_first_one_is_done(work, late, looks, as_rank, monkeypatch):
    """Their devices are idle meanwhile, and the work of a chunk takes a few milliseconds on a GPU."""
    as_rank(1, 2)
    ranks = make("ddp", gpus=0).ranks
    now, asked = [0.0], []
    ranks._store = SimpleNamespace(check=lambda keys: asked.append(keys) or now[0] >= work)
    clock = SimpleNamespace(monotonic=lambda: now[0], sleep=lambda seconds: now.__setitem__(0, now[0] + seconds))
    monkeypatch.setattr(collectives, "time", clock)
    assert ranks.first_alone(lambda: pytest.fail("it is another rank's")) is None
    assert now[0] - work <= late
    assert len(asked) <= looks


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_which_rank_a_worker_is(strategy, as_rank):
    as_rank(1, 2)
    made = make(strategy, gpus=0)
    assert (made.rank, made.world_size) == ((1, 2) if STRATEGIES[strategy].has_ranks else (0, 1))
    assert (made.device, made.cuda_devices) == (CPU, ())
    alone = made.alone()
    assert (alone.rank, alone.world_size, alone.compiles) == (made.rank, 1, STRATEGIES[strategy].compiles)


class Recorder(nn.Module):
    """Stands in for a wrapper that needs GPUs."""

    def __init__(self, module, *, forward_sync_buffers=None, **options):
        super().__init__()
        self.module, self.options = module, options | {"forward_sync_buffers": forward_sync_buffers}


@pytest.mark.parametrize(
    ("gpus", "count", "device_ids", "cuda_devices"),
    [(4, 4, [0, 1, 2, 3], (0, 1, 2, 3)), (2, 4, [0, 1, 0, 1], (0, 1)), (1, 2, [0, 0], (0,)), (0, 2, None, ())],
)
def test_what_dp_hands_to_its_wrapper(gpus, count, device_ids, cuda_devices, monkeypatch):
    monkeypatch.setattr(replicas, "Replicas", Recorder)
    params = parse_params({"train": {"oversubscribe": True, "num_devices": count}})
    worker = make("dp", gpus=gpus, params=params)
    module = nn.Linear(1, 1)
    wrapped = worker.wrap(module)
    assert wrapped.module is module
    cuda = device_ids and [torch.device("cuda", index) for index in device_ids]
    device = torch.device("cuda:0" if gpus else "cpu")
    assert (wrapped.options["device_ids"], worker.cuda_devices, worker.device) == (cuda, cuda_devices, device)


@pytest.mark.parametrize(
    ("ddp", "handed"),
    [
        ({}, {"static_graph": False, "bucket_cap_mb": 25}),
        ({"static_graph": True, "bucket_cap_mb": 7}, {"static_graph": True, "bucket_cap_mb": 7}),
        ({"forward_sync_buffers": False}, {"forward_sync_buffers": False}),
        ({"gradient_as_bucket_view": False}, {"gradient_as_bucket_view": False}),
    ],
)
def test_what_ddp_hands_to_its_wrapper(ddp, handed, as_rank, monkeypatch):
    monkeypatch.setattr(torch.nn.parallel, "DistributedDataParallel", Recorder)
    as_rank(3, 4)
    worker = make("ddp", gpus=2, params=parse_params({"train": {"num_devices": 4, "oversubscribe": True, "ddp": ddp}}))
    assert worker.device == torch.device("cuda:1")
    usual = {"static_graph": False, "bucket_cap_mb": 25, "gradient_as_bucket_view": True, "forward_sync_buffers": True}
    placed = {"device_ids": [torch.device("cuda:1")], "process_group": None}
    assert worker.wrap(nn.Linear(1, 1)).options == {**usual, **placed, **handed}


class Branches(nn.Module):
    """Takes its second layer or not, as its input says."""

    def __init__(self):
        super().__init__()
        self.always, self.sometimes = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        y = self.always(x)
        return self.sometimes(y) if x[0, 0] > 0 else y


def test_gradients_that_ddp_has_not_reduced_are_an_error_also_after_the_last_step(as_rank):
    """PyTorch says it at the next forward pass; also one micro-batch of several may have left the layer out."""
    as_rank(0, 1)
    worker = make("ddp", gpus=0)
    worker.setup()
    try:
        for signs in ([1.0], [-1.0, 1.0], [1.0, -1.0], [-1.0]):
            module = worker.wrap(Branches())
            for _ in range(2):  # of the warm-up: buckets are made anew after the first
                module(torch.ones(2, 4)).sum().backward()
            worker.require_reduced(module)
            for number, sign in enumerate(signs):
                with nullcontext() if number == len(signs) - 1 else worker.no_sync(module):
                    module(torch.full((2, 4), sign)).sum().backward()
            if signs[-1] > 0:
                worker.require_reduced(module)
                continue
            with pytest.raises(RuntimeError, match="Expected to have finished reduction"):
                worker.require_reduced(module)
    finally:
        worker.close()


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 8])
@pytest.mark.parametrize("start", [0, 6])
@pytest.mark.parametrize("length", [1, 7, 8])
def test_dp_divides_a_range_as_it_does_the_rows_beside_it(count, start, length, monkeypatch):
    def scatter_kwargs(inputs, kwargs, device_ids, dim):
        tensor, *others = inputs
        parts = tensor.chunk(len(device_ids), dim)
        return tuple((part, *others) for part in parts), tuple(kwargs for _ in parts)

    monkeypatch.setattr(DATA_PARALLEL, "scatter_kwargs", scatter_kwargs)
    wrapped = Worker([CPU], DP).wrap(nn.Identity())
    wrapped.dim = 0  # which it leaves unset where there is no GPU
    rows = range(start, start + length)
    parts, _ = wrapped.scatter((torch.tensor(rows), rows, 5), {}, [torch.device("cuda", i) for i in range(count)])
    assert [(list(numbers), step) for _, numbers, step in parts] == [(part.tolist(), 5) for part, _, _ in parts]
    assert [number for _, numbers, _ in parts for number in numbers] == list(rows)


class Refuses(nn.Module):
    def forward(self, inputs):
        if len(inputs) > 1:
            raise UserError("exact: model.0: no", hint="take another one")
        return inputs


@pytest.mark.parametrize("first", [1, 2])
def test_what_a_replica_raised_is_raised(first, monkeypatch):
    def parallel_apply(replicas, inputs, kwargs, devices):
        outputs = []
        for replica, arguments in zip(replicas, inputs, strict=True):
            try:
                outputs.append(replica(*arguments))
            except Exception:  # noqa: BLE001 - as PyTorch does
                outputs.append(ExceptionWrapper(where="in replica 1 on device 1"))
        for output in outputs:
            if isinstance(output, ExceptionWrapper):
                output.reraise()

    monkeypatch.setattr(DATA_PARALLEL, "parallel_apply", parallel_apply)
    wrapped = Worker([CPU], DP).wrap(Refuses())
    parts = [(torch.zeros(first),), (torch.zeros(2),)]
    with pytest.raises(UserError, match=r"exact: model\.0: no\. hint: take another one"):
        wrapped.parallel_apply([Refuses(), Refuses()], parts, [{}, {}])
    with pytest.raises(ValueError, match="shorter"):  # not a replica's
        wrapped.parallel_apply([Refuses(), Refuses()], [(torch.zeros(1),)], [{}, {}])


@pytest.mark.parametrize(("numerics", "deterministic"), [("fast", True), ("fast", False), ("exact", True)])
@pytest.mark.parametrize("chosen", [None, "", "ring", "Tree"])
def test_nccl_is_held_to_its_ring_where_the_placement_says_so(chosen, numerics, deterministic):
    """Not in exact, whose sums are the same in any order."""
    params = parse_params({"train": {"num_devices": 2, "ddp": {"deterministic": deterministic}}})
    placement, _ = place("ddp", params, numerics, Devices(gpus=2, cores=2))
    assert placement.backend == "nccl"
    held = numerics == "fast" and deterministic
    environ = {} if chosen is None else {"NCCL_ALGO": chosen}
    refused = r"NCCL_ALGO is Tree, and train\.ddp\.deterministic holds NCCL to Ring"
    with pytest.raises(UserError, match=refused) if held and chosen == "Tree" else nullcontext():
        DDP.prepare(placement, environ)
    assert environ.get("NCCL_ALGO") == (chosen or ("Ring" if held else chosen))


def test_the_environment_is_prepared_before_the_ranks_meet(as_rank, monkeypatch):
    as_rank(0, 2, NCCL_ALGO="Tree")
    monkeypatch.setattr(torch.cuda, "init", lambda: None)
    monkeypatch.setattr(torch.cuda, "set_device", lambda _: None)
    worker = make("ddp", gpus=2)
    with pytest.raises(UserError, match="NCCL_ALGO is Tree"):
        worker.setup()


def test_a_gpu_that_does_not_start_is_a_host_error(monkeypatch):
    def fail():
        raise torch.cuda.DeferredCudaCallError("CUDA call failed lazily")

    monkeypatch.setattr(torch.cuda, "init", fail)
    with pytest.raises(HostError, match="CUDA does not start on cuda:0: CUDA call failed lazily"):
        Worker([torch.device("cuda", 0)]).setup()


def test_random_streams_continue_where_they_stood():
    worker = Worker([CPU])
    worker.seed(1)
    state = worker.random_state()
    first = torch.rand(4)
    worker.set_random_state(state)
    assert torch.equal(torch.rand(4), first)
    worker.seed(2)
    assert not torch.equal(torch.rand(4), first)


def test_every_rank_has_its_own_stream(as_rank):
    drawn = []
    for rank in (0, 1):
        as_rank(rank, 2)
        make("ddp", gpus=0).seed(0)
        drawn.append(torch.rand(4).tolist())
    assert drawn[0] != drawn[1]


@pytest.mark.parametrize(("wanted", "device"), [(True, "cuda"), (False, "cuda"), (True, "cpu")])
def test_ddp_synchronizes_batch_norms_if_asked_to_on_gpus(wanted, device, monkeypatch):
    monkeypatch.setattr(nn.parallel, "DistributedDataParallel", lambda module, **_: module)
    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    parameters = [*map(id, model.parameters())]
    settings = DDPOptions(sync_batchnorm=wanted)
    wrapped = DDP.wrap(model, Wrapping(devices=[torch.device(device, 0)], settings=settings))
    synced = isinstance(wrapped[1], nn.SyncBatchNorm)
    assert (synced, [*map(id, wrapped.parameters())]) == (wanted and device == "cuda", parameters)
