"""What every machine of a training counts reaches MLflow from node 0 alone."""

import signal
import sqlite3
from contextlib import closing, suppress

import pytest
from node_fixtures import all_end, checkout, needs_machines, network  # noqa: F401 - two fixtures

from conftest import small, wait_for

pytestmark = needs_machines


@pytest.mark.timeout(1500)
def test_counters_of_the_second_machine_stand_beside_the_firsts(checkout, network):
    """The training goes on until both are there: node 0's come from its sender, which takes seconds to start."""
    checkout.prepare(small(numerics=["fast"], epochs=200_000, repeats=1))
    nodes = network(2)
    for node in nodes:
        node.limit("10mbit")  # so that steps, whose losses are delivered too, leave cores to what is tried here
    often = {"MLFLOW_SYSTEM_METRICS_SAMPLING_INTERVAL": "0.5"}
    processes = checkout.train_on(nodes, numerics="fast", environs=[often, often])
    names = ("cpu_utilization_percentage", "network_transmit_megabytes", "system_memory_usage_megabytes")
    wanted = {f"system/{node}{name}" for name in names for node in ("", "n1/")}

    def counted():
        """Steps by name, from the database itself: MLflow's client would make its tables too, beside the sender."""
        steps = {}
        uri = f"file:{checkout.folder}/mlflow.db?mode=ro"
        with suppress(sqlite3.OperationalError), closing(sqlite3.connect(uri, uri=True)) as database:
            for name, step in database.execute("SELECT key, step FROM metrics WHERE key LIKE 'system/%'"):
                steps.setdefault(name, []).append(step)
        return steps if wanted <= steps.keys() and len(steps["system/n1/cpu_utilization_percentage"]) > 2 else None

    steps = wait_for(counted, seconds=900)  # a sender has a low priority
    processes[0].signal(signal.SIGTERM)
    all_end(processes, 128 + signal.SIGTERM)
    assert not [name for name in steps if name.startswith("system/n0/")]
    of_second = steps["system/n1/cpu_utilization_percentage"]
    assert len(set(of_second)) == len(of_second)  # none twice
