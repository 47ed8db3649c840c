import pytest

from samebits.errors import HostError, UserError
from samebits.host import visible
from samebits.params import parse_params
from samebits.placement import chunks, not_applied, place

# strategy, train settings, GPUs, cores -> device type, devices used, world size, devices, backend, label kinds
CASES = [
    ("single", {}, 0, 2, ("cpu", 1, 1, (0,), None, [])),
    ("single", {}, 4, 2, ("cuda", 1, 1, (0,), None, [])),
    ("dp", {}, 0, 2, ("cpu", 1, 1, (0,), None, ["fallback"])),
    ("dp", {}, 1, 2, ("cuda", 1, 1, (0,), None, ["fallback"])),
    ("dp", {}, 4, 2, ("cuda", 4, 1, (0, 1, 2, 3), None, [])),
    ("dp", {"num_devices": 2, "oversubscribe": True}, 1, 2, ("cuda", 2, 1, (0, 0), None, ["oversubscribed"])),
    ("ddp", {}, 0, 16, ("cpu", 2, 2, (0, 1), "gloo", [])),
    ("ddp", {}, 0, 1, ("cpu", 1, 1, (0,), "gloo", ["one_device"])),
    ("ddp", {}, 4, 2, ("cuda", 4, 4, (0, 1, 2, 3), "nccl", [])),
    ("ddp", {"num_devices": 4}, 0, 4, ("cpu", 4, 4, (0, 1, 2, 3), "gloo", [])),
    ("ddp", {"num_devices": 4, "oversubscribe": True}, 2, 2, ("cuda", 4, 4, (0, 1, 0, 1), "gloo", ["oversubscribed"])),
    ("ddp", {"num_devices": 4, "oversubscribe": True}, 0, 2, ("cpu", 4, 4, (0, 1, 2, 3), "gloo", ["oversubscribed"])),
]  # fmt: skip


@pytest.mark.parametrize(("strategy", "train", "gpus", "cores", "expected"), CASES)
def test_place(strategy, train, gpus, cores, expected):
    placement = place(strategy, parse_params({"train": train}).train, gpus=gpus, cores=cores)
    kinds = [label.kind for label in placement.labels]
    found = (placement.device_type, placement.devices_used, placement.world_size, placement.devices, placement.backend)
    assert (*found, kinds) == expected
    assert placement.may_speed_up == (placement.devices_used > 1 and not kinds)


def test_auto_takes_the_largest_divisor_and_says_so():
    train = parse_params({"train": {"global_batch_size": 64}}).train
    placement = place("ddp", train, gpus=7, cores=2)
    assert placement.num_devices == 4
    assert placement.notes == ("ddp: 4 of 7 devices, the most that divide 64 samples equally",)


def test_dp_uses_fewer_devices_than_it_has_where_chunk_does():
    train = parse_params(
        {"data": {"num_samples": 8}, "train": {"global_batch_size": 8, "num_devices": 5, "strategies": ["dp"]}}
    ).train
    placement = place("dp", train, gpus=5, cores=2)
    assert (placement.num_devices, placement.devices_used) == (5, 4)
    assert [label.kind for label in placement.labels] == ["unused_devices"]
    assert placement.may_speed_up


@pytest.mark.parametrize(
    ("rows", "devices", "parts"), [(256, 3, 3), (8, 5, 4), (8, 6, 4), (8, 7, 4), (8, 8, 8), (1, 4, 1)]
)
def test_chunks_is_what_torch_does(rows, devices, parts):
    import torch

    assert chunks(rows, devices) == parts == len(torch.arange(rows).chunk(devices))


