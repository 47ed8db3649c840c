import pytest

from samebits.batch_split import BatchSplit
from samebits.errors import HostError, UserError
from samebits.params import parse_params
from samebits.remarks import FewerDevices, Ring
from samebits.strategies.placement import Devices
from samebits.training.placement import not_applied, place
from samples import placed

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


def params_of(train):
    return parse_params({"train": {"global_batch_size": 256, **train}})


@pytest.mark.parametrize(("strategy", "train", "gpus", "cores", "expected"), CASES)
def test_place(strategy, train, gpus, cores, expected):
    placement, _ = placed(strategy, params_of(train), gpus=gpus, cores=cores)
    kinds = [label.kind for label in placement.labels]
    where = (placement.device_type, placement.devices_used, placement.world_size, placement.devices, placement.backend)
    assert (*where, kinds) == expected
    assert placement.may_speed_up == (placement.devices_used > 1 and not kinds)


def test_auto_takes_the_largest_divisor_and_says_so():
    placement, _ = placed("ddp", parse_params({"train": {"global_batch_size": 64}}), gpus=7)
    assert placement.num_devices == 4
    note, ring = placement.notes
    assert ring == Ring()
    assert note == FewerDevices(devices=4, available=7, units=64, unit="samples")


@pytest.mark.parametrize(
    ("numerics", "gpus", "deterministic", "notes", "labels"),
    [
        ("fast", 2, True, ["ring"], []),
        ("fast", 2, False, [], ["any_order"]),
        ("fast", 0, False, [], []),
        ("fast", 1, False, [], ["one_device"]),
        ("exact", 2, True, [], []),
        ("exact", 2, False, [], []),
    ],
)
def test_what_nccl_may_choose_is_said_where_it_matters(numerics, gpus, deterministic, notes, labels):
    params = parse_params({"train": {"ddp": {"deterministic": deterministic}}})
    placement, _ = placed("ddp", params, numerics=numerics, gpus=gpus)
    assert [[one.kind for one in remarks] for remarks in (placement.notes, placement.labels)] == [notes, labels]


def test_dp_uses_fewer_devices_than_it_has_where_chunk_does():
    params = parse_params(
        {"data": {"num_samples": 8}, "train": {"global_batch_size": 8, "num_devices": 5, "strategies": ["dp"]}}
    )
    placement, _ = placed("dp", params, gpus=5)
    assert (placement.num_devices, placement.devices_used) == (5, 4)
    assert [label.kind for label in placement.labels] == ["unused_devices"]
    assert placement.may_speed_up


@pytest.mark.parametrize(
    ("rows", "devices", "parts"), [(256, 3, 3), (8, 5, 4), (8, 6, 4), (8, 7, 4), (8, 8, 8), (1, 4, 1)]
)
def test_chunks_is_what_torch_does(rows, devices, parts):
    import torch

    split = BatchSplit(samples=rows, shards=None, grad_accum_steps=1, devices=devices)
    chunks = torch.arange(rows).chunk(devices)
    assert split.busy_devices == parts == len(chunks)
    assert split.rows_per_device == max(map(len, chunks))


@pytest.mark.parametrize(
    ("strategy", "train", "error", "message"),
    [
        ("ddp", {"num_devices": 4}, HostError, "train.num_devices: got 4, this host has 2 CPU cores"),
        ("dp", {"num_devices": 4}, HostError, "train.num_devices: got 4, this host has 2 CPU cores"),
        ("dp", {"num_devices": 512, "strategies": ["dp"], "oversubscribe": True}, UserError, "accepts at most 256"),
        ("ddp", {"num_devices": 3, "oversubscribe": True}, UserError,
         "train.num_devices: got 3, accepts a divisor of the 256 samples that ddp shares out. hint: change train"),
        ("ddp", {"num_devices": 128, "grad_accum_steps": 4, "oversubscribe": True}, UserError,
         "train.num_devices: got 128 devices for 64 samples, accepts at most 64. hint: raise train.global_batch"),
    ],
)  # fmt: skip
def test_refused(strategy, train, error, message):
    with pytest.raises(error) as caught:
        placed(strategy, params_of({"numerics": ["fast"], **train}), gpus=0)
    assert message in str(caught.value)


