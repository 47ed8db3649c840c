"""A stage on the machines of a Slurm cluster: by ``srun`` inside an allocation, else by ``sbatch``, and to its end."""

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
from samebits.engines.image import IMAGE
from samebits.errors import HostError, Interrupted, WorkerError, last_line
from samebits.files import make_folder
from samebits.hashes import sha256_remembered
from samebits.host.cluster_environment import SECRET
from samebits.tracking.sender import taken_over

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from samebits.engines.settings import Cluster, Slurm

LAUNCHES = Path(".samebits/launches")
_IMAGES = Path(".samebits/images.json")
_POLL_SECONDS = 0.2
_STOP_SECONDS = 60.0  # that a training has to end by itself, with a checkpoint, before its job is cancelled
_WAIT_SECONDS = 60  # that srun waits for the other tasks once one has ended: they end by themselves


@dataclass(kw_only=True)
class SlurmJob:
    """One hand-over: what runs, and where its output and the machines' endings are."""

    cluster: Cluster
    command: Sequence[str]
    environ: Mapping[str, str]
    folder: Path
    name: str

    @classmethod
    def of(cls, cluster: Cluster, command: Sequence[str], environ: Mapping[str, str]) -> Self:
        """A hand-over of now; its command gets ``environ``, a folder to say in how it ends, and a secret."""
        name = f"samebits-{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(3)}"
        folder = (LAUNCHES / name).resolve()
        told = {SECRET: secrets.token_hex(16), **environ, FOLDER: str(folder)}
        return cls(cluster=cluster, command=command, environ=told, folder=folder, name=name)

    @property
    def is_step(self) -> bool:
        """Whether it becomes a step of the allocation that this process is in, else a job of its own."""
        return "SLURM_JOB_ID" in self.environ

    def submission(self) -> list[str]:
        """The command that starts it."""
        return self.srun() if self.is_step else self.sbatch()

    def srun(self) -> list[str]:
        """One task on each machine, each of which is left to end by itself."""
        slurm = self.cluster.slurm
        options = [
            f"--nodes={self.cluster.nodes}",
            f"--ntasks={self.cluster.nodes}",
            "--ntasks-per-node=1",
            "--kill-on-bad-exit=0",
            f"--wait={_WAIT_SECONDS}",
            "--cpu-bind=none",  # its workers share what the job has there; one task alone may be bound to one core
            "--input=none",
            f"--job-name={self.name}",
        ]
        if slurm.container_image:
            here, image = Path.cwd(), Path(slurm.container_image)
            # By a slash or dot at its beginning pyxis knows a file from an image of a registry.
            name = image.resolve() if image.is_file() else slurm.container_image
            options += [f"--container-image={name}", f"--container-mounts={here}:{here}", f"--container-workdir={here}"]
        return ["srun", *options, *self._resources(), *self._inside()]

    def sbatch(self) -> list[str]:
        """The same as a job of its own, which is waited for."""
        slurm = self.cluster.slurm
        asked = {"partition": slurm.partition, "account": slurm.account, "time": slurm.time}
        options = [f"--{name}={value}" for name, value in asked.items() if value]
        if slurm.time and slurm.warning_seconds:
            options.append(f"--signal=TERM@{slurm.warning_seconds}")
        output = [f"--output={self.folder}/stdout", f"--error={self.folder}/stderr", "--open-mode=append"]
        shape = [f"--nodes={self.cluster.nodes}", "--ntasks-per-node=1", f"--job-name={self.name}", "--requeue"]
        wrapped = f"exec {shlex.join(self.srun())}"
        return ["sbatch", "--wait", *shape, *options, *output, *self._resources(), f"--wrap={wrapped}"]

    def _resources(self) -> list[str]:
        slurm = self.cluster.slurm
        asked = {"gpus-per-node": slurm.gpus_per_node, "cpus-per-task": slurm.cpus_per_task}
        return [*(f"--{name}={value}" for name, value in asked.items() if value), *slurm.arguments]

    def _inside(self) -> list[str]:
        slurm = self.cluster.slurm
        if slurm.apptainer_image:
            here = str(Path.cwd())  # --nv says so where there is no driver, and goes on
            return ["apptainer", "exec", "--nv", "--bind", here, "--pwd", here, slurm.apptainer_image, *self.command]
        return list(self.command)


def run_on_slurm(job: SlurmJob) -> None:
    """Run a command on the cluster's machines, show what it writes, and return when it has ended well.

    Raises:
        HostError: Slurm is not here, or does not take the job.
        Interrupted: a signal ended it, here or there.
        SamebitsError: what the machines said that they failed of.
    """
    make_folder(job.folder)
    job = replace(job, environ={**job.environ, **image_variables(job.cluster.slurm)})
    with taken_over():  # from before the start: a short job's log may be there at once
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
    _raise_cause(job.folder, code, running.last_words())


def image_variables(slurm: Slurm) -> dict[str, str]:
    """What a run is to record of the image that it runs in: its name, and the hash of its file if it is one."""
    name = slurm.container_image or slurm.apptainer_image
    if not name:
        return {}
    told, file = {IMAGE: name}, Path(name)
    if "@sha256:" in name:
        told[f"{IMAGE}_DIGEST"] = name
    elif file.is_file():
        told[f"{IMAGE}_ID"] = f"sha256:{sha256_remembered(file, _IMAGES)}"
    return told


