"""Choice of the engine for a training with ranks, by SAMEBITS_LAUNCHER or ``samebits launch``.

A launch on Slurm waits for its end. For Kubernetes it prints manifests for ``kubectl``.
"""

from __future__ import annotations

import shlex
import sys
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self, cast

from samebits.errors import UserError
from samebits.here import call_of, is_kit, stage_command
from samebits.host.cluster_environment import find_nodes
from samebits.host.variables import LAUNCHER, NODES, chosen
from samebits.strategies import STRATEGIES

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from samebits.engines.settings import Kind

Launcher = Literal["local", "slurm"]
Engine = Literal["slurm", "kubernetes"]

_DRY_RUN_HINT = "samebits launch --dry-run kubernetes --strategy ddp ... | kubectl apply -f -"


@dataclass(frozen=True, kw_only=True)
class TrainingCall:
    """One call of stage train: its arguments, and the parsed values of some of them.

    ``num_devices``, ``nodes``, ``node_rank`` and ``master`` are None if the arguments leave them to the engine.
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
        """A call with ``arguments``, and the ``options`` that the stage parses from them."""
        read = {field.name: options[field.name] for field in fields(cls) if field.name != "arguments"}
        return cls(arguments=tuple(arguments), **read)

    @property
    def paths(self) -> dict[str, str | None]:
        """The paths among the arguments, by option."""
        return {"--params": self.params_file, "--data-dir": self.data_dir, "--out-dir": self.out_dir}


def launcher(environ: Mapping[str, str]) -> Launcher:
    """The value of SAMEBITS_LAUNCHER, local if unset. Raises UserError: it is another value."""
    if environ.get(LAUNCHER) == "kubernetes":
        raise UserError(f"{LAUNCHER}: got 'kubernetes', for which no stage waits", hint=_DRY_RUN_HINT)
    return cast("Launcher", chosen(LAUNCHER, environ) or "local")


def goes_elsewhere(strategy: str | None, environ: Mapping[str, str]) -> bool:
    """Whether a training of this strategy runs on a cluster's machines. Raises what ``launcher`` does."""
    return launcher(environ) != "local" and _has_ranks(strategy)


def _has_ranks(strategy: str | None) -> bool:
    """Whether a strategy may use several machines. An unknown name counts: its reader refuses it."""
    return strategy is not None and (strategy not in STRATEGIES or STRATEGIES[strategy].has_ranks)


def hand_over(argv: Sequence[str], strategy: str | None, environ: Mapping[str, str]) -> bool:
    """Run this stage on the cluster until it succeeds, if it belongs there; else return False.

    Raises:
        UserError: the settings are wrong.
        HostError: the engine does not accept it.
        SamebitsError: the error of the machines.
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
    """Run a training on an engine's machines; with ``dry_run``, only return the text that would start it.

    ``nodes`` and ``kind`` override the file's.

    Raises:
        UserError: the training uses one machine, the settings are wrong, or Kubernetes is used without ``dry_run``.
        HostError: the engine does not accept it.
        SamebitsError: the error of the machines.
    """
    _check(engine, training, kind)
    if nodes:
        environ = {**environ, NODES: str(nodes)}
    if engine == "kubernetes":
        if not dry_run:
            raise UserError("kubernetes: what is to be started is printed, and nobody waits for it", hint=_DRY_RUN_HINT)
        return _manifests(training, kind, environ)
    return _on_slurm([*call_of("train"), *training.arguments], environ, dry_run=dry_run)


def run_in_allocation(command: Sequence[str], environ: Mapping[str, str]) -> bool:
    """In an allocation of several machines, run a command on all of them until it succeeds; else return False.

    Raises:
        UserError: the settings are wrong.
        SamebitsError: the error of the machines.
    """
    count = environ.get("SLURM_JOB_NUM_NODES", "1")
    if count == "1" or find_nodes(environ=environ).several:  # a step of one machine is an allocation's shell
        return False
    _on_slurm(command, {**environ, NODES: count})
    return True


def _check(engine: Engine, training: TrainingCall, kind: Kind | None) -> None:
    strategy = training.strategy
    if not _has_ranks(strategy):
        hint = f"{stage_command('train', '--strategy', strategy)}, or launch ddp"
        raise UserError(f"{strategy} uses one machine, and {engine} would start several", hint=hint)
    machines = {"--nodes": training.nodes, "--node-rank": training.node_rank, "--master": training.master}
    for option in (option for option, value in machines.items() if value is not None):
        hint = f"samebits launch --nodes 2 {engine} ..., before the engine's name"
        raise UserError(f"{option} is what {engine} tells each machine", hint=hint)
    if kind and engine != "kubernetes":
        raise UserError(f"--kind: {engine} has none", hint="leave it out")


def _on_slurm(argv: Sequence[str], environ: Mapping[str, str], *, dry_run: bool = False) -> str:
    """Run Python with ``argv`` on Slurm's machines; with ``dry_run``, only return the command that would start it."""
    # Here, because every stage imports this module, and few go to Slurm.
    from samebits.engines.settings import read_cluster
    from samebits.engines.slurm import SlurmJob, run_on_slurm

    cluster = read_cluster(environ=environ)
    python = "python" if cluster.slurm.container_image or cluster.slurm.apptainer_image else sys.executable
    # Without it the code of the image would run.
    code = {"PYTHONPATH": str(Path("src").resolve())} if python == "python" and is_kit() else {}
    job = SlurmJob.of(cluster, [python, "-P", *argv], {**environ, **code, LAUNCHER: "local"})
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
