"""Manifests of a training on Kubernetes: an indexed Job with its Service, or a TrainJob of Kubeflow Trainer.

Nothing here talks to a cluster. ``kubectl`` applies the printed manifests, and a pod's exit code tells how it ended.
"""

from __future__ import annotations

import hashlib
import io
import json
import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from ruamel.yaml import YAML
from ruamel.yaml.scalarstring import DoubleQuotedScalarString

from samebits.engines.settings import FILE
from samebits.errors import UserError, without_password
from samebits.here import call_of, is_kit
from samebits.host.addresses import is_loopback
from samebits.host.cluster_environment import DEFAULT_PORT
from samebits.host.variables import IMAGE, SECRET, START_SECONDS
from samebits.tracking.store import address_parts

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from samebits.engines.launch import TrainingCall
    from samebits.engines.settings import Cluster, Kubernetes

Manifest = dict[str, Any]

REPOSITORY = "/repository"
"""Mount path of the claim: the same in all pods, because DVC and MLflow store absolute paths."""

_GRACE_SECONDS = 90  # 45 for the checkpoint and for leaving the others, the rest for delivery to MLflow
_INDEX = "metadata.annotations['batch.kubernetes.io/job-completion-index']"  # the label is newer: Kubernetes 1.28
_NODE = "node"  # name of the job and of the container in Kubeflow's runtimes
_MANAGER = "samebits/launch"  # owner of the runtime patches; must have a slash
_SHARED = "shared-memory"
_MLFLOW = ("MLFLOW_TRACKING_URI", "MLFLOW_TRACKING_USERNAME", "MLFLOW_TRACKING_PASSWORD", "MLFLOW_TRACKING_TOKEN")
_SECRET_NAME = re.compile(r"(PASSWORD|TOKEN|SECRET|KEY)$", re.IGNORECASE)
_HIDE_HINT = "keep it in a Secret of the cluster that `secret` in [kubernetes] names, and not here"
_DIGEST_HINT = (
    "`docker buildx imagetools inspect NAME`, or after a push `docker inspect --format '{{index .RepoDigests 0}}' NAME`"
)


def manifests(cluster: Cluster, training: TrainingCall, environ: Mapping[str, str]) -> list[Manifest]:
    """Manifests that start a training on a cluster. The same settings and arguments give the same name.

    From ``environ`` only the address of MLflow's server is used.

    Raises:
        UserError: a setting is missing or wrong, or a secret would be printed.
    """
    settings = cluster.kubernetes
    if settings is None:
        hint = "image and claim are needed; see the guide of several machines"
        raise UserError(f"{FILE} has no table [kubernetes]", hint=hint)
    if not re.fullmatch(r"[^\s@]+@sha256:[0-9a-f]{64}", settings.image):
        text = f"{FILE}: kubernetes.image: got {settings.image}, expected NAME@sha256:DIGEST: a tag may move"
        raise UserError(text, hint=_DIGEST_HINT)
    for option, path in training.paths.items():
        if path and path.startswith("/") and not f"{path}/".startswith(f"{REPOSITORY}/"):
            hint = f"give a path inside the repository, which pods have at {REPOSITORY}"
            raise UserError(f"{option}: {path} is not on the claim, and would be gone with its pod", hint=hint)
    variables = _variables(settings, environ)
    pods = _Pods(name="", settings=settings, nodes=cluster.nodes, training=training, variables=variables)
    digest = hashlib.sha256(json.dumps(pods.manifests(), sort_keys=True).encode()).hexdigest()[:8]
    name = f"samebits-{training.strategy}-{training.numerics}-{digest}".replace("_", "-")
    return replace(pods, name=name).manifests()


def as_yaml(documents: Sequence[Manifest]) -> str:
    """Manifests as text that all versions of YAML read alike."""
    yaml, stream = YAML(), io.StringIO()
    yaml.explicit_start = True
    yaml.width = 2**16
    yaml.indent(mapping=2, sequence=4, offset=2)
    yaml.representer.ignore_aliases = lambda _: True
    yaml.dump_all([_quoted(document) for document in documents], stream)
    return stream.getvalue()


def _quoted(value: Any) -> Any:
    """The value with quotes around texts that a YAML version may read as another type, as ``on`` or ``1:30``."""
    if isinstance(value, dict):
        return {key: _quoted(one) for key, one in value.items()}
    if isinstance(value, list):
        return [_quoted(one) for one in value]
    if not isinstance(value, str):
        return value
    plain = re.fullmatch(r"[A-Za-z/][A-Za-z0-9_./-]*", value)
    words = {"y", "n", "yes", "no", "on", "off", "true", "false", "null"}
    return value if plain and value.lower() not in words else DoubleQuotedScalarString(value)


