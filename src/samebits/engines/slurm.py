"""Run a stage on a Slurm cluster, and wait for it: with ``srun`` inside an allocation, else with ``sbatch``."""

from __future__ import annotations

import math
import re
import secrets
import shlex
import signal
import subprocess
import sys
import time
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, Self

from samebits.engines.exit_reports import FOLDER, has_begun, read_endings
from samebits.errors import HostError, Interrupted, WorkerError, last_line
from samebits.files import make_folder
from samebits.hashes import sha256_remembered
from samebits.host.variables import IMAGE, SECRET
from samebits.tracking.sender import taken_over

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from samebits.engines.settings import Cluster, Slurm

LAUNCHES = Path(".samebits/launches")
_IMAGES = Path(".samebits/images.json")
_POLL_SECONDS = 0.2
_STOP_SECONDS = 60.0  # for a training to write a checkpoint and end, before its job is cancelled
_WAIT_SECONDS = 60  # that srun waits for the other tasks after the first has ended


@dataclass(kw_only=True)
class SlurmJob:
    """One command on Slurm; ``folder`` gets its output and the machines' exit reports."""

    cluster: Cluster
    command: Sequence[str]
    environ: Mapping[str, str]
    folder: Path
    name: str

    @classmethod
    def of(cls, cluster: Cluster, command: Sequence[str], environ: Mapping[str, str]) -> Self:
        """A new job; its command gets ``environ``, the folder for exit reports, and a secret."""
        name = f"samebits-{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(3)}"
        folder = (LAUNCHES / name).resolve()
        told = {**environ, SECRET: environ.get(SECRET) or secrets.token_hex(16), FOLDER: str(folder)}
        return cls(cluster=cluster, command=command, environ=told, folder=folder, name=name)

    @property
    def is_step(self) -> bool:
        """Whether it becomes a step of this process's allocation; else it is a job of its own."""
        return "SLURM_JOB_ID" in self.environ

    def submission(self) -> list[str]:
        """The command that starts it."""
        return self.srun() if self.is_step else self.sbatch()

    def srun(self) -> list[str]:
        """``srun`` with one task on each machine; the end of one task kills no other."""
        slurm = self.cluster.slurm
        options = [
            f"--nodes={self.cluster.nodes}",
            f"--ntasks={self.cluster.nodes}",
            "--ntasks-per-node=1",
            "--kill-on-bad-exit=0",
            f"--wait={_WAIT_SECONDS}",
            "--cpu-bind=none",  # a single task may be bound to one core, and its workers share all cores of the job
            "--input=none",
            f"--job-name={self.name}",
        ]
        if slurm.container_image:
            here, image = Path.cwd(), Path(slurm.container_image)
            # pyxis takes a name for a file, and not for an image of a registry, if it begins with a slash or a dot.
            name = image.resolve() if image.is_file() else slurm.container_image
            options += [f"--container-image={name}", f"--container-mounts={here}:{here}", f"--container-workdir={here}"]
        return ["srun", *options, *self._resource_options(), *self._in_image()]

    def sbatch(self) -> list[str]:
        """``sbatch`` of the same ``srun``, which waits for the end of the job."""
        slurm = self.cluster.slurm
        asked = {"partition": slurm.partition, "account": slurm.account, "time": slurm.time}
        options = [f"--{name}={value}" for name, value in asked.items() if value]
        if slurm.time and slurm.warning_seconds:
            options.append(f"--signal=TERM@{slurm.warning_seconds}")
        output = [f"--output={self.folder}/stdout", f"--error={self.folder}/stderr", "--open-mode=append"]
        shape = [f"--nodes={self.cluster.nodes}", "--ntasks-per-node=1", f"--job-name={self.name}", "--requeue"]
        wrapped = f"exec {shlex.join(self.srun())}"
        return ["sbatch", "--wait", *shape, *options, *output, *self._resource_options(), f"--wrap={wrapped}"]

    def _resource_options(self) -> list[str]:
        slurm = self.cluster.slurm
        asked = {"gpus-per-node": slurm.gpus_per_node, "cpus-per-task": slurm.cpus_per_task}
        return [*(f"--{name}={value}" for name, value in asked.items() if value), *slurm.arguments]

    def _in_image(self) -> list[str]:
        slurm = self.cluster.slurm
        if slurm.apptainer_image:
            here = str(Path.cwd())  # --nv prints a warning if there is no driver, and goes on
            return ["apptainer", "exec", "--nv", "--bind", here, "--pwd", here, slurm.apptainer_image, *self.command]
        return list(self.command)


