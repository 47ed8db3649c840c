"""cluster.toml and its variables."""

import re
import tomllib

import pytest

from conftest import ROOT
from samebits.engines.settings import Cluster, Kubernetes, Slurm, read_cluster
from samebits.errors import UserError

GUIDE = ROOT / "docs/guides/several-machines.md"


def test_nothing_needs_to_be_set(tmp_path):
    assert read_cluster(tmp_path / "cluster.toml", {}) == Cluster(nodes=2, slurm=Slurm(), kubernetes=None)


def test_variables_go_before_the_file(tmp_path):
    file = tmp_path / "cluster.toml"
    file.write_text('nodes = 3\n[slurm]\npartition = "cpu"\naccount = "ml"\narguments = ["--qos=low"]\n')
    assert read_cluster(file, {}) == Cluster(
        nodes=3, slurm=Slurm(partition="cpu", account="ml", arguments=("--qos=low",))
    )
    environ = {
        "SAMEBITS_NODES": "4", "SAMEBITS_SLURM_PARTITION": "gpu", "SAMEBITS_SLURM_TIME": "1:00",
        "SAMEBITS_SLURM_ARGUMENTS": "--qos=high --comment='a b'",
    }  # fmt: skip
    assert read_cluster(file, {"SAMEBITS_SLURM_ACCOUNT": "team"}).slurm.account == "team"
    slurm = Slurm(partition="gpu", account="ml", time="1:00", arguments=("--qos=high", "--comment=a b"))
    assert read_cluster(file, environ) == Cluster(nodes=4, slurm=slurm)


NEEDED = '[kubernetes]\nimage = "a"\nclaim = "b"\n'


@pytest.mark.parametrize(
    ("text", "environ", "message"),
    [
        ("nodes = ", {}, "cannot be read: Invalid value"),
        (b"nodes = '\xff'", {}, "cannot be read: 'utf-8' codec can't decode"),
        (None, {}, "cannot be read: .* Is a directory"),
        ("nodes = 0", {}, "or its variables: nodes: Input should be greater than or equal to 1"),
        ("node = 2", {}, "or its variables: node: Extra inputs are not permitted"),
        ("slurm = 2", {}, "or its variables: slurm: Input should be a valid dictionary"),
        ("[slurm]\npartition = 2", {}, "or its variables: slurm.partition: Input should be a valid string"),
        ("[slurm]\nqos = 'high'", {}, "or its variables: slurm.qos: Extra inputs are not permitted"),
        ("[kubernetes]\nimage = 'a'", {}, "or its variables: kubernetes.claim: Field required"),
        (f"{NEEDED}kind = 'Pod'", {}, "or its variables: kubernetes.kind: Input should be 'Job' or 'TrainJob'"),
        (f"{NEEDED}memory_per_node = 64", {}, "kubernetes.memory_per_node: Input should be a valid string"),
        (f"{NEEDED}gpus_per_node = 0", {}, "kubernetes.gpus_per_node: Input should be greater than or equal to 1"),
        (f"{NEEDED}env = {{ A = 1 }}", {}, "kubernetes.env.A: Input should be a valid string"),
        (f"{NEEDED}gpus = 4", {}, "kubernetes.gpus: Extra inputs are not permitted"),
        ("", {"SAMEBITS_NODES": "two"}, "or its variables: nodes: Input should be a valid integer"),
        ("", {"SAMEBITS_SLURM_ARGUMENTS": "--comment='a"}, "SAMEBITS_SLURM_ARGUMENTS: No closing quotation: --comment"),
    ],
)
def test_what_is_wrong_is_named(text, environ, message, tmp_path):
    file = tmp_path / "cluster.toml"
    if text is None:
        file.mkdir()
    else:
        file.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(UserError, match=message) as raised:
        read_cluster(file, environ)
    assert raised.value.exit_code == 2
    assert raised.value.hint == "see the guide of several machines"


def test_the_guide_shows_every_key(tmp_path):
    shown = {}
    for block in re.findall(r"```toml\n(.*?)```", GUIDE.read_text(), flags=re.DOTALL):
        file = tmp_path / "cluster.toml"
        file.write_text(block)
        read_cluster(file, {})
        shown |= tomllib.loads(block)
    assert shown.keys() == Cluster.model_fields.keys()
    assert shown["kubernetes"].keys() == Kubernetes.model_fields.keys()
    assert shown["slurm"].keys() == Slurm.model_fields.keys() - {"apptainer_image"}  # in place of container_image
    assert "apptainer_image" in GUIDE.read_text()
