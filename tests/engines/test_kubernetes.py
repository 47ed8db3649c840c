"""Manifests for Kubernetes: valid by Kubeflow's models, and with the right variables for their pods."""

import copy
import json

import pytest
import yaml
from kubeflow_trainer_api.models import TrainerV1alpha1TrainJob

from pods import PATCHED, at, container_of, told
from samebits.engines.kubernetes import as_yaml, manifests
from samebits.engines.launch import TrainingCall
from samebits.engines.settings import Cluster
from samebits.errors import UserError
from samebits.host.cluster_environment import Nodes, find_nodes

IMAGE = f"registry.example/samebits@sha256:{'a' * 64}"
LEAST = {"image": IMAGE, "claim": "experiments"}
MOST = {
    **LEAST, "namespace": "ml", "subpath": "kit", "run_as_user": 2000, "gpus_per_node": 4, "cpus_per_node": 16,
    "memory_per_node": "64Gi", "shared_memory": "16Gi", "secret": "mlflow", "env": {"NCCL_SOCKET_IFNAME": "eth1"},
    "service_account": "trainer", "node_selector": {"gpu": "h100"}, "tolerations": ["nvidia.com/gpu"],
    "start_seconds": 30, "active_deadline_seconds": 3600, "runtime": "ours",
}  # fmt: skip
MLFLOW = "MLFLOW_TRACKING_URI"


def training(*more, strategy="ddp", numerics="exact", num_devices=None, **paths):
    arguments = ("--strategy", strategy, "--numerics", numerics, *more)
    return TrainingCall(arguments=arguments, strategy=strategy, numerics=numerics, num_devices=num_devices, **paths)


def made(settings, kind="Job", *, nodes=2, of=None, **environ):
    """The documents, read as YAML 1.1, as ``kubectl`` reads them."""
    cluster = Cluster(nodes=nodes, kubernetes={**settings, "kind": kind})
    return list(yaml.safe_load_all(as_yaml(manifests(cluster, of or training(), environ))))


def keys(value, path=""):
    """Every key of a tree by its path."""
    if isinstance(value, dict):
        for name, below in value.items():
            yield f"{path}.{name}"
            yield from keys(below, f"{path}.{name}")
    if isinstance(value, list):
        for number, below in enumerate(value):
            yield from keys(below, f"{path}[{number}]")


def check_train_job(manifest):
    """Check a manifest by Kubeflow's models. They drop unknown keys, so that all keys must be left."""
    model = TrainerV1alpha1TrainJob.from_dict(copy.deepcopy(manifest))
    assert set(keys(manifest)) == set(keys(json.loads(model.to_json())))


@pytest.mark.parametrize("settings", [LEAST, MOST], ids=["least", "most"])
def test_kubeflow_takes_the_train_job(settings):
    (manifest,) = made(settings, "TrainJob")
    assert manifest["kind"] == "TrainJob"
    check_train_job(manifest)


@pytest.mark.parametrize(
    "path",
    [
        "spec.trainer.numProcPerNode",
        "spec.trainer.resourcesPerNode.limits",
        "spec.runtimeRef.name",
        f"{PATCHED}.terminationGracePeriodSeconds",
        f"{PATCHED}.volumes.0.persistentVolumeClaim.claimName",
        f"{PATCHED}.containers.0.volumeMounts.0.subPath",
    ],
)
def test_a_key_that_is_misspelt_would_be_found(path):
    """``make lint`` checks Services and Jobs against their schemas."""
    (manifest,) = made(MOST, "TrainJob")
    way, _, last = path.rpartition(".")
    place = at(manifest, way)
    place[f"{last}s"] = place.pop(last)
    with pytest.raises((ValueError, AssertionError)):
        check_train_job(manifest)


