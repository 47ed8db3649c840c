"""Stage scripts under test. Each runs in a fork of this process, which has imported torch once for all of them."""

from __future__ import annotations

import fcntl
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar

from ruamel.yaml import YAML

import forked
import samebits.cli
from patience import patient
from samebits.errors import exit_on_error

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

ROOT = Path(__file__).resolve().parents[2]
RUN_FILES = {"model.safetensors", "losses.csv", "timing.json", "run.json"}
MARK = "SAMEBITS_FAULTS"
"""Environment variable that marks every process of a campaign."""
SENDER = b"samebits.tracking.sender"
_SECOND_LOOK_SECONDS = 1.0
PARAMS: dict[str, Any] = {
    "data": {"task": "vectors", "num_samples": 1024, "test_samples": 64, "kwargs": {"features": 32}},
    "model": {"name": "mlp", "kwargs": {"hidden": [32], "dropout": 0.1}},
    "train": {
        "global_batch_size": 64,
        "epochs": 2,
        "repeats": 1,
        "num_devices": 2,
        "oversubscribe": True,
        "optimizer": {"name": "adamw", "lr": 0.01},
        "checkpoint_every_steps": 4,
        "timeout_s": 10,
    },
}
"""Parameters of a training of 32 steps and eight checkpoints. Its dropout and its optimizer have state to lose."""


NUMERICS = ("fast", "exact")


def training(strategy: str, devices: int, numerics: str) -> tuple[str, ...]:
    """Arguments of the stage train."""
    return ("--strategy", strategy, "--numerics", numerics, "--num-devices", str(devices))


class Broken(Exception):  # noqa: N818 - a promise is
    """A promise was not kept. The text names the promise and quotes what happened."""


def expect(held: bool, what: str, seen: object = "") -> None:
    """Raise ``Broken`` unless a promise ``held``."""
    if not held:
        raise Broken(f"{what}: {seen}" if seen != "" else what)


@dataclass
class Child:
    """A script that runs in its own session and prints into two files."""

    pid: int
    stdout: Path
    stderr: Path
    code: int | None = None

    def poll(self) -> int | None:
        """The exit code, negative for a signal. None while it runs."""
        if self.code is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.code = os.waitstatus_to_exitcode(status)
        return self.code

    def wait(self, seconds: float) -> int:
        """Wait for the exit code. Raises Broken after so many seconds, once the whole session is killed."""
        seconds = patient(seconds)
        deadline = time.monotonic() + seconds
        while (code := self.poll()) is None:
            if time.monotonic() > deadline:
                self.kill_tree()
                raise Broken(f"hangs: it has run for {seconds:g} s. It printed: {self.printed()[-500:]}")
            time.sleep(0.005)
        return code

    def go_on(self, seconds: float) -> bool:
        """Wait for so many seconds or for its end, and return whether it still runs."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and self.poll() is None:
            time.sleep(0.002)
        return self.poll() is None

    def kill_tree(self) -> None:
        """Kill all processes of its session."""
        kill(self.session())
        if self.code is None:
            _, status = os.waitpid(self.pid, 0)
            self.code = os.waitstatus_to_exitcode(status)

    def workers(self) -> list[int]:
        """Process ids of its workers by rank. Its sender is a child too, but a stopped sender would stay stopped."""
        children = Path(f"/proc/{self.pid}/task/{self.pid}/children")
        with suppress(FileNotFoundError, ProcessLookupError):
            pids = [int(pid) for pid in children.read_text(encoding="utf-8").split()]
            return [pid for pid in pids if SENDER not in command_of(pid)]
        return []

    def session(self) -> list[int]:
        """Living processes of its session."""
        return [pid for pid, state, session in _processes() if session == self.pid and state not in "ZX"]

    def out(self) -> str:
        """What it printed on stdout."""
        return self.stdout.read_text(encoding="utf-8", errors="replace")

    def err(self) -> str:
        """What it printed on stderr."""
        return self.stderr.read_text(encoding="utf-8", errors="replace")

    def printed(self) -> str:
        """All that was printed, errors last."""
        return self.out() + self.err()

    def errors(self) -> list[str]:
        """Error lines on stderr: each says why a program of the kit failed."""
        return [line for line in self.err().split("\n") if line.startswith("error: ")]


def _processes() -> list[tuple[int, str, int]]:
    """Id, state and session of every process."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            _, _, rest = path.read_text(encoding="utf-8").rpartition(")")
            state, _, _, session, *_ = rest.split()
            found.append((int(path.parent.name), state, int(session)))
    return found


def marked(mark: str, *, whole: bool = True) -> list[int]:
    """Living processes that were started by exec with this mark, or unless ``whole`` with a mark that begins so."""
    wanted, found = f"{MARK}={mark}".encode(), []
    for pid, state, _ in _processes():
        with suppress(OSError):
            variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
            if state not in "ZX" and any(one == wanted or (not whole and one.startswith(wanted)) for one in variables):
                found.append(pid)
    return found


def kill(pids: Iterable[int], signum: int = signal.SIGKILL) -> None:
    """Send a signal to the processes, except those that have ended."""
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signum)


def end_marked(mark: str) -> None:
    """Kill every process with this mark."""
    while found := marked(mark):
        kill(found)
        time.sleep(0.01)


def expect_none(living: Callable[[], list[int]], seconds: float) -> None:
    """Raise Broken unless all ``living`` processes end within so many seconds."""
    deadline = time.monotonic() + seconds
    while left := living():
        expect(time.monotonic() < deadline, "orphans", "\n    ".join(map(described, left)))
        time.sleep(0.02)


