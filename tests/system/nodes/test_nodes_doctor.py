"""`samebits doctor --nodes`: several machines beside each other, and how each pair of them is joined."""

import json
import re
import sys

import pytest
from node_fixtures import checkout, needs_machines, network  # noqa: F401 - two fixtures

from conftest import small

pytestmark = needs_machines


def visit(nodes, checkout, *arguments, environs=None):
    """The exit codes and what was printed, by node."""
    command = [sys.executable, "-c", "from samebits.cli import main; main()", "doctor", "--nodes", *arguments]
    environ = {"PYTHONPATH": str(checkout.folder / "src"), "PET_NNODES": str(len(nodes)), "PET_MASTER_ADDR": "n0"}
    started = [
        node.start(
            *command,
            cwd=checkout.folder,
            environ={**environ, "PET_NODE_RANK": str(rank), **(environs or {}).get(rank, {})},
        )
        for rank, node in enumerate(nodes)
    ]
    return [process.wait(100) for process in started]


def lines_of(stdout, name):
    return [line for line in stdout.splitlines() if line[9:].startswith(name)]


def test_three_machines_beside_each_other(checkout, network):
    checkout.write_params(small())
    codes, shown, _ = zip(*visit(network(3), checkout), strict=True)
    stdout = shown[0]
    assert lines_of(stdout, "nodes") == ["ok       nodes            3: n0, n1, n2, which meet at n0 (10.77.0.10:29500)"]
    assert len(lines_of(stdout, "python")) == 1  # as all say the same
    (secret,) = lines_of(stdout, "secret")
    assert secret.startswith("warning  secret           whoever reaches n0 (10.77.0.10:29500) can speak for a machine")
    (same,) = lines_of(stdout, "the same")
    assert same.startswith("ok")
    for pair in ("n0 - n1", "n0 - n2", "n1 - n2"):
        (line,) = lines_of(stdout, pair)
        assert line.startswith("ok"), line
        assert "gloo: a round trip takes " in line
    assert shown[1:] == ("", "")  # node 0 alone says it
    assert codes == (0, 0, 0)


def test_what_differs_is_said_by_machine(checkout, network):
    nodes = network(2)
    checkout.write_params(small())
    (checkout.folder / "params.yaml").rename(checkout.folder / "one.yaml")
    checkout.write_params(small(epochs=7))
    (checkout.folder / "params.yaml").rename(checkout.folder / "other.yaml")
    for node, name in zip(nodes, ("one", "other"), strict=True):
        node.disks[checkout.folder / "params.yaml"] = checkout.folder / f"{name}.yaml"
    (checkout.folder / "params.yaml").touch()
    secret = {"SAMEBITS_SECRET": "of both"}
    environs = {0: secret, 1: {**secret, "MLFLOW_TRACKING_URI": "http://127.0.0.1:9"}}
    (code, stdout, _), _ = visit(nodes, checkout, environs=environs)
    assert (code, lines_of(stdout, "secret")) == (3, [])
    assert "failed   the same         params train.epochs: node 0 (n0) has 1, node 1 (n1) has 7\n" in stdout
    mine, theirs = lines_of(stdout, "mlflow")
    assert mine.startswith("ok       mlflow           n0: ")
    assert theirs.startswith("failed   mlflow           n1: ")


def test_a_firewall_between_two_of_three_machines_is_named(checkout, network):
    """The store can be reached, as node 0's port is open; what workers choose by themselves is not."""
    nodes = network(3)
    for node, other in ((nodes[2], nodes[1]), (nodes[1], nodes[2])):
        node.drop("-p", "tcp", "--source", other.address, "--syn")
    checkout.write_params(small())
    (code, stdout, _), *_ = visit(nodes, checkout, "--json")
    report = json.loads(stdout)
    assert code == report["exit_code"] == 3
    status = {one["name"]: (one["status"], one["text"]) for one in report["findings"] if " - " in one["name"]}
    assert status["n0 - n1"][0] == status["n0 - n2"][0] == "ok"
    assert status["n1 - n2"][0] == "failed"
    assert re.fullmatch(
        r"gloo does not connect them: 10\.77\.0\.11 does not reach port \d+ of 10\.77\.0\.12: no answer",
        status["n1 - n2"][1],
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "error: --nodes: this was started on one machine alone. hint: salloc --nodes=2 samebits doctor"),
        (["--model"], "error: --nodes and --model: each has a look of its own. hint: give one of them at a time"),
    ],
)
def test_one_machine_is_refused(arguments, message, checkout, network):
    ((code, _, stderr),) = visit(network(1), checkout, *arguments)
    assert (code, message in stderr) == (2, True), stderr