# -- what a pod is told -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("settings", "seconds"), [(LEAST, 600), (MOST, 30)])
@pytest.mark.parametrize(
    ("kind", "master", "fewest"), [("Job", "{0}-0.{0}", "auto"), ("TrainJob", "{0}-node-0-0.{0}", "1")]
)
def test_each_pod_finds_its_place(kind, master, fewest, settings, seconds):
    manifest = made(settings, kind, nodes=3)[-1]
    common = {"count": 3, "master": master.format(manifest["metadata"]["name"]), "start_seconds": seconds}
    devices = str(settings.get("gpus_per_node", fewest))
    for index in range(3):
        assert find_nodes(environ=told(manifest, index)) == Nodes(rank=index, num_devices=devices, **common)


def test_the_service_of_a_job_names_its_pods():
    """A pod's host name is the Job's with its index, below the Service that selects it."""
    service, job = made(LEAST, nodes=3)
    assert (job["spec"]["completions"], job["spec"]["parallelism"]) == (3, 3)
    assert service["metadata"]["name"] == job["spec"]["template"]["spec"]["subdomain"] == job["metadata"]["name"]
    assert service["spec"]["selector"] == job["spec"]["template"]["metadata"]["labels"]


@pytest.mark.parametrize(
    ("settings", "num_devices", "more"),
    [(LEAST, None, ["--num-devices", "auto"]), (LEAST, "2", []), (MOST, None, [])],
)
def test_without_gpus_kubeflows_number_of_devices_is_not_taken(settings, num_devices, more):
    (manifest,) = made(settings, "TrainJob", of=training(num_devices=num_devices))
    command = [
        "env",
        "--chdir=/repository",
        "python",
        "-P",
        "pipeline/train.py",
        "--strategy",
        "ddp",
        "--numerics",
        "exact",
    ]
    assert manifest["spec"]["trainer"]["command"] == [*command, *more]


def pod_of(manifest):
    """The pods' spec in a manifest of either kind, and their container in it."""
    pod = at(manifest, PATCHED if manifest["kind"] == "TrainJob" else "spec.template.spec")
    return pod, pod["containers"][0]


@pytest.mark.parametrize("kind", ["Job", "TrainJob"])
def test_a_pod_gets_what_the_settings_say(kind):
    manifest = made(MOST, kind)[-1]
    (pod, container), given, environ = pod_of(manifest), container_of(manifest), told(manifest, 0)
    asked = {"cpu": "16", "memory": "64Gi", "nvidia.com/gpu": "4"}
    assert given.get("resources", given.get("resourcesPerNode")) == {"limits": asked, "requests": asked}
    assert container["volumeMounts"] == [
        {"name": "repository", "mountPath": "/repository", "subPath": "kit"},
        {"name": "shared-memory", "mountPath": "/dev/shm"},
    ]
    assert pod["volumes"] == [
        {"name": "repository", "persistentVolumeClaim": {"claimName": "experiments"}},
        {"name": "shared-memory", "emptyDir": {"medium": "Memory", "sizeLimit": "16Gi"}},
    ]
    assert (pod["securityContext"]["runAsUser"], pod["securityContext"]["runAsNonRoot"]) == (2000, True)
    assert (pod["nodeSelector"], pod["serviceAccountName"]) == ({"gpu": "h100"}, "trainer")
    assert pod["tolerations"] == [{"key": "nvidia.com/gpu", "operator": "Exists"}]
    assert pod["terminationGracePeriodSeconds"] >= 60  # as Compose, and MLflow's delivery comes on top
    assert {name: environ[name] for name in ("SAMEBITS_IMAGE", "SAMEBITS_IMAGE_DIGEST")} == {
        "SAMEBITS_IMAGE": IMAGE, "SAMEBITS_IMAGE_DIGEST": IMAGE
    }  # fmt: skip
    assert (environ["SAMEBITS_HOST_GPUS"], environ["NCCL_SOCKET_IFNAME"]) == ("4", "eth1")
    assert environ["MLFLOW_TRACKING_TOKEN"] == "mlflow/MLFLOW_TRACKING_TOKEN"
    assert environ["SAMEBITS_SECRET"] == "mlflow/SAMEBITS_SECRET"  # which the pods share, and a manifest shows nobody
    assert "NVIDIA_VISIBLE_DEVICES" not in environ


