"""What a slow network does to a training over machines, and what the record says of it."""

import json
from pathlib import Path
from statistics import median

from node_fixtures import checkout, needs_machines, network, run_here  # noqa: F401 - two fixtures

from conftest import small

pytestmark = needs_machines

BYTES_PER_SECOND = 12.5e6  # 100 Mbit/s


def step_seconds(checkout, out):
    """Of each slice, the median over its repeats."""
    measurement = json.loads((checkout.folder / out / "run.json").read_text())["measurement"]
    steps = measurement["slice_steps"]
    return {name: median(map(sum, repeats)) / steps for name, repeats in measurement["chunk_seconds"].items()}


def test_a_slow_network_is_seen_in_its_share_and_not_in_the_bound(checkout, network):
    """A step sends every gradient each way between two machines, for which the link needs some time at least."""
    model = {"name": "wide_mlp", "kwargs": {"hidden": [512, 512]}}
    checkout.write_params(small(numerics=["fast"], model=model, repeats=2))
    assert run_here(checkout, "prepare") == 0
    nodes = network(2)
    for node in nodes:  # else four workers would share this host's cores, which are no speed-up
        node.disks[Path("/proc/sys/kernel/random/boot_id")] = checkout.folder / f"{node.name}.id"
        (checkout.folder / f"{node.name}.id").write_text(f"{node.name}\n")
    figures = {}
    for rate in (None, "100mbit"):
        for node in nodes:
            if rate:
                node.limit(rate)
        out = f"runs/{rate}"
        options = ["--no-tracking", "--out-dir", out, "--num-devices", 2]
        ended = [process.wait() for process in checkout.train_on(nodes, *options, numerics="fast")]
        assert [code for code, *_ in ended] == [0, 0], ended
        figures[rate] = step_seconds(checkout, out)
    parameters = json.loads((checkout.folder / "runs/100mbit/run.json").read_text())["model_parameters"]
    least = 4 * parameters / BYTES_PER_SECOND
    fast, slow = figures[None], figures["100mbit"]
    assert slow["strategy"] - slow["node"] > 0.9 * least > 2 * fast["strategy"]
    for name in ("single", "share", "together", "node"):  # nothing of them crosses the link
        assert slow[name] < least / 2
    timing = json.loads((checkout.folder / "runs/100mbit/timing.json").read_text())
    assert timing["speedup"]["high"] < 1 < timing["bound"]["median"]