@pytest.mark.parametrize(
    ("strategy", "train", "error", "message"),
    [
        ("ddp", {"num_devices": 4}, HostError, "train.num_devices: got 4, this host has 2 CPU cores"),
        ("dp", {"num_devices": 4}, HostError, "train.num_devices: got 4, this host has 2 CPU cores"),
        ("dp", {"num_devices": 512, "strategies": ["dp"], "oversubscribe": True}, UserError, "accepts at most 256"),
    ],
)
def test_refused(strategy, train, error, message):
    with pytest.raises(error) as caught:
        place(strategy, parse_params({"train": {"numerics": ["fast"], **train}}).train, gpus=0, cores=2)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("strategy", "train", "keys"),
    [
        ("dp", {"compile": True}, ["train.compile"]),
        ("ddp", {"compile": True}, []),
        ("single", {"precision": "tf32"}, ["train.precision"]),
        ("single", {"optimizer": {"name": "adamw"}}, ["train.optimizer.momentum"]),
        ("single", {"optimizer": {"name": "adamw", "momentum": 0.0}}, []),
        ("single", {"num_devices": 2}, ["train.num_devices"]),
        ("ddp", {"grad_accum_steps": 2, "ddp": {"static_graph": True}}, ["train.ddp.static_graph"]),
        ("ddp", {"ddp": {"static_graph": True}}, []),
    ],
)
def test_not_applied(strategy, train, keys):
    settings = parse_params({"train": train}).train
    assert list(not_applied(settings, place(strategy, settings, gpus=0, cores=2), "fast", tf32=False)) == keys


EXACT = [
    ("ddp", {"num_devices": 3, "oversubscribe": True}, 0, 2, (3, 96)),
    ("ddp", {"num_devices": 3, "oversubscribe": True, "grad_accum_steps": 2}, 0, 2, (3, 64)),
    ("ddp", {}, 5, 8, (5, 64)),
    ("ddp", {}, 12, 8, (8, 32)),
    ("dp", {}, 3, 8, (3, 96)),
    ("dp", {}, 5, 8, (4, 64)),
    ("single", {"grad_accum_steps": 16}, 0, 2, (1, 32)),
]


@pytest.mark.parametrize(("strategy", "train", "gpus", "cores", "expected"), EXACT)
def test_exact_shares_out_shards(strategy, train, gpus, cores, expected):
    settings = parse_params({"train": {"numerics": ["exact"], **train}}).train
    placement = place(strategy, settings, gpus=gpus, cores=cores, shards=8)
    assert (placement.devices_used, placement.rows_per_device) == expected


def test_exact_takes_no_more_devices_than_shards():
    settings = parse_params({"train": {"num_devices": 9, "numerics": ["fast"], "global_batch_size": 288}}).train
    with pytest.raises(UserError, match="got 9 devices for 8 shards, accepts at most 8"):
        place("ddp", settings, gpus=9, cores=2, shards=8)


def test_what_exact_does_not_apply():
    settings = parse_params({"train": {"compile": True, "precision": "bf16"}}).train
    found = not_applied(settings, place("ddp", settings, gpus=2, cores=2, shards=8), "exact", tf32=True)
    assert list(found) == ["train.compile", "train.precision"]


@pytest.mark.parametrize(("tf32", "keys"), [(True, []), (False, ["train.precision"])])
def test_tf32_needs_a_gpu_that_has_it(tf32, keys):
    settings = parse_params({"train": {"precision": "tf32"}}).train
    assert list(not_applied(settings, place("single", settings, gpus=1, cores=2), "fast", tf32=tf32)) == keys


@pytest.mark.parametrize(
    ("setting", "expected"),
    [
        (None, [0, 1, 2]), ("", []), ("1", [1]), ("2,0", [2, 0]), ("0,9,1", [0]), ("-1", []), ("0,0", []),
        ("GPU-b", [1]), ("GPU-", []), ("GPU-c, GPU-a", [2, 0]), ("x", []),
    ],
)  # fmt: skip
def test_cuda_visible_devices(setting, expected):
    assert visible(["GPU-a", "GPU-b", "GPU-c"], setting) == expected


def test_a_slice_of_a_gpu_is_refused():
    with pytest.raises(HostError, match=r"CUDA_VISIBLE_DEVICES is MIG-1: slices"):
        visible(["GPU-a"], "MIG-1")
