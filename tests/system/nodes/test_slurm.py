"""A stage on a real Slurm: as a job of its own, or inside an allocation, with every end that it may take."""

import json
import os
import signal
import sys
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
import slurm as real_slurm
from node_fixtures import RUNS, checkout, needs_machines, network, params_of  # noqa: F401 - two fixtures

from conftest import small, wait_for
from samebits.host.cluster_environment import find_nodes
from slowed import slow_model, slowed

pytestmark = [
    *needs_machines,
    pytest.mark.skipif(
        bool(real_slurm.why_none()) and not os.environ.get("SAMEBITS_NEEDS_NODES"),
        reason=f"needs Slurm: {real_slurm.why_none()}",
    ),
]


@pytest.fixture
def cluster(checkout, network, tmp_path):
    """Two machines of Slurm, and a login node from which stages are started."""
    machines = network(3)
    with real_slurm.slurm(machines, tmp_path / "slurm") as environ:
        yield Login(machines[-1], checkout, {**environ, "SAMEBITS_LAUNCHER": "slurm", "SAMEBITS_NODES": "2"})


TRAINING = ["--strategy", "ddp", "--numerics", "exact", "--num-devices", 1, "--out-dir", "out"]


class Login:
    def __init__(self, machine, checkout, environ):
        self.machine, self.checkout = machine, checkout
        self.environ = {**environ, "PYTHONPATH": str(checkout.folder / "src")}

    def start(self, *command, **environ):
        return self.machine.start(*command, cwd=self.checkout.folder, environ={**self.environ, **environ})

    def launch(self, *options):
        environ = {"SAMEBITS_LAUNCHER": ""}  # what is launched needs none
        samebits = Path(sys.executable).with_name("samebits")
        return self.start(samebits, "launch", *options, "slurm", *TRAINING, "--no-tracking", **environ)

    def train(self, *arguments, before=(), **environ):
        return self.start(
            *before, sys.executable, "pipeline/train.py", *TRAINING, "--no-tracking", *arguments, **environ
        )

    def jobs(self):
        return self.start("squeue", "--noheader", "--format=%i %T").ends()[0].split()


UNMEASURED = {"numerics": ["exact"], "repeats": 1, "checkpoint_every_steps": 10}
"""A training with nothing timed after it, which can go on from where it was stopped."""


def prepared(checkout, **train):
    checkout.prepare(small(**{**UNMEASURED, **train}))


@pytest.mark.parametrize(
    ("before", "model"), [((), "mlp"), (("salloc", "--quiet", "--nodes=2"), "mlp"), ((), "gpt"), ((), "users")]
)
def test_a_training_on_slurm_has_the_bits_of_one_process(before, model, cluster, checkout):
    checkout.prepare(params_of(model, checkout.folder, epochs=2, **UNMEASURED))
    stdout, _ = cluster.train(before=before).ends()
    assert stdout.startswith("ddp-exact: ")
    assert checkout.weights("out") == checkout.train_alone()
    assert cluster.jobs() == []


@pytest.mark.parametrize("names", ["n0", "n[0-1]", "n[3,7-9],m1", "gpu-a[008-012]", "rack[1-2]n[01-18],login", "b,a"])
def test_the_first_host_is_slurms_own(names, cluster):
    stdout, _ = cluster.start("scontrol", "show", "hostnames", names).ends()
    step = {"SLURM_STEP_NUM_NODES": "2", "SLURM_NODEID": "0", "SLURM_STEP_ID": "0", "SLURM_STEP_NODELIST": names}
    assert find_nodes(environ=step).master == stdout.split()[0]


def test_a_launch_needs_no_more_than_its_arguments(cluster, checkout):
    prepared(checkout, epochs=2)
    stdout, stderr = cluster.launch("--dry-run").ends()
    assert (stderr, cluster.jobs()) == ("", [])
    assert stdout.startswith("sbatch --wait --nodes=2 ")
    assert not (checkout.folder / ".samebits/launches").exists()
    stdout, _ = cluster.launch().ends()
    assert stdout.startswith("ddp-exact: ")
    assert checkout.weights("out") == checkout.train_alone()
    assert cluster.jobs() == []


