"""`samebits launch` and SAMEBITS_LAUNCHER: submissions, printed manifests, and refusals."""

import hashlib
import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner

from conftest import ROOT, wait_for
from samebits.cli.commands import main
from samebits.engines import slurm
from samebits.engines.exit_reports import ending_told, read_endings
from samebits.engines.launch import launcher, run_in_allocation
from samebits.errors import HostError, Interrupted, UserError
from samebits.tracking import sender

IMAGE = f"registry.example/samebits@sha256:{'a' * 64}"
DDP = ("--strategy", "ddp", "--numerics", "exact")


@pytest.fixture
def repository(tmp_path, monkeypatch):
    """A folder with the files that a launch reads, and no variables of an engine."""
    folder = tmp_path / "kit"
    (folder / "src/samebits").mkdir(parents=True)
    shutil.copy(ROOT / "params.yaml", folder)
    monkeypatch.chdir(folder)
    for name in [name for name in os.environ if name.startswith(("SAMEBITS_L", "SAMEBITS_N", "SLURM_", "MLFLOW_"))]:
        monkeypatch.delenv(name)
    return folder


@pytest.mark.parametrize(("engine", "code"), [("slurm", 0), ("local", 3)])
def test_devices_are_counted_where_a_training_goes(engine, code, stage):
    """The devices of a login node are not those of the cluster's machines."""
    text = (ROOT / "params.yaml").read_text()
    text = re.sub(r"num_devices: \S+", "num_devices: 8", re.sub(r"strategies: .*", "strategies: [single, ddp]", text))
    (stage.folder / "params.yaml").write_text(text)
    done = stage("host", SAMEBITS_LAUNCHER=engine, CUDA_VISIBLE_DEVICES="")
    assert done.returncode == code, done.stderr
    assert ("got 8, this host has" in done.stderr) == bool(code)


def launch(*arguments):
    return CliRunner().invoke(main, ["launch", *arguments], prog_name="samebits")


def launch_here(code):
    """Launch with output on this process's own streams, and check the exit code."""
    with pytest.raises(SystemExit) as ended:
        main(["launch", "slurm", *DDP], standalone_mode=False)
    assert ended.value.code == code


def lines_of(file):
    return file.read_text().splitlines()


def files(folder):
    return {path for path in folder.rglob("*") if "__pycache__" not in path.parts}


def test_a_dry_run_of_slurm_shows_the_job(repository):
    settings = 'partition = "gpu"\naccount = "ml"\ntime = "1:00"\ngpus_per_node = 4\narguments = ["--qos=high"]\n'
    (repository / "cluster.toml").write_text(f"[slurm]\n{settings}")
    before = files(repository)
    done = launch("--dry-run", "--nodes", "3", "slurm", *DDP)
    assert (done.exit_code, done.stderr) == (0, "")
    command = shlex.split(done.stdout)
    assert command[:4] == ["sbatch", "--wait", "--nodes=3", "--ntasks-per-node=1"]
    asked = {"--partition=gpu", "--account=ml", "--time=1:00", "--gpus-per-node=4", "--qos=high"}
    assert {*asked, "--requeue", "--signal=TERM@60"} <= {*command}
    (wrapped,) = [one.removeprefix("--wrap=") for one in command if one.startswith("--wrap=")]
    inside = shlex.split(wrapped)
    assert inside[:4] == ["exec", "srun", "--nodes=3", "--ntasks=3"]
    assert inside[-7:] == [sys.executable, "-P", "pipeline/train.py", *DDP]
    assert files(repository) == before


def test_a_dry_run_inside_an_allocation_shows_the_step(repository, monkeypatch):
    monkeypatch.setenv("SLURM_JOB_ID", "17")
    command = shlex.split(launch("--dry-run", "slurm", *DDP, "--out-dir", "a b").stdout)
    assert command[:3] == ["srun", "--nodes=2", "--ntasks=2"]
    assert command[-9:] == [sys.executable, "-P", "pipeline/train.py", *DDP, "--out-dir", "a b"]