def run_on_slurm(job: SlurmJob) -> None:
    """Run a command on the cluster's machines, show its output, and return when it has succeeded.

    Raises:
        HostError: Slurm is not installed, or does not accept the job.
        Interrupted: a signal ended it, here or there.
        SamebitsError: the error from the machines' exit reports.
    """
    make_folder(job.folder)
    job = replace(job, environ={**job.environ, **image_variables(job.cluster.slurm)})
    with taken_over():  # before the start, because a short job leaves its log at once
        running = _Step(job) if job.is_step else _Batch(job)
        try:
            running.start()
            code = running.wait()
        except (Interrupted, KeyboardInterrupt) as error:
            signum = error.signum if isinstance(error, Interrupted) else int(signal.SIGINT)
            running.stop(signum)
            raise Interrupted(signum) from None
        finally:
            running.cancel()
    _raise_cause(job.folder, code, running.last_message())


def image_variables(slurm: Slurm) -> dict[str, str]:
    """Variables for the record of a run's image: its name, and its digest or the hash of its file."""
    name = slurm.container_image or slurm.apptainer_image
    if not name:
        return {}
    told, file = {IMAGE: name}, Path(name)
    if "@sha256:" in name:
        told[f"{IMAGE}_DIGEST"] = name
    elif file.is_file():
        told[f"{IMAGE}_ID"] = f"sha256:{sha256_remembered(file, _IMAGES)}"
    return told


def _raise_cause(folder: Path, code: int | None, last_message: str) -> None:
    """Raise the error of the exit reports, else one from Slurm's output. Node 0 has already printed its own."""
    endings = read_endings(folder)
    if first := endings.get(0):
        raise SystemExit(first.exit_code)
    if ending := next((error for error in endings.values() if error is not None), None):
        raise ending
    if 0 in endings:
        return
    if not has_begun(folder):
        text = f"the command has begun on no machine, and the job ended with {code}: {last_message}"
        raise HostError(
            text, hint=f"see {folder}, `sinfo`, and whether the machines have this folder and {sys.executable}"
        )
    text = f"the job ended with {code} and without a word: {last_message}"
    raise WorkerError(text, hint=f"see {folder}, `sacct`, and what the machines' own logs say")


@contextmanager
def _signals_held() -> Iterator[None]:
    """Delay signals that end this process until the end of the block, so that it knows the process that it starts."""
    ending, came = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP), list[int]()
    handlers = {signum: handler for signum in ending if callable(handler := signal.getsignal(signum))}
    for signum in handlers:
        signal.signal(signum, lambda signum, _: came.append(signum))
    try:
        yield
    finally:
        for signum, handler in handlers.items():
            signal.signal(signum, handler)
        if came:
            signal.raise_signal(came[0])


class _Running:
    """A Slurm command that runs as long as its job. The job's output is shown meanwhile.

    The command's own messages go to the file ``said``.
    """

    def __init__(self, job: SlurmJob, said: str, *, stdout: bool, shown: Mapping[str, BinaryIO]) -> None:
        self.job, self._said, self._stdout = job, job.folder / said, stdout
        self._shown = {job.folder / name: to for name, to in shown.items()}
        self._offsets = dict.fromkeys(self._shown, 0)
        self._process: subprocess.Popen[bytes] | None = None
        self._said.touch()

    def start(self) -> None:
        """Start the command. Raises HostError: it is not installed."""
        try:
            with _signals_held(), self._said.open("wb") as stream:
                # In a session of its own, because srun kills its tasks if Ctrl-C of a terminal reaches it twice.
                self._process = subprocess.Popen(
                    self.job.submission(),
                    stdin=subprocess.DEVNULL,
                    stdout=stream if self._stdout else None,
                    stderr=stream,
                    env=self.job.environ,
                    start_new_session=True,
                )
        except FileNotFoundError:
            hint = "start this on a login node, or unset SAMEBITS_LAUNCHER"
            raise HostError(f"{self.job.submission()[0]} is not here", hint=hint) from None

    @property
    def is_running(self) -> bool:
        """Whether the command runs."""
        return self._process is not None and self._process.poll() is None

    def kill(self) -> None:
        """Kill the command. Its job may go on."""
        if self._process:
            self._process.kill()
            self._process.wait()

    def number(self) -> str | None:
        """Slurm's number of the job or step; None while it has none."""
        raise NotImplementedError

    def wait(self, seconds: float = math.inf) -> int | None:
        """Show the output until the command ends, and return its exit code; None if it still runs after ``seconds``."""
        assert self._process, "it was started"
        deadline = time.monotonic() + seconds
        while (code := self._process.poll()) is None and time.monotonic() < deadline:
            self.show_output()
            time.sleep(_POLL_SECONDS)
        self.show_output()
        return code

    def show_output(self) -> None:
        """Copy the job's new output to this process's streams."""
        for file, to in self._shown.items():
            with suppress(FileNotFoundError), file.open("rb") as stream:
                stream.seek(self._offsets[file])
                new = stream.read()
                self._offsets[file] += len(new)
                to.write(new)
                to.flush()

    def stop(self, signum: int) -> None:
        """Pass a signal on to the job, and wait for its end."""
        if number := self.number():
            _slurm("scancel", f"--signal={signal.Signals(signum).name[3:]}", number)
            self.wait(_STOP_SECONDS)

    def cancel(self) -> None:
        """Cancel the job or step, and end the command that waits for it."""
        if self.is_running:
            if number := self.number():
                _slurm("scancel", number)
                self.wait(_STOP_SECONDS)
            self.kill()

    def said(self) -> str:
        """The command's own messages."""
        return self._said.read_text(encoding="utf-8", errors="replace")

    def last_message(self) -> str:
        """The last line of the error."""
        return last_line(self.said())