@pytest.mark.parametrize("kind", ["Job", "TrainJob"])
def test_a_pod_is_told_no_more_than_was_set(kind):
    manifest = made(LEAST, kind)[-1]
    (pod, container), given, environ = pod_of(manifest), container_of(manifest), told(manifest, 0)
    assert not {"nodeSelector", "serviceAccountName", "tolerations"} & pod.keys()
    assert not {"resources", "resourcesPerNode"} & given.keys()
    assert pod["securityContext"]["runAsUser"] == 1000
    assert "subPath" not in container["volumeMounts"][0]
    assert (environ["SAMEBITS_HOST_GPUS"], environ["NVIDIA_VISIBLE_DEVICES"]) == ("0", "void")
    assert [name for name in environ if name.startswith("MLFLOW_")] == []


def test_a_pod_is_made_once_and_named_before_it_is_ready():
    service, job = made(LEAST)
    assert service["spec"]["clusterIP"] == "None"
    assert service["spec"]["publishNotReadyAddresses"] is True
    assert (job["spec"]["completionMode"], job["spec"]["backoffLimit"]) == ("Indexed", 0)
    assert job["spec"]["template"]["spec"]["restartPolicy"] == "Never"
    assert container_of(job)["workingDir"] == "/repository"


@pytest.mark.parametrize("kind", ["Job", "TrainJob"])
def test_pods_keep_away_from_each_other_and_have_few_rights(kind):
    manifest = made(LEAST, kind)[-1]
    pod, container = pod_of(manifest)
    template = at(manifest, PATCHED.removesuffix(".spec") if kind == "TrainJob" else "spec.template")
    (rule,) = pod["affinity"]["podAntiAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    assert rule["topologyKey"] == "kubernetes.io/hostname"
    assert rule["labelSelector"]["matchLabels"] == template["metadata"]["labels"]
    assert manifest["metadata"]["name"] in template["metadata"]["labels"].values()
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert container["securityContext"] == {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}


@pytest.mark.parametrize("kind", ["Job", "TrainJob"])
def test_a_deadline_is_the_whole_trainings(kind):
    assert made(MOST, kind)[-1]["spec"]["activeDeadlineSeconds"] == 3600
    assert "activeDeadlineSeconds" not in made(LEAST, kind)[-1]["spec"]
    assert {manifest["metadata"]["namespace"] for manifest in made(MOST, kind)} == {"ml"}


def test_the_server_of_mlflow_is_the_callers():
    environ = told(made(MOST, MLFLOW_TRACKING_URI="https://mlflow.example:5000")[-1], 0)
    assert environ["MLFLOW_TRACKING_URI"] == "https://mlflow.example:5000"
    assert environ["MLFLOW_TRACKING_PASSWORD"] == "mlflow/MLFLOW_TRACKING_PASSWORD"


# -- names, text, and what is refused -----------------------------------------------------------------------------


def name_of(*arguments, **options):
    return made(*arguments, **options)[-1]["metadata"]["name"]


def test_a_name_is_that_of_what_it_names():
    names = {
        name_of(LEAST), name_of(MOST), name_of(LEAST, "TrainJob"), name_of(LEAST, nodes=3),
        name_of(LEAST, of=training("--steps", "3")), name_of(LEAST, of=training(numerics="fast")),
        name_of(LEAST, MLFLOW_TRACKING_URI="https://mlflow.example"),
    }  # fmt: skip
    assert len(names) == 7
    assert name_of(LEAST) == name_of(LEAST, HOME="/home/other") == name_of(dict(reversed(LEAST.items())))


def test_a_name_leaves_room_for_the_numbers_of_pods():
    """A host name has at most 63 characters: the name of the Job, or of Kubeflow's job, and an index."""
    name = name_of(LEAST, of=training(strategy="fully_sharded_tensor", numerics="exact"))
    assert name.startswith("samebits-fully-sharded-tensor-exact-")
    assert len(f"{name}-node-0-99999") <= 63


@pytest.mark.parametrize(
    "text",
    ["on", "Yes", "n", "null", "~", "", "010", "0x1f", "1e3", "1_000", "1:30", "2026-01-02", "a: b", "#a", " a", "a ",
     "{a}", "*a", "&a", "- a", "é", "a\nb", 'a"b', "a\\b", ".5", "=", "<<", "a" * 300 + " b", "true", "%a", "@a", "`a"],
)  # fmt: skip
def test_no_text_is_read_as_something_else(text):
    assert told(made({**LEAST, "env": {"NCCL_NET": text}})[-1], 0)["NCCL_NET"] == text
    assert container_of(made(LEAST, of=training("--out-dir", text))[-1])["command"][-1] == text


@pytest.mark.parametrize(
    ("settings", "environ", "paths", "message"),
    [
        ({"image": "samebits:gpu"}, {}, {}, r"kubernetes\.image: got samebits:gpu, expected NAME@sha256:DIGEST: .*"
         r"hint: `docker buildx imagetools inspect NAME`, .*index \.RepoDigests 0"),
        ({"image": IMAGE[:-1]}, {}, {}, r"kubernetes\.image: got registry"),
        ({"image": f"{IMAGE}b"}, {}, {}, r"kubernetes\.image: got registry"),
        ({"image": IMAGE.partition("@")[2]}, {}, {}, r"kubernetes\.image: got sha256:a"),
        ({"env": {"PET_NNODES": "2"}}, {}, {}, r"kubernetes\.env\.PET_NNODES: the launch sets it itself"),
        ({"env": {"PYTHONPATH": "src"}}, {}, {}, r"kubernetes\.env\.PYTHONPATH: the launch sets it itself"),
        ({"env": {"MLFLOW_TRACKING_TOKEN": "x"}}, {}, {}, r"env\.MLFLOW_TRACKING_TOKEN: everybody could read it\. "
         r"hint: keep it in a Secret"),
        ({"env": {"HTTPS_PROXY": "http://me:pw@proxy"}}, {}, {}, r"env\.HTTPS_PROXY: everybody could read it"),
        ({}, {MLFLOW: "https://me:pw@mlflow.example"}, {}, r"MLFLOW_TRACKING_URI has a name or a password in it"),
        ({}, {MLFLOW: "https://me@mlflow.example"}, {}, r"MLFLOW_TRACKING_URI has a name or a password in it"),
        ({}, {MLFLOW: "http://localhost:5000"}, {}, r"http://localhost:5000 is on this machine, where no pod"),
        ({}, {MLFLOW: "http://127.0.1.1:5000"}, {}, r"is on this machine, where no pod reaches it"),
        ({}, {MLFLOW: "sqlite:////home/me/mlflow.db"}, {}, r"is on this machine, where no pod reaches it"),
        ({}, {MLFLOW: "mlruns"}, {}, r"MLFLOW_TRACKING_URI: mlruns is on this machine"),
        ({}, {MLFLOW: "http://[::1]:5000"}, {}, r"is on this machine, where no pod reaches it"),
        ({}, {MLFLOW: "postgresql://me:pw@db.example/mlflow"}, {}, r"MLFLOW_TRACKING_URI has a name or a password"),
        ({}, {MLFLOW: "http://[::1"}, {}, r"MLFLOW_TRACKING_URI: http://\[::1: Invalid IPv6 URL"),
        ({}, {}, {"out_dir": "/tmp/try"}, r"--out-dir: /tmp/try is not on the claim, and would be gone with its pod"),
        ({}, {}, {"params_file": "/repository2/params.yaml"},
         r"--params: /repository2/params\.yaml is not on the claim"),
    ],
)  # fmt: skip
def test_what_no_pod_can_use_or_may_show_is_refused(settings, environ, paths, message):
    with pytest.raises(UserError, match=message) as raised:
        made({**LEAST, **settings}, of=training(**paths), **environ)
    assert "pw@" not in str(raised.value)


def test_paths_of_the_repository_are_taken():
    assert made(LEAST, of=training(out_dir="runs/x", data_dir="/repository/data"))


def test_without_settings_there_is_no_manifest():
    with pytest.raises(UserError, match=r"cluster\.toml has no table \[kubernetes\]\. hint: image and claim are need"):
        manifests(Cluster(), training(), {})
