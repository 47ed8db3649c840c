"""A real Slurm on the tests' machines: its controller on the last one, the login node, slurmd on the others."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from conftest import wait_for

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from machines import Machine

CONF = """
ClusterName=samebits
SlurmctldHost={login.name}({login.address})
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={munge}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
MpiDefault=none
ReturnToService=2
KillWait=5
SchedulerParameters=sched_interval=1,batch_sched_delay=0
"""


def why_none() -> str | None:
    """Why there can be no Slurm here; None where there can."""
    missing = [name for name in ("slurmctld", "slurmd", "srun", "munged") if not shutil.which(name)]
    return f"no {missing[0]} here" if missing else None


@contextmanager
def munge() -> Iterator[Path]:
    """The socket of a new munge service, by which Slurm's daemons know each other."""
    with tempfile.TemporaryDirectory(prefix="munge-") as name:  # a socket's path may not be long
        folder = Path(name)
        key, socket = folder / "key", folder / "socket"
        key.touch(mode=0o600)
        key.write_bytes(os.urandom(1024))
        files = {
            "key-file": key,
            "socket": socket,
            **{f"{file}-file": folder / file for file in ("log", "pid", "seed")},
        }
        options = [f"--{option}={path}" for option, path in files.items()]
        with subprocess.Popen(["munged", "--foreground", "--force", *options], stderr=subprocess.DEVNULL) as process:
            wait_for(socket.exists)
            try:
                yield socket
            finally:
                process.terminate()


@contextmanager
def slurm(machines: Sequence[Machine], folder: Path) -> Iterator[dict[str, str]]:
    """The variables with which Slurm's commands find it on the last machine."""
    with munge() as socket:
        yield from _slurm(machines, folder, socket)


def _slurm(machines: Sequence[Machine], folder: Path, socket: Path) -> Iterator[dict[str, str]]:
    *compute, login = machines
    (folder / "conf").mkdir(parents=True)
    (folder / "state").mkdir()
    names = ",".join(machine.name for machine in compute)
    lines = [CONF.format(login=login, folder=folder, munge=socket)]
    lines += [f"NodeName={one.name} NodeAddr={one.address} CPUs=2 RealMemory=2000 State=UNKNOWN" for one in compute]
    lines += [f"PartitionName=main Nodes={names} Default=YES MaxTime=INFINITE State=UP", ""]
    conf = folder / "conf/slurm.conf"
    conf.write_text("\n".join(lines))
    (folder / "conf/cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
    environ = {"SLURM_CONF": str(conf)}
    login.start("slurmctld", "-D", "-c", "-f", conf, cwd=folder, environ=environ)
    for machine in compute:
        (folder / f"spool.{machine.name}").mkdir()
        machine.start("slurmd", "-D", "-N", machine.name, "-f", conf, cwd=folder, environ=environ)

    def idle() -> bool:
        code, stdout, _ = login.run("sinfo", "--noheader", "--format=%t %D", cwd=folder, environ=environ)
        return code == 0 and stdout.split() == ["idle", str(len(compute))]

    wait_for(idle)
    yield environ
    login.run("scancel", "--full", "--state=RUNNING", cwd=folder, environ=environ)
    wait_for(
        lambda: login.run("squeue", "--noheader", "--states=RUNNING,COMPLETING", cwd=folder, environ=environ)[1] == ""
    )
