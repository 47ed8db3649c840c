"""Several machines out of one: network namespaces on a switch, each with a host name, a hosts file and its disks.

The switch has a namespace of its own, so that the host's firewall stays out of it. Nothing of it is seen outside.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from patience import patient

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

# Hosts file and name server first, then what this machine sees elsewhere at a path, then the command.
ENTER = """
hostname "$1"
mount --bind "$2" /etc/hosts
mount --bind "$3" /etc/resolv.conf
shift 3
while [ "$1" != -- ]; do mount --bind "$1" "$2"; shift 2; done
shift
exec "$@"
"""


def why_none(*programs: str) -> str | None:
    """Why this host cannot have such machines with these programs; None if it can."""
    if os.geteuid():
        return "only root makes network namespaces"
    missing = [name for name in ("ip", "nsenter", "unshare", "tc", *programs) if not shutil.which(name)]
    if missing:
        return f"no {missing[0]} here"
    name = f"try-{os.getpid()}"
    tried = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True)
    subprocess.run(["ip", "netns", "del", name], capture_output=True)
    return tried.stderr.strip() if tried.returncode else None


def ip(*arguments: str) -> None:
    """Run ``ip``."""
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True)


@dataclass
class Process:
    """A command on a machine, and all that it starts."""

    popen: subprocess.Popen[str]
    machine: Machine

    def signal(self, signum: int) -> None:
        """To the command alone."""
        self.popen.send_signal(signum)

    def wait(self, seconds: float = 300) -> tuple[int, str, str]:
        """Its exit code, and what it wrote to stdout and to stderr."""
        stdout, stderr = self.popen.communicate(timeout=patient(seconds))
        return self.popen.returncode, stdout, stderr

    def ends(self, code: int = 0, seconds: float = 300) -> tuple[str, str]:
        """Wait for its end with this exit code; what it wrote to stdout and to stderr."""
        ended, stdout, stderr = self.wait(seconds)
        assert ended == code, stderr
        return stdout, stderr

    def children(self) -> list[int]:
        """The processes that it has started and that run."""
        found, todo = [], [self.popen.pid]
        while todo:
            pid = todo.pop()
            with suppress(OSError):
                new = [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
                found += new
                todo += new
        return found


@dataclass
class Machine:
    """One of the machines; ``disks`` are what it sees at paths where others see something else."""

    name: str
    namespace: str
    address: str
    folder: Path
    switch: str
    disks: dict[Path, Path] = field(default_factory=dict)
    started: list[subprocess.Popen[str]] = field(default_factory=list)

    def start(self, *command: object, cwd: Path, environ: Mapping[str, str] | None = None) -> Process:
        """Start a command there, as the leader of a session of its own."""
        disks = [str(path) for pair in self.disks.items() for path in reversed(pair)]
        inside = ["sh", "-c", ENTER, "sh", self.name, str(self.folder / "hosts"), str(self.folder / "resolv.conf")]
        enter = ["nsenter", f"--net=/run/netns/{self.namespace}", "unshare", "--uts", "--mount", *inside, *disks, "--"]
        popen = subprocess.Popen(
            [*enter, "env", f"--chdir={cwd}", *map(str, command)],
            env={**os.environ, **(environ or {})},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self.started.append(popen)
        return Process(popen, self)

    def run(self, *command: object, cwd: Path, **options: Any) -> tuple[int, str, str]:
        """Run a command there to its end."""
        return self.start(*command, cwd=cwd, **options).wait()

    def link(self, state: str) -> None:
        """Set the cable to the switch ``up`` or ``down``."""
        ip("-n", self.switch, "link", "set", f"to-{self.name}", state)

    def limit(self, rate: str) -> None:
        """Limit its sending rate, such as ``100mbit``."""
        shape = ["qdisc", "replace", "dev", "eth0", "root", "tbf", "rate", rate, "burst", "32k", "latency", "50ms"]
        subprocess.run(["tc", "-n", self.namespace, *shape], check=True, capture_output=True, text=True)

    def drop(self, *match: str) -> None:
        """Let its firewall drop what comes in and matches, in options of ``iptables``."""
        command = ["ip", "netns", "exec", self.namespace, "iptables", "-A", "INPUT", *match, "-j", "DROP"]
        subprocess.run(command, check=True, capture_output=True)

    def pids(self) -> list[int]:
        """All processes in its network."""
        done = subprocess.run(["ip", "netns", "pids", self.namespace], capture_output=True, text=True, check=True)
        return [int(pid) for pid in done.stdout.split()]

    def is_idle(self) -> bool:
        """Whether nothing runs there."""
        return not self.pids()

    def freeze(self) -> None:
        """Stop every process there, as a machine that hangs."""
        for pid in self.pids():
            os.kill(pid, signal.SIGSTOP)

    def thaw(self) -> None:
        """Let every process there go on."""
        for pid in self.pids():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)

    def kill(self) -> None:
        """Kill every process there, as a machine that loses power does."""
        for _ in range(100):
            pids = self.pids()
            for pid in pids:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            if not pids:
                return
            time.sleep(0.05)


@contextmanager
def machines(count: int, folder: Path) -> Iterator[list[Machine]]:
    """``count`` machines n0, n1 ... with addresses 10.77.0.10, 10.77.0.11 ..., removed at the end."""
    tag = f"{os.getpid()}-{time.monotonic_ns() % 10**6}"
    switch = f"sw-{tag}"
    made: list[Machine] = []
    try:
        ip("netns", "add", switch)
        ip("-n", switch, "link", "add", "br0", "type", "bridge")
        ip("-n", switch, "link", "set", "br0", "up")
        hosts = ["127.0.0.1 localhost", *(f"10.77.0.1{i} n{i}" for i in range(count))]
        for i in range(count):
            machine = Machine(f"n{i}", f"n{i}-{tag}", f"10.77.0.1{i}", folder / f"n{i}", switch)
            ip("netns", "add", machine.namespace)
            made.append(machine)
            port = f"to-{machine.name}"
            ip("-n", switch, "link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", machine.namespace)
            ip("-n", switch, "link", "set", port, "master", "br0", "up")
            ip("-n", machine.namespace, "link", "set", "lo", "up")
            ip("-n", machine.namespace, "address", "add", f"{machine.address}/24", "dev", "eth0")
            ip("-n", machine.namespace, "link", "set", "eth0", "up")
            machine.folder.mkdir(parents=True)
            (machine.folder / "resolv.conf").write_text("")
            (machine.folder / "hosts").write_text("\n".join([*hosts, f"127.0.1.1 {machine.name}-itself", ""]))
        yield made
    finally:
        for machine in made:
            machine.kill()
            for popen in machine.started:
                if popen.returncode is None:
                    popen.communicate(timeout=patient(60))
        for namespace in (*(machine.namespace for machine in made), switch):
            subprocess.run(["ip", "netns", "del", namespace], capture_output=True)