@pytest.mark.parametrize("before", [(), ("salloc", "--quiet", "--nodes=2")])
def test_a_worker_that_fails_is_the_cause_and_not_what_srun_makes_of_it(before, cluster, checkout):
    prepared(checkout, epochs=20_000)
    process = cluster.train(before=before)
    wait_for(checkout.checkpoints)
    workers = [pid for pid in trainings_in(checkout) if children_of(pid) == []]
    os.kill(workers[-1], signal.SIGKILL)
    _, stderr = process.ends(4)
    (line,) = [line for line in stderr.splitlines() if line.startswith("error: ")]
    assert "was ended by SIGKILL at step" in line
    assert cluster.jobs() == []


@pytest.mark.parametrize("before", [(), ("salloc", "--quiet", "--nodes=2")])
@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_job_with_a_checkpoint(signum, before, cluster, checkout):
    prepared(checkout, epochs=40, model=slow_model(checkout.folder))
    with slowed(checkout.folder):
        process = cluster.train(before=before)
        wait_for(checkout.checkpoints)
        leader = process.popen.pid if not before else children_of(process.popen.pid)[0]
        os.kill(leader, signum)
        process.ends(128 + signum)
    assert cluster.jobs() == []
    assert trainings_in(checkout) == []
    cluster.train(before=before).ends()
    assert '"resumed"' in (checkout.folder / "out/run.json").read_text()
    assert checkout.weights("out") == checkout.train_alone()


def test_a_job_that_slurm_does_not_take_is_said(cluster, checkout):
    prepared(checkout)
    _, stderr = cluster.train(SAMEBITS_SLURM_PARTITION="nowhere").ends(3)
    assert "error: sbatch: " in stderr
    assert "nowhere" in stderr or "partition" in stderr


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_a_job_that_waits_for_its_machines_is_taken_out_of_the_queue(signum, cluster, checkout):
    """No signal reaches it there, and ``sbatch`` would look only now and then whether it has ended."""
    prepared(checkout)
    process = cluster.train(SAMEBITS_SLURM_ARGUMENTS="--begin=now+1hour")
    said = checkout.folder / ".samebits/launches"
    wait_for(lambda: any("Submitted" in file.read_text() for file in said.glob("*/sbatch")))
    assert cluster.jobs()[1:] == ["PENDING"]
    os.kill(process.popen.pid, signum)
    process.ends(128 + signum)
    assert cluster.jobs() == []