# strategy, GPUs, numerics, whether a GPU has TF32, train settings -> why each of them is not applied
NOT_APPLIED = [
    ("dp", 0, "fast", False, {"compile": True}, {"compile": "dp_is_not_compiled"}),
    ("ddp", 0, "fast", False, {"compile": True}, {}),
    ("ddp", 2, "exact", True, {"compile": True, "precision": "bf16"},
     {"compile": "exact_is_not_compiled", "precision": "exact_is_fp32"}),
    ("single", 0, "fast", False, {"precision": "tf32"}, {"precision": "no_tf32_on_cpu"}),
    ("single", 1, "fast", False, {"precision": "tf32"}, {"precision": "gpu_before_tf32"}),
    ("single", 1, "fast", True, {"precision": "tf32"}, {}),
    ("single", 0, "fast", False, {"optimizer": {"name": "adamw"}}, {}),
    ("single", 0, "fast", False, {"optimizer": {"name": "adamw", "momentum": 0.5}},
     {"optimizer.momentum": "adamw_has_no_momentum"}),
    ("single", 0, "fast", False, {"optimizer": {"name": "adamw", "momentum": 0.0}}, {}),
    ("single", 0, "fast", False, {"optimizer": {"name": "rmsprop", "momentum": 0.5}},
     {"optimizer.momentum": "momentum_of_sgd_alone"}),
    ("single", 0, "fast", False, {"num_devices": 2, "strategies": ["single"]},
     {"num_devices": "single_has_one_device"}),
    ("single", 0, "fast", False, {"num_devices": 2, "strategies": ["single", "ddp"]}, {}),
    ("single", 0, "fast", False, {"num_devices": 1}, {}),
    ("ddp", 0, "fast", False, {"grad_accum_steps": 2, "ddp": {"static_graph": True}},
     {"ddp.static_graph": "static_graph_with_accumulation"}),
    ("ddp", 0, "fast", False, {"ddp": {"static_graph": True}}, {}),
    ("single", 0, "fast", False, {"grad_accum_steps": 2, "ddp": {"static_graph": True}}, {}),
    ("ddp", 0, "fast", False, {"ddp": {"sync_batchnorm": True}}, {"ddp.sync_batchnorm": "sync_on_cpu"}),
    ("ddp", 2, "fast", False, {"ddp": {"sync_batchnorm": True}}, {}),
    ("dp", 0, "fast", False, {"ddp": {"sync_batchnorm": True}}, {}),
    ("single", 1, "fast", True, {"cuda_graphs": True}, {}),
    ("ddp", 2, "fast", True, {"cuda_graphs": True}, {}),
    ("single", 0, "fast", True, {"cuda_graphs": True}, {"cuda_graphs": "graphs_on_cpu"}),
    ("dp", 2, "fast", True, {"cuda_graphs": True}, {"cuda_graphs": "graphs_under_dp"}),
    ("dp", 1, "fast", True, {"cuda_graphs": True}, {"cuda_graphs": "graphs_under_dp"}),
    ("single", 1, "exact", True, {"cuda_graphs": True}, {}),
    ("single", 0, "exact", True, {"cuda_graphs": True}, {"cuda_graphs": "graphs_on_cpu"}),
    ("dp", 2, "exact", True, {"cuda_graphs": True, "compile": True},
     {"cuda_graphs": "graphs_under_dp", "compile": "exact_is_not_compiled"}),
    ("ddp", 2, "exact", True, {"cuda_graphs": True, "ddp": {"sync_batchnorm": True}}, {}),
    ("ddp", 2, "fast", True, {"cuda_graphs": True, "compile": True}, {"cuda_graphs": "graphs_with_compile"}),
    ("single", 1, "fast", True, {"cuda_graphs": True, "grad_accum_steps": 2},
     {"cuda_graphs": "graphs_with_accumulation"}),
]  # fmt: skip


@pytest.mark.parametrize(("strategy", "gpus", "numerics", "tf32", "train", "expected"), NOT_APPLIED)
def test_not_applied(strategy, gpus, numerics, tf32, train, expected):
    params = parse_params({"train": train})
    placement, _ = placed(strategy, params, gpus=gpus, numerics=numerics)
    said = not_applied(params, placement, numerics, tf32=tf32)
    assert said == {f"train.{name}": why for name, why in expected.items()}


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
    params = params_of({"numerics": ["exact"], **train})
    placement, split = placed(strategy, params, gpus=gpus, cores=cores, numerics="exact")
    assert (placement.devices_used, placement.rows_per_device) == expected
    assert split.ranks == placement.world_size


