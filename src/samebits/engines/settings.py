"""Settings of a cluster, from ``cluster.toml`` and its variables: the number of machines, and those of each engine.

They are not in ``params.yaml``, because no bit and no timing depends on a partition or an account.
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
from samebits.host.variables import NODES, SLURM

if TYPE_CHECKING:
    from collections.abc import Mapping

FILE = Path("cluster.toml")
_GUIDE = "see the guide of several machines"

Kind = Literal["Job", "TrainJob"]
"""Kind of the manifest: Kubernetes' own indexed Job, or a TrainJob of Kubeflow Trainer."""


class Slurm(Part):
    """Settings of a Slurm job. ``arguments`` are further arguments of ``srun`` and ``sbatch``.

    ``container_image`` is an image for pyxis, ``apptainer_image`` a file for apptainer. Without either, the job uses
    the environment of the login node.
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
    """Settings of a Job or a TrainJob; ``image`` is named by its digest.

    ``claim`` is the PersistentVolumeClaim with the repository, in the folder ``subpath`` if set. ``run_as_user`` is the
    owner of its files, by default the image's own user: the caller's id on this machine means nothing on the claim.
    ``shared_memory`` counts as memory of the pod. Keys of the Secret ``secret`` that are MLflow's variables become
    variables of the training; ``env`` has further ones. Taints with the keys ``tolerations`` are tolerated. The first
    pod waits ``start_seconds`` for the last, which may have to pull the image. ``runtime`` is a TrainJob's
    ClusterTrainingRuntime.
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
    """The number of machines (``nodes``), and the settings of Slurm and Kubernetes."""

    nodes: int = Field(2, ge=1)
    slurm: Slurm = Slurm()
    kubernetes: Kubernetes | None = None


def read_cluster(file: Path = FILE, environ: Mapping[str, str] = os.environ) -> Cluster:
    """The settings of a file, if it exists; variables override them.

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
    if nodes := environ.get(NODES):
        raw["nodes"] = nodes
    if isinstance(slurm, dict):
        for name in ("partition", "account", "time"):
            if value := environ.get(f"{SLURM}{name.upper()}"):
                slurm[name] = value
        if arguments := environ.get(f"{SLURM}ARGUMENTS"):
            try:
                slurm["arguments"] = shlex.split(arguments)
            except ValueError as error:
                raise UserError(f"{SLURM}ARGUMENTS: {error}: {arguments}", hint=_GUIDE) from None
    try:
        return Cluster.model_validate(raw)
    except ValidationError as error:
        raise UserError(f"{file} or its variables: {first_fault(error)}", hint=_GUIDE) from None
