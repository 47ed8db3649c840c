"""Which training goes to which engine: one with ranks, to that which SAMEBITS_LAUNCHER or ``samebits launch`` names.

Slurm is waited for. For Kubernetes there are manifests, and ``kubectl`` does the rest.
"""

from __future__ import annotations

import shlex
import sys
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self, cast, get_args

from samebits.errors import UserError
from samebits.host.cluster_environment import find_nodes
from samebits.strategies import STRATEGIES

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from samebits.engines.settings import Kind

Launcher = Literal["local", "slurm"]
Engine = Literal["slurm", "kubernetes"]

LAUNCHER = "SAMEBITS_LAUNCHER"
SCRIPT = "pipeline/train.py"
_PRINTED = "samebits launch --dry-run kubernetes --strategy ddp ... | kubectl apply -f -"


@dataclass(frozen=True, kw_only=True)
class TrainingCall:
    """One call of ``pipeline/train.py``: its arguments, and what some of them say.

    ``num_devices`` is None where the arguments leave it to the engine, and so are ``nodes`` and what goes with them.
    """

    arguments: tuple[str, ...]
    strategy: str
    numerics: str
    num_devices: str | None = None
    params_file: str | None = None
    data_dir: str | None = None
    out_dir: str | None = None
    nodes: int | None = None
    node_rank: int | None = None
    master: str | None = None

    @classmethod
    def of(cls, arguments: Sequence[str], options: Mapping[str, Any]) -> Self:
        """A call with such ``arguments``, from which the script reads these ``options``."""
        read = {field.name: options[field.name] for field in fields(cls) if field.name != "arguments"}
        return cls(arguments=tuple(arguments), **read)

    @property
    def paths(self) -> dict[str, str | None]:
        """The paths that it is told, by option."""
        return {"--params": self.params_file, "--data-dir": self.data_dir, "--out-dir": self.out_dir}


def launcher(environ: Mapping[str, str]) -> Launcher:
    """What SAMEBITS_LAUNCHER asks for, local if it is not set. Raises UserError: it is something else."""
    value = environ.get(LAUNCHER) or "local"
    if value == "kubernetes":
        raise UserError(f"{LAUNCHER}: got 'kubernetes', for which no stage waits", hint=_PRINTED)
    if value not in get_args(Launcher):
        raise UserError(f"{LAUNCHER}: got {value!r}, accepts local or slurm", hint=f"unset {LAUNCHER}")
    return cast("Launcher", value)


def goes_elsewhere(strategy: str | None, environ: Mapping[str, str]) -> bool:
    """Whether a training of this strategy runs on a cluster's machines. Raises what ``launcher`` does."""
    return launcher(environ) != "local" and _has_ranks(strategy)


def _has_ranks(strategy: str | None) -> bool:
    """Whether it may have several machines; a name that is wrong is refused where it is read."""
    return strategy is not None and (strategy not in STRATEGIES or STRATEGIES[strategy].has_ranks)


def hand_over(argv: Sequence[str], strategy: str | None, environ: Mapping[str, str]) -> bool:
    """Run this stage elsewhere if it belongs there, to its good end; else return False.

    Raises:
        UserError: the settings are wrong.
        HostError: the engine does not take it.
        SamebitsError: what the machines failed of.
    """
    if not goes_elsewhere(strategy, environ):
        return False
    _on_slurm(argv, environ)
    return True


def launch(
    engine: Engine,
    training: TrainingCall,
    *,
    nodes: int | None,
    kind: Kind | None,
    dry_run: bool,
    environ: Mapping[str, str],
) -> str:
    """Run a training on an engine's machines; with ``dry_run``, only the text of what would start it.

    ``nodes`` and ``kind`` go before the file's.

    Raises:
        UserError: it is no training for several machines, the settings are wrong, or nobody waits for the engine.
        HostError: the engine does not take it.
        SamebitsError: what the machines failed of.
    """
    _check(engine, training, kind)
    if nodes:
        environ = {**environ, "SAMEBITS_NODES": str(nodes)}
    if engine == "kubernetes":
        if not dry_run:
            raise UserError("kubernetes: what is to be started is printed, and nobody waits for it", hint=_PRINTED)
        return _manifests(training, kind, environ)
    return _on_slurm([SCRIPT, *training.arguments], environ, dry_run=dry_run)


def run_in_allocation(command: Sequence[str], environ: Mapping[str, str]) -> bool:
    """In an allocation of several machines, run the command over all of them, to its good end; else return False.

    Raises:
        UserError: the settings are wrong.
        SamebitsError: what the machines failed of.
    """
    count = environ.get("SLURM_JOB_NUM_NODES", "1")
    if count == "1" or find_nodes(environ=environ).several:  # a step of one machine is the shell of an allocation
        return False
    _on_slurm(command, {**environ, "SAMEBITS_NODES": count})
    return True


def _check(engine: Engine, training: TrainingCall, kind: Kind | None) -> None:
    strategy = training.strategy
    if not _has_ranks(strategy):
        hint = f"python {SCRIPT} --strategy {strategy}, or launch ddp"
        raise UserError(f"{strategy} uses one machine, and {engine} would start several", hint=hint)
    machines = {"--nodes": training.nodes, "--node-rank": training.node_rank, "--master": training.master}
    for option in (option for option, value in machines.items() if value is not None):
        hint = f"samebits launch --nodes 2 {engine} ..., before the engine's name"
        raise UserError(f"{option} is what {engine} tells each machine", hint=hint)
    if kind and engine != "kubernetes":
        raise UserError(f"--kind: {engine} has none", hint="leave it out")


def _on_slurm(argv: Sequence[str], environ: Mapping[str, str], *, dry_run: bool = False) -> str:
    """Run Python with such arguments on Slurm's machines; with ``dry_run``, only return the command that would."""
    from samebits.engines.settings import read_cluster  # here, because every stage asks, and few are handed over
    from samebits.engines.slurm import SlurmJob, run_on_slurm

    cluster = read_cluster(environ=environ)
    python = "python" if cluster.slurm.container_image or cluster.slurm.apptainer_image else sys.executable
    source = Path("src").resolve()
    code = {"PYTHONPATH": str(source)} if python == "python" and source.is_dir() else {}  # else it would be the image's
    job = SlurmJob.of(cluster, [python, *argv], {**environ, **code, LAUNCHER: "local"})
    if dry_run:
        return f"{shlex.join(job.submission())}\n"
    run_on_slurm(job)
    return ""


def _manifests(training: TrainingCall, kind: Kind | None, environ: Mapping[str, str]) -> str:
    from samebits.engines.kubernetes import as_yaml, manifests
    from samebits.engines.settings import read_cluster

    cluster = read_cluster(environ=environ)
    if kind and cluster.kubernetes:
        cluster = cluster.model_copy(update={"kubernetes": cluster.kubernetes.model_copy(update={"kind": kind})})
    return as_yaml(manifests(cluster, training, environ))