def command_of(pid: int) -> bytes:
    """The command line of a process. Empty if it has ended."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    return b""


def described(pid: int) -> str:
    """Description of a process for a report: command line, folder, state, parent, open files."""
    told = [f"{pid}: {command_of(pid).replace(bytes(1), b' ').decode(errors='replace').strip()}"]
    with suppress(OSError):
        folder = Path(f"/proc/{pid}")
        told += [f"in {(folder / 'cwd').readlink()}", f"waits in {(folder / 'wchan').read_text(encoding='ascii')}"]
        told += [line for line in (folder / "status").read_text().splitlines() if line.startswith(("State", "PPid"))]
        told += [f"{file.name} {file.readlink()}" for file in (folder / "fd").iterdir()]
    return ", ".join(told)


def _main(program: str | Callable[[], object], arguments: tuple[str, ...]) -> Callable[[], object]:
    """The callable that a fork runs. Functions of the campaign report errors as the kit's programs do."""
    if not isinstance(program, str):
        return exit_on_error()(program)
    if program == "samebits":
        sys.argv = [program, *arguments]
        return samebits.cli.main
    script = str(ROOT / "pipeline" / f"{program}.py")
    sys.argv = [script, *arguments]
    return partial(runpy.run_path, script, run_name="__main__")


class Sandbox:
    """A working folder with ``params.yaml`` and a temporary folder, in which programs of the kit run."""

    LIMIT: ClassVar[float] = 60.0  # seconds of a program

    def __init__(self, folder: Path, params: dict[str, Any] = PARAMS) -> None:
        self.folder, self.temporary = folder / "repository", folder / "tmp"
        self._output = folder / "output"
        for path in (self.folder, self.temporary, self._output):
            path.mkdir(parents=True)
        self.mark = next((part for part in folder.parts if part.startswith("faults-")), folder.name)  # the campaign's
        self._started = 0
        self.write_params(params)

    def write_params(self, params: dict[str, Any]) -> None:
        """Write ``params.yaml``."""
        YAML().dump(params, self.folder / "params.yaml")

    @property
    def environ(self) -> dict[str, str]:
        """Variables that every program gets besides the campaign's own."""
        return {"TMPDIR": str(self.temporary), MARK: self.mark, "SAMEBITS_RUNTIME": "host"}

    def start(
        self,
        program: str | Callable[[], object],
        *arguments: str,
        armed: Callable[[], object] | None = None,
        environ: Mapping[str, str] = MappingProxyType({}),
    ) -> Child:
        """Start a stage, the command ``samebits`` or a function. Its process calls ``armed`` first."""

        def work() -> None:
            tempfile.tempdir = None  # the campaign's own, which a fork inherits
            os.environ.update({**self.environ, **environ})
            if armed:
                armed()
            _main(program, arguments)()

        self._started += 1
        stdout, stderr = (self._output / f"{self._started}.{stream}" for stream in ("out", "err"))
        stdout.touch()
        stderr.touch()
        pid = os.fork()
        if pid == 0:
            try:
                os.setsid()
                forked.settle(self.folder, stdout, stderr)
                forked.run(work)
            finally:
                os._exit(127)
        return Child(pid, stdout, stderr)

    def __call__(
        self,
        program: str | Callable[[], object],
        *arguments: str,
        armed: Callable[[], object] | None = None,
        environ: Mapping[str, str] = MappingProxyType({}),
        seconds: float | None = None,
    ) -> Child:
        """Run a program to its end. Raises Broken after so many seconds."""
        child = self.start(program, *arguments, armed=armed, environ=environ)
        child.wait(seconds or self.LIMIT)
        return child

    def age(self) -> None:
        """Make unfinished folders without a lock old: the next process removes no young ones, whose maker may live."""
        for folder in (*self.temporary.iterdir(), *self.folder.rglob("*.samebits.tmp")):
            if folder.is_dir() and not (folder / ".samebits.lock").exists():
                os.utime(folder, (0, 0))

    def leftovers(self) -> list[str]:
        """Files in the temporary folder and unfinished files in the working folder that nobody has locked.

        They are still there at a second look: a sender may have been about to lock or to remove them.
        """
        if first := self._lying():
            time.sleep(_SECOND_LOOK_SECONDS)
            return sorted({*first} & {*self._lying()})
        return []

    def _lying(self) -> list[str]:
        # os.walk goes on where a sender removes a folder before it is listed.
        paths = (Path(above) / name for above, folders, files in os.walk(self.folder) for name in (*folders, *files))
        unfinished = (path for path in paths if path.name.endswith(".samebits.tmp") or path.name == "unfinished")
        return [str(path) for path in (*self.temporary.iterdir(), *unfinished) if not _in_use(path)]


def commit(folder: Path, *what: str) -> None:
    """Make a folder a git repository with one commit of these files."""
    who = {f"GIT_{who}_{part}": "faults" for who in ("AUTHOR", "COMMITTER") for part in ("NAME", "EMAIL")}
    for command in (("init", "--quiet"), ("add", *what), ("commit", "--quiet", "--message", "all")):
        subprocess.run(["git", *command], cwd=folder, env={**os.environ, **who}, check=True, capture_output=True)


def _in_use(path: Path) -> bool:
    """Whether a process, such as a sender at work, has locked it."""
    try:
        fd = os.open(path, os.O_RDONLY)
    except FileNotFoundError:
        return True  # it is gone already
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(fd)
    return False


def check_end(child: Child, codes: set[int]) -> None:
    """Raise Broken unless a script ended with one of these exit codes, no traceback, and no living process."""
    printed = child.err()
    expect("Traceback" not in printed, "a traceback", printed[max(0, printed.find("Traceback") - 500) :][:3000])
    expect(child.code in codes, f"exit code {child.code} in place of {sorted(codes)}", printed[-500:])
    expect_none(child.session, 15)
