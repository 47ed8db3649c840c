"""What Kubernetes, and Kubeflow Trainer on top of it, would tell the pods of a manifest."""

from __future__ import annotations

from typing import Any

INDEX = "metadata.annotations['batch.kubernetes.io/job-completion-index']"
PATCHED = "spec.runtimePatches.0.trainingRuntimeSpec.template.spec.replicatedJobs.0.template.spec.template.spec"


def at(tree: Any, path: str) -> Any:
    """What is at a path of keys and numbers."""
    for step in path.split("."):
        tree = tree[int(step) if step.isdecimal() else step]
    return tree


def container_of(manifest: dict[str, Any]) -> dict[str, Any]:
    """What its pods' container is made from: a Job's own, or what a TrainJob says of its runtime's."""
    if manifest["kind"] == "TrainJob":
        return dict(manifest["spec"]["trainer"])
    (container,) = manifest["spec"]["template"]["spec"]["containers"]
    return dict(container)


def told(manifest: dict[str, Any], index: int) -> dict[str, str]:
    """The variables of pod number ``index``; a key of a Secret is there as its name."""
    env = container_of(manifest)["env"]
    found = {}
    for variable in env:
        source = variable.get("valueFrom", {})
        if "fieldRef" in source:
            assert source["fieldRef"] == {"fieldPath": INDEX}
            found[variable["name"]] = str(index)
        elif "secretKeyRef" in source:
            found[variable["name"]] = f"{source['secretKeyRef']['name']}/{source['secretKeyRef']['key']}"
        else:
            found[variable["name"]] = variable["value"]
    assert len(found) == len(env), "a variable is there twice"
    return found | _by_kubeflow(manifest, index) if manifest["kind"] == "TrainJob" else found


def _by_kubeflow(manifest: dict[str, Any], index: int) -> dict[str, str]:
    """What the torch plugin of Kubeflow Trainer 2.3 sets; it refuses a TrainJob that does."""
    trainer, name = manifest["spec"]["trainer"], manifest["metadata"]["name"]
    assert not [variable for variable in trainer["env"] if variable["name"].startswith("PET_")]
    cores = trainer.get("resourcesPerNode", {}).get("requests", {}).get("cpu", "1")
    return {
        "PET_NNODES": str(trainer["numNodes"]),
        "PET_NPROC_PER_NODE": str(trainer.get("numProcPerNode", cores)),
        "PET_NODE_RANK": str(index),
        "PET_MASTER_ADDR": f"{name}-node-0-0.{name}",
        "PET_MASTER_PORT": "29500",
    }
