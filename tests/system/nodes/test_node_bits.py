"""Exact bits over machines: the hash of one process, however many machines there are and whatever they are."""

import json
import shutil
import sys

import pytest
from node_fixtures import all_end, checkout, needs_machines, network, params_of  # noqa: F401 - two fixtures

pytestmark = needs_machines

OLD = {"ATEN_CPU_CAPABILITY": "default", "MKL_ENABLE_INSTRUCTIONS": "SSE4_2", "MKL_CBWR": "COMPATIBLE"}
MIDDLE = {"ATEN_CPU_CAPABILITY": "avx2", "MKL_ENABLE_INSTRUCTIONS": "AVX", "ONEDNN_MAX_CPU_ISA": "SSE41"}
INSTRUCTION_SETS = [{}, OLD, MIDDLE]


def prepared(checkout, model, **train):
    """A checkout with data and a user's model."""
    checkout.prepare(params_of(model, checkout.folder, **{"numerics": ["exact"], "repeats": 2, **train}))


@pytest.mark.parametrize(
    ("model", "layouts"),
    [
        ("mlp", [(1, 1), (2, 2), (1, 1, 1), (2, 1), (1, 2, 2), (2, 2, 2)]),
        ("gpt", [(1, 1), (2, 2), (1, 1, 1), (2, 2, 2)]),
        ("users", [(1, 1), (2, 2), (1, 1, 1), (2, 2, 2)]),
    ],
)
def test_exact_gives_the_bits_of_one_process(model, layouts, checkout, network):
    """With one and two workers each, unequal ones too; from the second layout on with unlike instructions."""
    prepared(checkout, model)
    expected = checkout.train_alone()
    nodes = network(3)
    for number, layout in enumerate(layouts):
        out = f"runs/over-{len(layout)}-{number}"
        started = [
            checkout.train(
                node, "--nodes", len(layout), "--node-rank", rank, "--master", "n0", "--out-dir", out, "--no-tracking",
                "--num-devices", layout[rank], environ=INSTRUCTION_SETS[(rank * number) % 3],
            )
            for rank, node in enumerate(nodes[: len(layout)])
        ]  # fmt: skip
        ended = all_end(started)
        assert [stdout for _, stdout, _ in ended[1:]] == [""] * (len(layout) - 1)
        assert checkout.weights(out) == expected, layout
        record = json.loads((checkout.folder / out / "run.json").read_text())
        assert record["placement"]["devices_by_node"] == list(layout)
        assert [node["name"] for node in record["nodes"]] == [f"n{i}" for i in range(len(layout))]


def test_machines_need_no_common_disk(checkout, network, tmp_path):
    """The other one has sources alone: it makes the data itself, and writes no results."""
    prepared(checkout, "mlp")
    nodes = network(2)
    other = tmp_path / "disk of n1"
    shutil.copytree(checkout.folder, other)
    shutil.rmtree(other / "data")
    nodes[1].disks[checkout.folder] = other
    all_end(checkout.train_on(nodes, "--out-dir", "out", "--num-devices", 1))
    assert checkout.train_alone() == checkout.weights("out")
    assert (other / "data/card.json").read_bytes() == (checkout.folder / "data/card.json").read_bytes()
    assert (checkout.folder / "out/run.json").exists()
    assert not (other / "out").exists()
    assert list((checkout.folder / ".samebits/runs").glob("*.jsonl"))
    assert not (other / ".samebits/runs").exists()


def torchrun(rank):
    """Torchrun itself, with one process on each machine."""
    options = ["--nnodes=2", "--nproc-per-node=1", f"--node-rank={rank}", "--master-addr=n0", "--master-port=29511"]
    return ["-m", "torch.distributed.run", *options], {}


def variables(rank):
    """The variables that it reads."""
    values = {"NNODES": 2, "NODE_RANK": rank, "MASTER_ADDR": "n0", "MASTER_PORT": 29512, "NPROC_PER_NODE": 1}
    return [], {f"PET_{name}": str(value) for name, value in values.items()}


@pytest.mark.parametrize("start", [torchrun, variables])
def test_others_may_start_the_stage(start, checkout, network):
    prepared(checkout, "mlp")
    started = []
    for rank, node in enumerate(network(2)):
        before, environ = start(rank)
        script = ["pipeline/train.py", "--strategy", "ddp", "--numerics", "exact", "--no-tracking", "--num-devices", 1]
        environ |= {"PYTHONPATH": str(checkout.folder / "src")}
        started.append(node.start(sys.executable, *before, *script, cwd=checkout.folder, environ=environ))
    all_end(started)
    assert checkout.train_alone() == checkout.weights("runs/ddp-exact")