@pytest.mark.parametrize("image", ["", 'container_image = "mine.sqsh"'])
def test_in_a_users_repository_the_installed_stage_is_started(image, repository):
    (repository / "src/samebits").rmdir()
    (repository / "cluster.toml").write_text(f"[slurm]\n{image}\n")
    command = shlex.split(launch("--dry-run", "slurm", *DDP).stdout)
    (wrapped,) = [one.removeprefix("--wrap=") for one in command if one.startswith("--wrap=")]
    python = "python" if image else sys.executable
    assert shlex.split(wrapped)[-10:] == [python, "-P", "-m", "samebits.cli", "stage", "train", *DDP]
    assert "PYTHONPATH" not in " ".join(command)


@pytest.mark.parametrize(("key", "image"), [("container_image", "kit.sqsh"), ("apptainer_image", "kit.sif")])
def test_in_an_image_python_is_the_images(key, image, repository):
    (repository / "cluster.toml").write_text(f'[slurm]\n{key} = "{image}"\n')
    text = launch("--dry-run", "slurm", *DDP).stdout
    assert image in text
    assert " python -P pipeline/train.py --strategy ddp" in text


def test_pyxis_is_told_a_file_as_one(repository):
    """It takes a name that does not begin with a slash for an image of a registry."""
    (repository / "cluster.toml").write_text('[slurm]\ncontainer_image = "kit.sqsh"\n')
    assert " --container-image=kit.sqsh " in launch("--dry-run", "slurm", *DDP).stdout
    (repository / "kit.sqsh").touch()
    assert f" --container-image={repository}/kit.sqsh " in launch("--dry-run", "slurm", *DDP).stdout


SBATCH = """echo "Submitted batch job 17"
printf '%s\\n' "$@" > arguments.txt
env > environ.txt
printf '{"schema": 1, "exit_code": 4, "message": "a worker", "hint": "look"}' > "$SAMEBITS_LAUNCH/node1.json"
exit 1"""
"""A stand-in for ``sbatch`` whose job fails on one machine. tests/system/nodes has a real Slurm."""


def test_a_launch_in_an_image_says_which(repository, program):
    """The run records it, and machines with unlike images are refused."""
    program("sbatch", SBATCH)
    digest = f"registry.example/kit@sha256:{'0' * 64}"
    (repository / "kit.sif").write_bytes(b"an image")
    cases = {
        'apptainer_image = "kit.sif"': {
            "SAMEBITS_IMAGE=kit.sif",
            f"SAMEBITS_IMAGE_ID=sha256:{hashlib.sha256(b'an image').hexdigest()}",
        },
        'container_image = "elsewhere.sqsh"': {"SAMEBITS_IMAGE=elsewhere.sqsh"},
        f'container_image = "{digest}"': {f"SAMEBITS_IMAGE={digest}", f"SAMEBITS_IMAGE_DIGEST={digest}"},
        "": set(),
    }
    for line, expected in cases.items():
        (repository / "cluster.toml").write_text(f"[slurm]\n{line}\n")
        launch_here(4)
        environ = lines_of(repository / "environ.txt")
        assert {line for line in environ if line.startswith("SAMEBITS_IMAGE")} == expected
        # The image has samebits too, of the commit that it was built from.
        assert (f"PYTHONPATH={repository}/src" in environ) == bool(line)


def test_a_launch_waits_and_ends_as_the_machines_do(repository, program, monkeypatch, capfdbinary):
    program("sbatch", SBATCH)
    monkeypatch.setenv("SAMEBITS_LAUNCHER", "slurm")
    launch_here(4)
    assert b"error: a worker. hint: look" in capfdbinary.readouterr().err
    assert "--wait" in lines_of(repository / "arguments.txt")
    assert "SAMEBITS_LAUNCHER=local" in lines_of(repository / "environ.txt")  # where it ends up, it trains


@pytest.mark.attack("a stranger on the network")
def test_the_machines_of_a_launch_share_a_secret_that_nobody_else_is_told(repository, program, monkeypatch):
    """It is in the environment, because all users of a host see arguments."""
    program("sbatch", SBATCH)

    def told():
        launch_here(4)
        (line,) = [line for line in lines_of(repository / "environ.txt") if line.startswith("SAMEBITS_SECRET=")]
        secret = line.partition("=")[2]
        assert secret not in (repository / "arguments.txt").read_text()
        return secret

    secrets = {told(), told()}
    assert {len(secret) for secret in secrets} == {32}
    assert len(secrets) == 2
    monkeypatch.setenv("SAMEBITS_SECRET", "mine")
    assert told() == "mine"


NAME = r"name=samebits-\d{8}-\d{6}-[0-9a-f]{6}"