def trainings_in(checkout):
    """Processes of stage train that work in this checkout; others may be a parallel test's."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if "pipeline/train.py" in process.cmdline() and process.cwd() == str(checkout.folder):
                found.append(process.pid)
    return sorted(found)


def children_of(pid):
    return [child.pid for child in psutil.Process(pid).children()]


def test_dvc_repro_hands_its_trainings_with_ranks_over(cluster, checkout):
    """From host to compare: one server has all runs, and the comparison is one."""
    checkout.change_params(small(numerics=["exact"], strategies=["single", "ddp"], num_devices=1, repeats=2))
    checkout.commit()
    uri = f"http://{cluster.machine.address}:5000"
    server = ["--host", cluster.machine.address, "--allowed-hosts", uri.removeprefix("http://")]
    folder = checkout.folder.parent
    store = ["--backend-store-uri", f"sqlite:///{folder}/server.db", "--artifacts-destination", folder / "artifacts"]
    cluster.start("mlflow", "server", *server, *store, MLFLOW_SERVER_ENABLE_JOB_EXECUTION="false")
    wait_for(lambda: cluster.start(sys.executable, "-c", RUNS, uri).wait()[0] == 0)
    cluster.start("dvc", "repro", MLFLOW_TRACKING_URI=uri).ends(seconds=600)
    assert "| ddp-exact | 2x1 CPU | " in (checkout.folder / "reports/comparison.md").read_text()
    assert checkout.weights("runs/ddp-exact") == checkout.weights("runs/single-exact")
    stdout, _ = cluster.start(sys.executable, "-c", RUNS, uri).ends()
    runs = {" ".join(run["mlflow.runName"].split()[:2]): run for run in json.loads(stdout)}
    assert {(name, run["status"]) for name, run in runs.items()} == {
        ("mlp on", "FINISHED"), ("single-exact x1", "FINISHED"), ("ddp-exact x2x1", "FINISHED")
    }  # fmt: skip
    several = runs["ddp-exact x2x1"]
    assert (several["num_nodes"], several["verdict"]) == ("2", "bitwise")
    assert [part.split()[0] for part in several["nodes"].split(", ")] == ["n0", "n1"]
    assert several["git_dirty"] == "False"


def test_ctrl_c_in_the_middle_of_dvc_repro_leaves_no_task(cluster, checkout):
    """As a terminal sends it, to DVC and to the stage; the same command then goes on from the checkpoint."""
    slow = {"epochs": 40, "model": slow_model(checkout.folder)}
    checkout.change_params(small(strategies=["ddp"], num_devices=1, **UNMEASURED, **slow))
    checkout.commit()
    with slowed(checkout.folder):
        repro = cluster.start("dvc", "repro", "train")
        wait_for(checkout.checkpoints)
        os.killpg(repro.popen.pid, signal.SIGINT)
        code, _, stderr = repro.wait()
    assert code not in (None, 0), stderr
    assert "stopped by Ctrl-C" in stderr
    assert cluster.jobs() == []
    assert trainings_in(checkout) == []
    cluster.start("dvc", "repro", "train").ends()
    assert '"resumed"' in (checkout.folder / "runs/ddp-exact/run.json").read_text()
    assert checkout.weights("runs/ddp-exact") == checkout.train_alone()


def test_a_job_that_meets_its_time_limit_goes_on_when_it_runs_again(cluster, checkout):
    """Slurm warns so long before the limit of a minute that the training ends at once, with a checkpoint.

    Until then its steps are slow, so that it cannot be done before, however fast the host is.
    """
    prepared(checkout, epochs=300, model=slow_model(checkout.folder))
    (checkout.folder / "cluster.toml").write_text('[slurm]\ntime = "1"\nwarning_seconds = 58\n')
    with slowed(checkout.folder):
        cluster.train().ends(143, seconds=600)
    (checkout.folder / "cluster.toml").unlink()  # on a slow host it would meet that limit again and again
    cluster.train().ends(seconds=600)
    assert '"resumed"' in (checkout.folder / "out/run.json").read_text()
    assert checkout.weights("out") == checkout.train_alone()


def test_a_job_that_is_requeued_goes_on_from_its_checkpoint(cluster, checkout):
    """As after a machine's failure; whoever waits for the job waits on."""
    prepared(checkout, epochs=100, model=slow_model(checkout.folder))
    with slowed(checkout.folder):
        process = cluster.train()
        wait_for(checkout.checkpoints)
        number, state = cluster.jobs()
        assert state == "RUNNING"
        cluster.start("scontrol", "requeue", number).ends()
        wait_for(lambda: cluster.jobs() == [number, "PENDING"])  # for two minutes, unless somebody cuts that short
    cluster.start("scontrol", "update", f"JobId={number}", "StartTime=now").ends()
    process.ends(seconds=600)
    assert '"resumed"' in (checkout.folder / "out/run.json").read_text()
    assert checkout.weights("out") == checkout.train_alone()


def test_the_doctor_sees_all_machines_of_an_allocation(cluster, checkout):
    prepared(checkout)
    command = [sys.executable, "-c", "from samebits.cli import main; main()", "doctor", "--nodes"]
    stdout, _ = cluster.start("salloc", "--quiet", "--nodes=2", *command).ends()
    assert stdout.startswith("ok       nodes            2: n0, n1, which meet at n0 (10.77.0.10:")
    assert "ok       n0 - n1          gloo: a round trip takes " in stdout
    assert stdout.count("nodes   ") == 1
    _, stderr = cluster.start("salloc", "--quiet", "--nodes=2", *command, "--params", "none.yaml").ends(2)
    assert stderr.count("error: none.yaml: ") == 1
