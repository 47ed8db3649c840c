"""``cluster.toml`` and its variables: on how many machines, and what an engine wants to know.

It is not in ``params.yaml``, since no bit and no figure is a function of a partition or an account.
"""

from __future__ import annotations

import os
import shlex
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from pydantic import Field, ValidationError

from samebits.errors import UserError
from samebits.files import Part, first_fault

if TYPE_CHECKING:
    from collections.abc import Mapping

FILE = Path("cluster.toml")
_GUIDE = "see the guide of several machines"

Kind = Literal["Job", "TrainJob"]
"""What Kubernetes is asked for: its own indexed Job, or a TrainJob of Kubeflow Trainer."""


class Slurm(Part):
    """How a job is asked for. ``arguments`` are further ones of ``srun`` and ``sbatch``.

    ``container_image`` is one for pyxis, ``apptainer_image`` a file for apptainer; without either, the environment of
    the login node is used.
    """

    partition: str | None = None
    account: str | None = None
    time: str | None = None
    gpus_per_node: int | None = Field(None, ge=1)
    cpus_per_task: int | None = Field(None, ge=1)
    warning_seconds: int = Field(60, ge=0)
    arguments: tuple[str, ...] = ()
    container_image: str | None = None
    apptainer_image: str | None = None


class Kubernetes(Part):
    """What a Job or a TrainJob is made from; ``image`` is named by its digest.

    ``claim`` is the PersistentVolumeClaim that holds the repository, in the folder ``subpath`` if that is set, and
    ``run_as_user`` is whose files these are: the image's own user unless it is set, since the caller's number on this
    machine says nothing of the claim. ``shared_memory`` counts as memory of the pod. The keys of the Secret ``secret``
    that are variables of MLflow's become variables of the training; ``env`` are further ones. Taints of nodes with the
    keys ``tolerations`` are tolerated. The first pod waits ``start_seconds`` for the last, which may have to pull the
    image. ``runtime`` is a TrainJob's ClusterTrainingRuntime.
    """

    image: str
    claim: str
    kind: Kind = "Job"
    namespace: str | None = None
    subpath: str | None = None
    run_as_user: int = Field(1000, ge=0)
    gpus_per_node: int | None = Field(None, ge=1)
    cpus_per_node: int | None = Field(None, ge=1)
    memory_per_node: str | None = None
    shared_memory: str = "8Gi"
    secret: str | None = None
    env: dict[str, str] = Field({})
    service_account: str | None = None
    node_selector: dict[str, str] = Field({})
    tolerations: tuple[str, ...] = ()
    start_seconds: int = Field(600, ge=0)
    active_deadline_seconds: int | None = Field(None, ge=1)
    runtime: str = "torch-distributed"


class Cluster(Part):
    """``nodes`` machines, and what Slurm or Kubernetes wants to know."""

    nodes: int = Field(2, ge=1)
    slurm: Slurm = Slurm()
    kubernetes: Kubernetes | None = None


def read_cluster(file: Path = FILE, environ: Mapping[str, str] = os.environ) -> Cluster:
    """The settings of a file, if there is one; variables go before it.

    Raises:
        UserError: the file or a variable is wrong.
    """
    raw = {}
    if file.exists():
        try:
            raw = tomllib.loads(file.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
            raise UserError(f"{file}: cannot be read: {error}", hint=_GUIDE) from None
    slurm = raw.setdefault("slurm", {})
    if nodes := environ.get("SAMEBITS_NODES"):
        raw["nodes"] = nodes
    if isinstance(slurm, dict):
        for name in ("partition", "account", "time"):
            if value := environ.get(f"SAMEBITS_SLURM_{name.upper()}"):
                slurm[name] = value
        if arguments := environ.get("SAMEBITS_SLURM_ARGUMENTS"):
            try:
                slurm["arguments"] = shlex.split(arguments)
            except ValueError as error:
                raise UserError(f"SAMEBITS_SLURM_ARGUMENTS: {error}: {arguments}", hint=_GUIDE) from None
    try:
        return Cluster.model_validate(raw)
    except ValidationError as error:
        raise UserError(f"{file} or its variables: {first_fault(error)}", hint=_GUIDE) from None
