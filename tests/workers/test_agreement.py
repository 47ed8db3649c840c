"""What the machines of a training must have in common."""

import pytest

from samebits.errors import HostError, UserError
from samebits.params import parse_params
from samebits.workers.agreement import NodeFacts, node_facts, require_equal


def facts(name, *, gpus=0, **equal):
    values = {"commit": "a" * 40, "params seed": 0, "torch": "2.13.0", **equal}
    return NodeFacts(name=name, machine=name, gpus=gpus, cores=2, num_devices="auto", equal=values)


def test_machines_that_have_the_same_agree():
    require_equal([facts("n0"), facts("n1"), facts("n2")])


@pytest.mark.parametrize(
    ("nodes", "error", "message"),
    [
        (
            [facts("a"), facts("b", commit="other")],
            UserError,
            r"commit: node 0 \(a\) has a{40}, node 1 \(b\) has other",
        ),
        (
            [facts("a"), facts("b"), facts("c", torch="2.9")],
            HostError,
            r"node 0 \(a\) has 2.13.0, node 2 \(c\) has 2.9",
        ),
        ([facts("a"), facts("b", more=1)], UserError, r"more: node 0 \(a\) has None, node 1 \(b\) has 1"),
        ([facts("a", gpus=2), facts("b")], HostError, r"node 1 \(b\) has no GPU, node 0 \(a\) has some"),
    ],
)
def test_the_first_difference_is_named(nodes, error, message):
    with pytest.raises(error, match=message):
        require_equal(nodes)


def test_the_number_of_devices_alone_may_differ(stage, data_dir):
    params = parse_params({"train": {"num_devices": 2}})
    folder = data_dir(params)
    first = node_facts(params, {"strategy": "ddp"}, folder)
    second = node_facts(parse_params({"train": {"num_devices": 1}}), {"strategy": "ddp"}, folder)
    assert (first.num_devices, second.num_devices) == (2, 1)
    require_equal([first, second])
    other = node_facts(parse_params({"train": {"timeout_s": 7}}), {"strategy": "ddp"}, folder)
    with pytest.raises(UserError, match=r"params train\.timeout_s: node 0 \(.*\) has 120, node 1 \(.*\) has 7"):
        require_equal([first, other])