def test_a_job_has_a_name_of_its_own(repository):
    assert re.search(rf"--job-{NAME} ", launch("--dry-run", "slurm", *DDP).stdout)


@pytest.mark.parametrize(
    ("said", "listed", "cancelled"),
    [
        ("", "", f"--{NAME}"),
        ("Submitted batch job 17", "", "--state=PENDING 17"),
        ("Submitted batch job 17", "17", "--state=PENDING 17\n--signal=TERM 17\n17"),
    ],
    ids=["not numbered yet", "pending", "running"],
)
def test_a_job_whose_launch_is_interrupted_is_cancelled(said, listed, cancelled, repository, program, monkeypatch):
    """A job is cancelled by its number if it has one, and after a signal that did not end it."""
    program("sbatch", f"echo '{said}'\nexec sleep 3600")
    program("squeue", f"echo '{listed}'" if listed else "")
    program("scancel", 'echo "$@" >> scancelled.txt')

    def interrupted(self, seconds=None):
        wait_for(lambda: said in self.said())
        if seconds is None:
            raise Interrupted(signal.SIGTERM)

    monkeypatch.setattr(slurm._Batch, "wait", interrupted)
    launch_here(143)
    assert re.fullmatch(f"{cancelled}\n", (repository / "scancelled.txt").read_text())


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
@pytest.mark.parametrize("moment", ["before", "after"])
def test_a_signal_while_a_job_is_started_cancels_it(moment, signum, repository, program, monkeypatch):
    class Signalled(subprocess.Popen):
        def __init__(self, command, **options):
            if moment == "before":
                signal.raise_signal(signum)
            super().__init__(command, **options)
            if moment == "after":
                signal.raise_signal(signum)

    program("sbatch", "exec sleep 3600")
    monkeypatch.setattr(slurm.subprocess, "Popen", Signalled)
    cancelled = []
    monkeypatch.setattr(slurm, "_slurm", lambda *command: cancelled.append(" ".join(command)))
    launch_here(128 + signum)
    assert re.fullmatch(f"scancel --{NAME}", *cancelled)


@pytest.mark.parametrize(
    ("does", "code", "ending", "message"),
    [
        # As of a job that is cancelled before it begins; and of one that fails to find Python.
        ("", 0, 3, "error: the command has begun on no machine, and the job ended with 0: Submitted batch job 17."),
        (
            "echo 'python: not found' >> $SAMEBITS_LAUNCH/stderr", 127, 3,
            "error: the command has begun on no machine, and the job ended with 127: python: not found. hint: ",
        ),
        (
            "touch $SAMEBITS_LAUNCH/node0.begun; echo Killed >> $SAMEBITS_LAUNCH/stderr", 137, 4,
            "error: the job ended with 137 and without a word: Killed. hint: ",
        ),
    ],
)  # fmt: skip
def test_a_job_without_an_ending_has_failed(does, code, ending, message, repository, program):
    program("sbatch", f"echo 'Submitted batch job 17'\n{does}\nexit {code}")
    done = launch("slurm", *DDP)
    assert done.exit_code == ending, done.stderr
    assert message in done.stderr


@pytest.mark.parametrize(
    ("environ", "hands_over"),
    [
        ({}, False),
        ({"SLURM_JOB_NUM_NODES": "1"}, False),
        ({"SLURM_JOB_NUM_NODES": "2"}, True),
        # The shell of `salloc` where it is a step, as of `srun --pty`, and a task of the step of both machines.
        ({"SLURM_JOB_NUM_NODES": "2", "SLURM_STEP_ID": "4294967290", "SLURM_STEP_NUM_NODES": "1"}, True),
        (
            {"SLURM_JOB_NUM_NODES": "2", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_NODES": "2", "SLURM_NODEID": "1",
             "SLURM_STEP_NODELIST": "n[0-1]"},
            False,
        ),
    ],
)  # fmt: skip
def test_a_command_is_run_over_all_machines_from_a_shell_on_one(environ, hands_over, repository, monkeypatch):
    ran = []
    monkeypatch.setattr(slurm, "run_on_slurm", ran.append)
    assert run_in_allocation(["-m", "samebits.cli"], environ) == hands_over
    assert [job.cluster.nodes for job in ran] == [2] * hands_over