def _raise_cause(folder: Path, code: int | None, last_words: str) -> None:
    """The machines' own word for how it ended, Slurm's only where they have none; node 0's was shown already."""
    endings = read_endings(folder)
    if first := endings.get(0):
        raise SystemExit(first.exit_code)
    if ending := next((error for error in endings.values() if error is not None), None):
        raise ending
    if 0 in endings:
        return
    if not has_begun(folder):
        text = f"the command has begun on no machine, and the job ended with {code}: {last_words}"
        raise HostError(
            text, hint=f"see {folder}, `sinfo`, and whether the machines have this folder and {sys.executable}"
        )
    text = f"the job ended with {code} and without a word: {last_words}"
    raise WorkerError(text, hint=f"see {folder}, `sacct`, and what the machines' own logs say")


@contextmanager
def _signals_held() -> Iterator[None]:
    """Have what ends this process wait for the end of the block, so that it knows what it has started."""
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
    """A command of Slurm's that goes on as long as the machines do; what they write is shown meanwhile.

    ``said`` is the file that the command's own words go to.
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
                # A session of its own, since srun kills its tasks where a terminal's Ctrl-C reaches it twice.
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
    def goes_on(self) -> bool:
        """Whether the command was started and has not ended."""
        return self._process is not None and self._process.poll() is None

    def kill(self) -> None:
        """End the command, whatever becomes of its job."""
        if self._process:
            self._process.kill()
            self._process.wait()

    def number(self) -> str | None:
        """Slurm's name for it; None as long as it has none."""
        raise NotImplementedError

    def wait(self, seconds: float = math.inf) -> int | None:
        """Show what is written until it ends, and give its exit code; None if it goes on for longer."""
        assert self._process, "it was started"
        deadline = time.monotonic() + seconds
        while (code := self._process.poll()) is None and time.monotonic() < deadline:
            self.look()
            time.sleep(_POLL_SECONDS)
        self.look()
        return code

    def look(self) -> None:
        """Copy what the job has written since the last look to this process's own streams."""
        for file, to in self._shown.items():
            with suppress(FileNotFoundError), file.open("rb") as stream:
                stream.seek(self._offsets[file])
                new = stream.read()
                self._offsets[file] += len(new)
                to.write(new)
                to.flush()

    def stop(self, signum: int) -> None:
        """Pass a signal on, and wait for the end."""
        if number := self.number():
            _slurm("scancel", f"--signal={signal.Signals(signum).name[3:]}", number)
            self.wait(_STOP_SECONDS)

    def cancel(self) -> None:
        """Take the job or step out of the queue, and end the command that waits for it."""
        if self.goes_on:
            if number := self.number():
                _slurm("scancel", number)
                self.wait(_STOP_SECONDS)
            self.kill()

    def said(self) -> str:
        """The command's own words."""
        return self._said.read_text(encoding="utf-8", errors="replace")

    def last_words(self) -> str:
        """The last line of what went wrong."""
        return last_line(self.said())


class _Step(_Running):
    """A step of the allocation that this process is in."""

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
        for name in shown:  # a network's file system would remember for a while that they are not there
            (job.folder / name).touch()
        super().__init__(job, "sbatch", stdout=True, shown=shown)
        self._told = False

    def number(self) -> str | None:
        """The job's number as Slurm writes it, such as 17; None before it has one."""
        match = re.search(r"Submitted batch job (\d+)", self.said())
        return match and match[1]

    def look(self) -> None:
        """Show what is new, the job's number first."""
        if not self._told and (number := self.number()):
            self._told = True
            sys.stderr.write(f"job {number} of {self.job.cluster.nodes} machines, as {self.job.name}\n")
        super().look()

    def wait(self, seconds: float = math.inf) -> int | None:
        """As above. Raises HostError: Slurm did not take the job."""
        code = super().wait(seconds)
        if code and not self.number():
            raise HostError(f"sbatch: {last_line(self.said())}", hint="see cluster.toml, and `sinfo`")
        return code

    def stop(self, signum: int) -> None:
        """As above; a job that waits for its machines, which no signal reaches, is taken out of the queue."""
        if number := self.number():
            _slurm("scancel", "--state=PENDING", number)
            if not _slurm("squeue", "--noheader", f"--jobs={number}"):
                self.kill()  # it asks after its job only now and then
                return
        super().stop(signum)

    def cancel(self) -> None:
        """As above; a job whose number ``sbatch`` has not said may have been taken all the same, under its name."""
        if self.goes_on and not self.number():
            self.kill()
            _slurm("scancel", f"--name={self.job.name}")
        super().cancel()

    def last_words(self) -> str:
        """The last line that the job wrote to stderr, or else what ``sbatch`` said."""
        written = (self.job.folder / "stderr").read_text(encoding="utf-8", errors="replace")
        return last_line(written) if written.strip() else super().last_words()


def _slurm(*command: str) -> str:
    """What a command of Slurm's says; nothing where it fails."""
    with suppress(OSError):
        return subprocess.run(command, capture_output=True, text=True, check=False).stdout
    return ""
