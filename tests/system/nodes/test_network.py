"""What a slow network does to a training over machines, and what the record says of it."""

import json
from pathlib import Path
from statistics import median

from node_fixtures import all_end, checkout, needs_machines, network  # noqa: F401 - two fixtures

from conftest import small

pytestmark = needs_machines

RATE, BYTES_PER_SECOND = "100mbit", 12.5e6


def test_a_slow_network_is_in_the_seconds_of_a_step_over_machines(checkout, network):
    """A step sends every gradient each way between two machines, for which the link needs some time at least.

    What it does to speed-up and bound is measured by benchmarks/nodes.py.
    """
    model = {"name": "wide_mlp", "kwargs": {"hidden": [512, 512]}}
    checkout.prepare(small(numerics=["fast"], model=model, repeats=2))
    nodes = network(2)
    for node in nodes:  # else four workers would share this host's cores, which are no speed-up
        node.disks[Path("/proc/sys/kernel/random/boot_id")] = checkout.folder / f"{node.name}.id"
        (checkout.folder / f"{node.name}.id").write_text(f"{node.name}\n")
        node.limit(RATE)
    options = ["--no-tracking", "--out-dir", "out", "--num-devices", 2]
    all_end(checkout.train_on(nodes, *options, numerics="fast"))
    record = json.loads((checkout.folder / "out/run.json").read_text())
    measurement = record["measurement"]
    steps = {
        name: median(map(sum, repeats)) / measurement["slice_steps"]
        for name, repeats in measurement["chunk_seconds"].items()
    }
    assert steps.keys() == {"strategy", "single", "share", "together", "node"}
    assert steps["strategy"] > 0.9 * 4 * record["model_parameters"] / BYTES_PER_SECOND  # a bucket of tokens is free
    timing = json.loads((checkout.folder / "out/timing.json").read_text())
    assert timing["bound"]["median"] > timing["speedup"]["median"]  # the network is no part of the bound