class _Step(_Running):
    """A step of this process's allocation."""

    def __init__(self, job: SlurmJob) -> None:
        super().__init__(job, "stderr", stdout=False, shown={"stderr": sys.stderr.buffer})

    def number(self) -> str | None:
        """The step's number as Slurm writes it, such as 17.0; None before it has one."""
        allocation = self.job.environ["SLURM_JOB_ID"]
        listed = _slurm("squeue", "--steps", "--noheader", f"--jobs={allocation}", "--format=%i %j")
        return next((line.split()[0] for line in listed.splitlines() if line.split()[1:] == [self.job.name]), None)


class _Batch(_Running):
    """A job of its own."""

    def __init__(self, job: SlurmJob) -> None:
        shown = {"stdout": sys.stdout.buffer, "stderr": sys.stderr.buffer}
        for name in shown:  # a network file system caches for a while that a file is missing
            (job.folder / name).touch()
        super().__init__(job, "sbatch", stdout=True, shown=shown)
        self._number_shown = False

    def number(self) -> str | None:
        """The job's number as Slurm writes it, such as 17; None before it has one."""
        match = re.search(r"Submitted batch job (\d+)", self.said())
        return match and match[1]

    def show_output(self) -> None:
        """Copy new output, after the job's number."""
        if not self._number_shown and (number := self.number()):
            self._number_shown = True
            sys.stderr.write(f"job {number} of {self.job.cluster.nodes} machines, as {self.job.name}\n")
        super().show_output()

    def wait(self, seconds: float = math.inf) -> int | None:
        """As above. Raises HostError: Slurm did not accept the job."""
        code = super().wait(seconds)
        if code and not self.number():
            raise HostError(
                f"sbatch: {last_line(self.said()).removeprefix('sbatch: ')}", hint="see cluster.toml, and `sinfo`"
            )
        return code

    def stop(self, signum: int) -> None:
        """As above. A pending job is cancelled, because signals do not reach it."""
        if number := self.number():
            _slurm("scancel", "--state=PENDING", number)
            if not _slurm("squeue", "--noheader", f"--jobs={number}"):
                self.kill()  # sbatch polls its job at long intervals
                return
        super().stop(signum)

    def cancel(self) -> None:
        """As above. A job without a number may still be in the queue, and is cancelled by its name."""
        if self.is_running and not self.number():
            self.kill()
            _slurm("scancel", f"--name={self.job.name}")
        super().cancel()

    def last_message(self) -> str:
        """The last line of the job's stderr, else of the output of ``sbatch``."""
        written = (self.job.folder / "stderr").read_text(encoding="utf-8", errors="replace")
        return last_line(written) if written.strip() else super().last_message()


def _slurm(*command: str) -> str:
    """The output of a Slurm command; empty if the command cannot run."""
    with suppress(OSError):
        return subprocess.run(command, capture_output=True, text=True, check=False).stdout
    return ""