def test_exact_takes_no_more_devices_than_shards():
    params = parse_params({"train": {"num_devices": 9, "numerics": ["fast"], "global_batch_size": 288}})
    with pytest.raises(UserError, match="got 9 devices for 8 shards, accepts at most 8"):
        placed("ddp", params, gpus=9, numerics="exact")


def nodes(*counts, kind="gpus", **by_node):
    """Machines with so many devices each."""
    made = []
    for i, count in enumerate(counts):
        own = {"machine": f"machine {i}", **{name: values[i] for name, values in by_node.items()}}
        made.append(Devices(gpus=count if kind == "gpus" else 0, cores=count, name=f"n{i}", **own))
    return made


# machines, train settings, numerics -> devices by machine, devices by rank, backend, label kinds, note kinds
OVER_NODES = [
    (nodes(4, 4), {}, "fast", ((4, 4), (0, 1, 2, 3, 0, 1, 2, 3), "nccl", [], ["ring"])),
    (nodes(4, 2), {}, "exact", ((4, 2), (0, 1, 2, 3, 0, 1), "nccl", [], [])),
    (nodes(16, 16, kind="cores"), {}, "exact", ((2, 2), (0, 1, 0, 1), "gloo", [], [])),
    (nodes(2, 2, 2, kind="cores"), {"global_batch_size": 27, "numerics": ["fast"]}, "fast",
     ((1, 1, 1), (0, 0, 0), "gloo", [], ["fewer_devices"])),
    (nodes(8, 8), {"global_batch_size": 24}, "exact",
     ((4, 4), (0, 1, 2, 3, 0, 1, 2, 3), "nccl", [], ["fewer_devices"])),
    (nodes(4, 4, wanted=(1, 2)), {}, "exact", ((1, 2), (0, 0, 1), "nccl", [], [])),
    (nodes(1, 1, wanted=(2, 2)), {"oversubscribe": True}, "exact",
     ((2, 2), (0, 0, 0, 0), "gloo", ["oversubscribed"] * 2, [])),
    # two pods with GPUs of their own, and two that share one
    (nodes(2, 2, machine="aa", uuids=(("u0", "u1"), ("u2", "u3"))), {}, "exact",
     ((2, 2), (0, 1, 0, 1), "nccl", [], [])),
    (nodes(2, 2, machine="aa", uuids=(("u0", "u1"), ("u1", "u2"))), {}, "exact",
     ((2, 2), (0, 1, 0, 1), "gloo", ["oversubscribed"], [])),
    (nodes(2, 2, kind="cores", wanted=(2, 2), machine="aa"), {}, "exact",
     ((2, 2), (0, 1, 0, 1), "gloo", ["oversubscribed"], [])),
]  # fmt: skip


@pytest.mark.parametrize(("machines", "train", "numerics", "expected"), OVER_NODES)
def test_place_over_machines(machines, train, numerics, expected):
    batch = 24 if numerics == "fast" else 256
    placement, split = place("ddp", params_of({"global_batch_size": batch, **train}), numerics, *machines)
    kinds = [[one.kind for one in remarks] for remarks in (placement.labels, placement.notes)]
    assert (placement.devices_by_node, placement.devices, placement.backend, *kinds) == expected
    assert split.ranks == placement.world_size == placement.devices_used == sum(placement.devices_by_node)


@pytest.mark.parametrize(
    ("strategy", "machines", "numerics", "error", "message"),
    [
        ("single", nodes(1, 1), "exact", UserError, "single uses one machine, and 2 were started"),
        ("dp", nodes(1, 1, 1), "exact", UserError, "dp uses one machine, and 3 were started"),
        (
            "ddp",
            nodes(4, 2),
            "fast",
            UserError,
            "fast needs as many devices on each machine, and they have: n0 4, n1 2",
        ),
        ("ddp", nodes(2, 2, wanted=(4, 4)), "exact", HostError, "train.num_devices: got 4, n0 has 2 GPUs"),
        ("ddp", nodes(*[1] * 9), "exact", UserError, "9 machines have 9 devices for 8 shards of a batch"),
        ("ddp", nodes(*[1] * 7), "fast", UserError, "7 machines have 7 devices for 256 samples of a batch"),
    ],
)
def test_what_machines_cannot_share_is_refused(strategy, machines, numerics, error, message):
    with pytest.raises(error, match=message):
        place(strategy, params_of({}), numerics, *machines)
