"""Pods without a cluster: their command and variables on machines, where it is the first process, as in a container."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from node_fixtures import RUNS, all_end, checkout, needs_machines, network  # noqa: F401 - two fixtures

from conftest import small, wait_for
from pods import container_of, told
from slowed import slow_model, slowed

pytestmark = needs_machines

BIN = Path(sys.executable).parent
SETTINGS = f'[kubernetes]\nimage = "registry.example/samebits@sha256:{"a" * 64}"\nclaim = "experiments"\n'


class Pods:
    """The pods of a manifest, one on each machine, whose claim is a checkout."""

    def __init__(self, checkout, machines, *options):
        self.checkout, self.machines = checkout, machines
        (checkout.folder / "cluster.toml").write_text(SETTINGS)
        arguments = ["--strategy", "ddp", "--numerics", "exact", "--num-devices", "1", "--out-dir", "out"]
        command = [BIN / "samebits", "launch", "--dry-run", *options, "kubernetes", *arguments]
        environ = {**os.environ, "PYTHONPATH": str(checkout.folder / "src")}
        done = subprocess.run(command, cwd=checkout.folder, env=environ, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        self.manifest = list(yaml.safe_load_all(done.stdout.replace("/repository", str(checkout.folder))))[-1]

    def start(self):
        """All of them, each in a namespace of processes of its own."""
        inside = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc"]
        command = [*inside, *container_of(self.manifest)["command"]]
        path = f"{BIN}:{os.environ['PATH']}"
        return [
            machine.start(*command, cwd=self.checkout.folder, environ={"PATH": path, **told(self.manifest, index)})
            for index, machine in enumerate(self.machines)
        ]

    def name_first(self):
        """As a name server does that knows pod 0 now."""
        name = told(self.manifest, 0)["PET_MASTER_ADDR"]
        for machine in self.machines:
            with (machine.folder / "hosts").open("a") as hosts:
                hosts.write(f"{self.machines[0].address} {name}\n")


@pytest.fixture
def prepared(checkout):
    def prepare(*, epochs, slow=False):
        model = slow_model(checkout.folder) if slow else None
        often = {"checkpoint_every_steps": 10, "repeats": 1}
        checkout.prepare(small(numerics=["exact"], model=model, epochs=epochs, **often))
        checkout.train_alone()
        return checkout

    return prepare


@pytest.mark.parametrize("kind", ["Job", "TrainJob"])
def test_pods_find_each_other_and_train_to_the_bits_of_one_process(kind, prepared, network):
    checkout = prepared(epochs=2)
    pods = Pods(checkout, network(2), "--kind", kind)
    started = pods.start()
    errors = [process.popen.stderr.readline() for process in started]
    name = told(pods.manifest, 0)["PET_MASTER_ADDR"]
    assert all(line.startswith(f"waiting: {name} is no host that this machine knows: ") for line in errors), errors
    pods.name_first()
    all_end(started)
    assert checkout.weights("out") == checkout.weights("alone")
    run = json.loads((checkout.folder / "out/run.json").read_text())
    assert len(run["placement"]["devices_by_node"]) == 2
    # With the last process of a pod all others have ended, and MLflow has the whole run.
    assert all(machine.is_idle() for machine in pods.machines)
    command = [sys.executable, "-c", RUNS, f"sqlite:///{checkout.folder}/mlflow.db"]
    runs = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    assert ("ddp-exact x2x1", "FINISHED") in {
        (" ".join(run["mlflow.runName"].split()[:2]), run["status"]) for run in runs
    }


def test_a_pod_that_is_to_end_writes_a_checkpoint_and_the_same_job_goes_on(prepared, network):
    checkout = prepared(epochs=40, slow=True)
    pods = Pods(checkout, network(2))
    pods.name_first()
    with slowed(checkout.folder):
        started = pods.start()
        wait_for(checkout.checkpoints)
        os.kill(started[0].children()[0], signal.SIGTERM)  # the first process of its container
        all_end(started, 143)
    all_end(pods.start())
    assert '"resumed"' in (checkout.folder / "out/run.json").read_text()
    assert checkout.weights("out") == checkout.weights("alone")