@pytest.mark.parametrize(
    ("folders", "read"),
    [(["launch"], {1: "no device. hint: look"}), ([], {}), (["launch/node1.json/in-the-way"], {})],
)
def test_a_machine_whose_end_nobody_can_read_says_itself_what_it_failed_of(folders, read, tmp_path, capsys):
    for each in folders:
        (tmp_path / each).mkdir(parents=True)
    folder = tmp_path / "launch"
    environ = {
        "SAMEBITS_LAUNCH": str(folder), "PET_NNODES": "2", "PET_NODE_RANK": "1", "PET_MASTER_ADDR": "n0"
    }  # fmt: skip
    with pytest.raises(SystemExit) as ended, ending_told(environ):
        raise HostError("no device", hint="look")
    assert ended.value.code == 3
    assert capsys.readouterr().err == ("" if read else f"node 1 ({socket.gethostname()}): no device. hint: look\n")
    assert folder.exists() == bool(folders)
    assert {node: str(error) for node, error in read_endings(folder).items()} == read
    alone = {"SAMEBITS_LAUNCH": str(folder)}
    with pytest.raises(HostError, match="no device"), ending_told(alone):
        raise HostError("no device", hint="look")
    with ending_told(alone):
        pass
    assert read_endings(folder).get(0, "unread") == (None if folder.is_dir() else "unread")


LOGS = """echo "Submitted batch job 17"
mkdir -p .samebits/runs
echo > .samebits/runs/of-the-job.jsonl
printf '{"schema": 1, "exit_code": 0, "message": "", "hint": ""}' > "$SAMEBITS_LAUNCH/node0.json"
"""


def test_what_a_jobs_sender_leaves_behind_is_delivered_from_here(repository, program, monkeypatch):
    """Slurm may end the sender with its job, by their control group. The job may end at once."""

    class Ended(subprocess.Popen):
        def __init__(self, *arguments, **options):
            super().__init__(*arguments, **options)
            self.wait()

    monkeypatch.setattr(slurm.subprocess, "Popen", Ended)
    program("sbatch", LOGS)
    (repository / ".samebits/runs").mkdir(parents=True)
    (repository / ".samebits/runs/older.jsonl").touch()
    started = []
    monkeypatch.setattr(sender, "start_sender", started.append)
    assert launch("slurm", *DDP).exit_code == 0
    assert started == [Path(".samebits/runs/of-the-job.jsonl")]


@pytest.mark.parametrize("code", [0, 3])
def test_a_stage_that_belongs_on_the_cluster_ends_as_it_does_there(code, stage, program, tmp_path):
    """Node 0 has printed its own error there."""
    ending = json.dumps({"schema": 1, "exit_code": code, "message": "said there", "hint": "look"})
    told = f"""echo '{ending}' > "$SAMEBITS_LAUNCH/node0.json\""""
    program("sbatch", f"echo 'Submitted batch job 17'\n{told}\nexit {code}")
    shutil.copy(ROOT / "params.yaml", tmp_path)
    done = stage("train", *DDP, SAMEBITS_LAUNCHER="slurm", PATH=os.environ["PATH"])
    assert (done.returncode, "error: " in done.stderr) == (code, False), done.stderr
    assert not (tmp_path / "runs").exists()


def test_a_job_that_slurm_does_not_take_is_the_hosts_fault(repository, program):
    program("sbatch", "echo 'sbatch: error: invalid partition' >&2\nexit 1")
    assert "error: sbatch: error: invalid partition. hint: see cluster.toml" in launch("slurm", *DDP).stderr


def test_a_step_that_slurm_does_not_take_is_the_hosts_fault(repository, program, monkeypatch):
    program("srun", "echo 'srun: error: Only allocated 1 nodes asked for 2' >&2\nexit 1")
    monkeypatch.setenv("SLURM_JOB_ID", "17")
    done = launch("slurm", *DDP)
    assert done.exit_code == 3, done.stderr
    assert "ended with 1: srun: error: Only allocated 1 nodes asked for 2. hint: " in done.stderr


def test_without_slurm_that_is_said(repository, monkeypatch):
    monkeypatch.setenv("PATH", str(repository))
    done = launch("slurm", *DDP)
    assert (done.exit_code, done.stderr.startswith("error: sbatch is not here. hint: ")) == (3, True), done.stderr