@dataclass(frozen=True, kw_only=True)
class _Pods:
    """The pods of a training, one on each machine."""

    name: str
    settings: Kubernetes
    nodes: int
    training: TrainingCall
    variables: Mapping[str, Any]

    def manifests(self) -> list[Manifest]:
        return [self._service(), self._job()] if self.settings.kind == "Job" else [self._train_job()]

    def _job(self) -> Manifest:
        name, settings = self.name, self.settings
        meeting = {
            "PET_NNODES": str(self.nodes),
            "PET_NODE_RANK": {"fieldRef": {"fieldPath": _INDEX}},
            "PET_MASTER_ADDR": f"{name}-0.{name}",
            "PET_MASTER_PORT": str(DEFAULT_PORT),
            "PET_NPROC_PER_NODE": str(settings.gpus_per_node or "auto"),
        }
        container = self._container(
            image=settings.image,
            command=self._command(),
            workingDir=REPOSITORY,
            env=_env_entries({**meeting, **self.variables}),
            **_without_empty(resources=self._resources()),
        )
        spec = {
            "completionMode": "Indexed",  # gives each pod an index and a host name
            "completions": self.nodes,
            "parallelism": self.nodes,
            # When one pod fails, all others write a checkpoint and end. A replacement of that pod alone would find no
            # others, or be the second with its index. A restart of the Job continues from the checkpoint.
            "backoffLimit": 0,
            **_without_empty(activeDeadlineSeconds=settings.active_deadline_seconds),
            "template": {
                "metadata": {"labels": self._labels()},
                "spec": {**self._pod(), "restartPolicy": "Never", "subdomain": name, "containers": [container]},
            },
        }
        return self._document("batch/v1", "Job", spec)

    def _service(self) -> Manifest:
        """The headless Service that gives each pod a DNS name."""
        spec = {
            "clusterIP": "None",
            # The name exists once the pod has an address, and not only when it is ready. Otherwise the other pods would
            # look it up too early, and name servers cache for a while that a name is missing.
            "publishNotReadyAddresses": True,
            "selector": self._labels(),
        }
        return self._document("v1", "Service", spec)

    def _train_job(self) -> Manifest:
        """The TrainJob. Its runtime makes the Service and the PET_ variables, which a TrainJob must not set."""
        settings = self.settings
        command = ["env", f"--chdir={REPOSITORY}", *self._command()]  # a TrainJob has no working directory
        if not settings.gpus_per_node and self.training.num_devices is None:
            command += ["--num-devices", "auto"]  # the runtime's default is one for each core
        trainer = {
            "image": settings.image,
            "command": command,
            "env": _env_entries(self.variables),
            "numNodes": self.nodes,
            **_without_empty(numProcPerNode=settings.gpus_per_node, resourcesPerNode=self._resources()),
        }
        pod = {"metadata": {"labels": self._labels()}, "spec": {**self._pod(), "containers": [self._container()]}}
        job = {"name": _NODE, "template": {"spec": {"template": pod}}}
        patch = {"manager": _MANAGER, "trainingRuntimeSpec": {"template": {"spec": {"replicatedJobs": [job]}}}}
        spec = {
            "runtimeRef": {"name": settings.runtime},
            **_without_empty(activeDeadlineSeconds=settings.active_deadline_seconds),
            "trainer": trainer,
            "runtimePatches": [patch],
        }
        return self._document("trainer.kubeflow.org/v1alpha1", "TrainJob", spec)

    def _document(self, version: str, kind: str, spec: Manifest) -> Manifest:
        metadata = {"name": self.name, **_without_empty(namespace=self.settings.namespace), "labels": self._labels()}
        return {"apiVersion": version, "kind": kind, "metadata": metadata, "spec": spec}

    def _labels(self) -> dict[str, str]:
        return {"app.kubernetes.io/name": "samebits", "app.kubernetes.io/instance": self.name}

    def _command(self) -> list[str]:
        return ["python", "-P", *call_of("train"), *self.training.arguments]

    def _pod(self) -> Manifest:
        """The part of a pod's spec that both kinds share."""
        settings = self.settings
        each_elsewhere = {"labelSelector": {"matchLabels": self._labels()}, "topologyKey": "kubernetes.io/hostname"}
        security = {
            "runAsUser": settings.run_as_user,
            "runAsGroup": settings.run_as_user,
            "runAsNonRoot": settings.run_as_user != 0,
            "seccompProfile": {"type": "RuntimeDefault"},
        }
        volumes = [
            {"name": "repository", "persistentVolumeClaim": {"claimName": settings.claim}},
            # NCCL needs more than a pod's default of 64 MB.
            {"name": _SHARED, "emptyDir": {"medium": "Memory", "sizeLimit": settings.shared_memory}},
        ]
        return {
            # One pod on each machine, as with Slurm: two pods would share its cores and links.
            "affinity": {"podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [each_elsewhere]}},
            **_without_empty(
                nodeSelector=settings.node_selector,
                tolerations=[{"key": key, "operator": "Exists"} for key in settings.tolerations],
                serviceAccountName=settings.service_account,
            ),
            "securityContext": security,
            "terminationGracePeriodSeconds": _GRACE_SECONDS,
            "volumes": volumes,
        }

    def _container(self, **own: Any) -> Manifest:
        """The container of a pod, with the few rights that clusters with pod security allow."""
        security = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
        mounts = [
            {"name": "repository", "mountPath": REPOSITORY, **_without_empty(subPath=self.settings.subpath)},
            {"name": _SHARED, "mountPath": "/dev/shm"},  # noqa: S108 - the pod's own
        ]
        return {"name": _NODE, **own, "securityContext": security, "volumeMounts": mounts}

    def _resources(self) -> Manifest:
        """Limits equal to requests, because timings of a pod that borrows cores mean nothing."""
        settings = self.settings
        asked = _without_empty(
            cpu=settings.cpus_per_node and str(settings.cpus_per_node),
            memory=settings.memory_per_node,
            **{"nvidia.com/gpu": settings.gpus_per_node and str(settings.gpus_per_node)},
        )
        return {"limits": asked, "requests": asked} if asked else {}


def _without_empty(**values: Any) -> Manifest:
    """The values that are set. A manifest leaves out all others."""
    return {name: value for name, value in values.items() if value}


def _env_entries(variables: Mapping[str, Any]) -> list[Manifest]:
    """Variables in the form of a container spec: each has a text, or a source."""
    return [
        {"name": name, "value": value} if isinstance(value, str) else {"name": name, "valueFrom": value}
        for name, value in variables.items()
    ]


def _variables(settings: Kubernetes, environ: Mapping[str, str]) -> dict[str, Any]:
    """Variables of a training for both kinds. They mark the pod as a container, whatever variables its image has."""
    ours = {
        **({"PYTHONPATH": f"{REPOSITORY}/src"} if is_kit() else {}),
        "SAMEBITS_CONTAINER": "1",
        IMAGE: settings.image,
        f"{IMAGE}_DIGEST": settings.image,
        "SAMEBITS_HOST_GPUS": str(settings.gpus_per_node or 0),
        START_SECONDS: str(settings.start_seconds),
        # If NVIDIA's runtime is the default, a pod that requests no GPU would see all of them.
        **({} if settings.gpus_per_node else {"NVIDIA_VISIBLE_DEVICES": "void"}),
    }
    for name, value in settings.env.items():
        if name in ours or name.startswith("PET_"):
            raise UserError(f"{FILE}: kubernetes.env.{name}: the launch sets it itself", hint="take it out")
        if _SECRET_NAME.search(name) or without_password(value) != value:
            raise UserError(f"{FILE}: kubernetes.env.{name}: everybody could read it", hint=_HIDE_HINT)
    plain = dict(settings.env)
    if uri := environ.get("MLFLOW_TRACKING_URI"):
        plain["MLFLOW_TRACKING_URI"] = _checked_address(uri)
    secret = {
        name: {"secretKeyRef": {"name": settings.secret, "key": name, "optional": name != "MLFLOW_TRACKING_URI"}}
        for name in (*_MLFLOW, SECRET)
        if settings.secret and name not in plain
    }
    return {**ours, **plain, **secret}


def _checked_address(uri: str) -> str:
    """Check that an address of MLflow may be printed and works in a pod."""
    parts = address_parts(uri)
    if parts.scheme in ("", "file", "sqlite") or is_loopback(parts.hostname or ""):
        hint = "name a server that pods reach, or unset it: runs then go to mlflow.db on the claim"
        raise UserError(f"MLFLOW_TRACKING_URI: {uri} is on this machine, where no pod reaches it", hint=hint)
    if "@" in parts.netloc or without_password(uri) != uri:
        raise UserError("MLFLOW_TRACKING_URI has a name or a password in it: everybody could read it", hint=_HIDE_HINT)
    return uri
