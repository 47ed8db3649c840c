"""A real Slurm on the tests' machines: its controller on the last one, the login node, slurmd on the others."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from contextlib import contextmanager
from fcntl import LOCK_EX, flock
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


def _munge() -> None:
    """Start the service that tells Slurm's daemons from others, unless it runs; other tests may be at it as well."""
    with Path("/run/lock/samebits-munge").open("w") as lock:
        flock(lock, LOCK_EX)
        if subprocess.run(["munge", "--no-input"], capture_output=True).returncode:
            _start_munge()


def _start_munge() -> None:
    key = Path("/etc/munge/munge.key")
    if not key.exists() or not key.stat().st_size:
        key.write_bytes(os.urandom(1024))
        key.chmod(0o400)
        shutil.chown(key, "munge")
    for folder in ("/run/munge", "/var/log/munge", "/var/lib/munge"):
        Path(folder).mkdir(exist_ok=True, mode=0o755)
        shutil.chown(folder, "munge", "munge")
    subprocess.run(["setpriv", "--reuid=munge", "--regid=munge", "--clear-groups", "munged", "--force"], check=True)


@contextmanager
def slurm(machines: Sequence[Machine], folder: Path) -> Iterator[dict[str, str]]:
    """The variables with which Slurm's commands find it on the last machine."""
    *compute, login = machines
    (folder / "conf").mkdir(parents=True)
    (folder / "state").mkdir()
    names = ",".join(machine.name for machine in compute)
    lines = [CONF.format(login=login, folder=folder)]
    lines += [f"NodeName={one.name} NodeAddr={one.address} CPUs=2 RealMemory=2000 State=UNKNOWN" for one in compute]
    lines += [f"PartitionName=main Nodes={names} Default=YES MaxTime=INFINITE State=UP", ""]
    conf = folder / "conf/slurm.conf"
    conf.write_text("\n".join(lines))
    (folder / "conf/cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
    _munge()
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
    time.sleep(0.5)