@pytest.mark.parametrize(("options", "kinds"), [((), ["Service", "Job"]), (("--kind", "TrainJob"), ["TrainJob"])])
def test_a_dry_run_of_kubernetes_prints_manifests(options, kinds, repository):
    (repository / "cluster.toml").write_text(f'[kubernetes]\nimage = "{IMAGE}"\nclaim = "experiments"\n')
    before = files(repository)
    done = launch("--dry-run", "--nodes", "3", *options, "kubernetes", *DDP, "--num-devices", "2")
    assert (done.exit_code, done.stderr) == (0, "")
    documents = list(yaml.safe_load_all(done.stdout))
    assert [document["kind"] for document in documents] == kinds
    assert re.fullmatch(r"samebits-ddp-exact-[0-9a-f]{8}", documents[-1]["metadata"]["name"])
    assert done.stdout == launch("--dry-run", "--nodes", "3", *options, "kubernetes", *DDP, "--num-devices", "2").stdout
    command = json.dumps(["python", "-P", "pipeline/train.py", *DDP, "--num-devices", "2"]).strip("[]")
    assert command in json.dumps(documents[-1])
    assert files(repository) == before


PRINTED = "hint: samebits launch --dry-run kubernetes --strategy ddp ... | kubectl apply -f -"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("kubernetes", *DDP), "error: kubernetes: what is to be started is printed, and nobody waits for it. "
                               f"{PRINTED}"),
        (("slurm", "--strategy", "single"), "error: single uses one machine, and slurm would start several. "
                                            "hint: python pipeline/train.py --strategy single, or launch ddp"),
        (("--dry-run", "kubernetes", "--strategy=dp"), "error: dp uses one machine, and kubernetes would start"),
        (("slurm", *DDP, "--nodes", "2"), "error: --nodes is what slurm tells each machine. "
                                          "hint: samebits launch --nodes 2 slurm ..., before the engine's name"),
        (("slurm", *DDP, "--node-rank", "0"), "error: --node-rank is what slurm tells each machine"),
        (("slurm", *DDP, "--master", "n0"), "error: --master is what slurm tells each machine"),
        (("--kind", "Job", "slurm", *DDP), "error: --kind: slurm has none"),
        (("--dry-run", "kubernetes", *DDP), "error: cluster.toml has no table [kubernetes]"),
        (("--nodes", "0", "slurm", *DDP), "Error: Invalid value for '--nodes': 0 is not in the range x>=1"),
        (("nomad", *DDP), "Error: Invalid value for '{slurm|kubernetes}': 'nomad' is not one of"),
        (("--dryrun", "slurm", *DDP), "Error: No such option '--dryrun'"),
        (("slurm", *DDP, "--dry-run"), "Usage: python pipeline/train.py [OPTIONS]"),
        (("slurm", "--stratgy", "ddp"), "Error: No such option '--stratgy'"),
        (("slurm", "--strategy", "zero"), "Error: Invalid value for '--strategy': 'zero' is not one of"),
        (("slurm",), "Error: Missing option '--strategy'"),
    ],
)  # fmt: skip
def test_what_cannot_be_launched_is_refused(arguments, message, repository):
    done = launch(*arguments)
    assert (done.exit_code, message in done.stderr) == (2, True), done.stderr
    assert done.stdout == ""
    assert not (repository / ".samebits").exists()


def test_without_a_repository_there_is_nothing_to_launch(repository):
    (repository / "params.yaml").unlink()
    assert "has no params.yaml" in launch("slurm", *DDP).stderr


def test_the_help_behind_an_engine_is_the_stages(repository):
    done = launch("slurm", "--help")
    assert (done.exit_code, "Stage train: train the model" in done.stdout) == (0, True)


@pytest.mark.parametrize(
    ("value", "expected"), [(None, "local"), ("", "local"), ("local", "local"), ("slurm", "slurm")]
)
def test_the_launcher_that_a_stage_is_given(value, expected):
    assert launcher({} if value is None else {"SAMEBITS_LAUNCHER": value}) == expected


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("pbs", r"SAMEBITS_LAUNCHER: got 'pbs', accepts local or slurm\. hint: unset SAMEBITS_LAUNCHER"),
        ("kubernetes", rf"SAMEBITS_LAUNCHER: got 'kubernetes', for which no stage waits\. {re.escape(PRINTED)}"),
    ],
)
def test_a_launcher_that_no_stage_waits_for_is_refused(value, message):
    with pytest.raises(UserError, match=message):
        launcher({"SAMEBITS_LAUNCHER": value})
