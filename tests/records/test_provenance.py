"""Commit, patch, packages and environment, in real repositories."""

import email
import json
import os
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from samebits.numerics.environment import ENVIRONMENT
from samebits.records import provenance
from samebits.records.provenance import capture, environment, git_changes, git_patch, git_state
from standins import commit_all, git


@pytest.fixture
def repository(tmp_path, monkeypatch):
    folder = tmp_path / "repository"
    (folder / "package").mkdir(parents=True)
    for name in ("kept.py", "changed.py", "gone.py", "package/inner.py", "dvc.lock"):
        (folder / name).write_text("1\n")
    (folder / ".gitignore").write_text("ignored/\n")
    commit_all(folder)
    monkeypatch.chdir(folder)
    return folder


def change(folder):
    (folder / "changed.py").write_text("2\n")
    (folder / "gone.py").unlink()
    (folder / "dvc.lock").write_text("2\n")
    (folder / "package" / "new näme.py").write_text("new\n")
    (folder / "binary.bin").write_bytes(bytes(range(256)) * 2**12)  # as large as may be
    (folder / "large.bin").write_bytes(bytes(2**20 + 1))
    (folder / "ignored").mkdir()
    (folder / "ignored" / "data").write_text("data")


def test_the_users_index_is_only_read(repository):
    """To write it, git takes a lock, at which the user's own git, or DVC's, would fail meanwhile."""
    index = repository / ".git/index"
    for file in repository.glob("*.py"):
        os.utime(file, (1, 1))  # which `git status` would note there
    before = index.read_bytes()
    assert not git_state().dirty
    git_patch()
    assert index.read_bytes() == before
    git(repository, "status")
    assert index.read_bytes() != before


def test_a_change_in_the_second_of_the_commit_is_in_the_patch(repository):
    """Git tells a file by its size and the second of its time, and looks into those that are not older than its index.

    So a copy of the index must not be younger than the index.
    """
    git(repository, "config", "core.checkStat", "minimal")
    file, index = repository / "changed.py", repository / ".git/index"
    os.utime(file, (1e9, 1e9))
    git(repository, "add", "changed.py")
    file.write_text("2\n")
    for path in (file, index):
        os.utime(path, (1e9, 1e9))
    patch, _ = git_patch()
    assert b"+2" in patch


@pytest.mark.parametrize(
    "setting",
    [
        "color.ui always",
        "diff.external false",
        "diff.noprefix true",
        "diff.mnemonicPrefix true",
        "diff.orderFile absent",
        "diff.renames copies",
    ],
)
def test_the_patch_is_the_same_under_any_settings_of_git(setting, repository):
    change(repository)
    plain, _ = git_patch()
    git(repository, "config", *setting.split())
    assert git_patch()[0] == plain


@pytest.mark.parametrize("where", [".", "package"])
def test_the_patch_gives_the_working_tree_back(where, repository, tmp_path, monkeypatch):
    change(repository)
    git(repository, "add", "changed.py")
    before = [git(repository, "status", "--porcelain"), git(repository, "count-objects", "-v")]
    monkeypatch.chdir(repository / where)
    patch, omitted = git_patch()
    assert [git(repository, "status", "--porcelain"), git(repository, "count-objects", "-v")] == before
    assert omitted == ["large.bin"]
    clone = tmp_path / "clone"
    git(tmp_path, "clone", "--quiet", str(repository), str(clone))
    (tmp_path / "patch").write_bytes(patch)
    git(clone, "apply", str(tmp_path / "patch"))
    files = {str(file.relative_to(clone)) for file in clone.rglob("*") if ".git/" not in str(file) and file.is_file()}
    new = {"package/new näme.py", "binary.bin"}
    assert files == {"kept.py", "changed.py", "package/inner.py", "dvc.lock", ".gitignore", *new}
    assert {name for name in files if (clone / name).read_bytes() != (repository / name).read_bytes()} == {"dvc.lock"}
    assert (clone / "dvc.lock").read_bytes() == b"1\n"


@pytest.mark.parametrize(
    ("name", "is_taken"),
    [
        ("new.py", True), ("keys.py", True), ("environment.yml", True),
        ("package/monkey.py", True),
        (".env", False), ("package/.env", False), (".env.local", False), ("prod.env", False),
        ("credentials.json", False), ("id_ed25519", False), ("server.key", False), ("my-secrets.yaml", False),
        (".netrc", False), (".envrc", False), ("service-account.json", False), ("api_key.txt", False),
        ("rclone.conf", False), ("hf_token", False), ("tokens.json", False), ("private-key.txt", False),
        ("deploy_key", False), ("key.txt", False), ("keys.json", False), ("private.pem.bak", False),
        ("credentials/prod.txt", False), (".ssh/work", False), ("_netrc", False), ("server.key.old", False),
        ("privkey", False), ("deploykey", False), ("krb5.keytab", False), ("signing.p8", False), ("my_id_rsa", False),
        ("netrc", False), (".netrc.bak", False), ("passphrase.txt", False), ("keys/prod.json", False),
        ("tokens/a.txt", False), (".config/gh/hosts.yml", False), ("terraform.tfstate", False), ("turkey.py", True),
        ("tokenizer.py", True), ("tokenize.py", True), ("tokenizer.json", True), ("subtoken.py", True),
    ],
)  # fmt: skip
@pytest.mark.parametrize("staged", [[], ["add"], ["add", "--intent-to-add"]])
@pytest.mark.attack("a malicious repository or patch")
def test_a_patch_has_no_file_whose_name_says_that_it_holds_secrets(staged, name, is_taken, repository):
    (repository / name).parent.mkdir(parents=True, exist_ok=True)
    (repository / name).write_text("S3NTINEL\n")
    if staged:
        git(repository, *staged, "--", name)
    patch, omitted = git_patch()
    assert (b"S3NTINEL" in patch) == is_taken
    assert omitted == ([] if is_taken else [name])


def test_undecodable_names_and_packages_without_a_version_are_tolerated(repository, tmp_path, monkeypatch):
    name = b"caf\xe9.key"
    Path(os.fsdecode(bytes(repository) + b"/" + name)).write_text("x")
    facts = [SimpleNamespace(metadata=email.message_from_string(text)) for text in ("Name: Whole\nVersion: 1\n", "")]
    monkeypatch.setattr(provenance.metadata, "distributions", lambda: facts)
    capture(tmp_path / "patch").write(tmp_path / "provenance.json")
    written = json.loads((tmp_path / "provenance.json").read_text())
    assert written["patch_omits"] == ["caf\\udce9.key"]
    assert written["packages"] == {"whole": "1"}


def test_machines_compare_the_code_that_was_changed(repository):
    """Neither logs that go on nor data; a module counts, also one that git does not know yet."""
    assert git_changes(git_state()) is None
    (repository / "slurm-1.out").write_text("more every second")
    assert git_changes(git_state()) is None
    (repository / "package/new.py").write_text("A = 1\n")
    first = git_changes(git_state())
    (repository / "kept.py").write_text("2\n")
    second = git_changes(git_state())
    (repository / "slurm-1.out").unlink()
    assert len({None, first, second, git_changes(git_state())}) == 3


def test_a_lock_file_alone_does_not_make_the_tree_dirty(repository, tmp_path):
    assert git_state().dirty is False
    (repository / "dvc.lock").write_text("2\n")
    provenance = capture(tmp_path / "patch")
    assert (provenance.git.dirty, provenance.patch, (tmp_path / "patch").exists()) == (False, None, False)
    (repository / "changed.py").write_text("2\n")
    provenance = capture(tmp_path / "patch")
    assert (provenance.git.dirty, provenance.patch, provenance.patch_problem) == (True, "patch", None)
    assert (tmp_path / "patch").stat().st_mode & 0o077 == 0, "it has what others may not read in the clone"
    assert provenance.packages["torch"]


@pytest.mark.parametrize(
    ("prepare", "reason"),
    [
        (lambda folder, monkeypatch: None, "not a git repository"),
        (lambda folder, monkeypatch: git(folder, "init", "--quiet"), "HEAD"),
        (lambda folder, monkeypatch: monkeypatch.setenv("PATH", str(folder)), "git is not installed"),
    ],
    ids=["no repository", "no commit", "no git"],
)
def test_without_a_commit_the_reason_is_said(prepare, reason, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    prepare(tmp_path, monkeypatch)
    state = git_state()
    assert reason in state.problem
    assert (state.commit, state.dirty, state.told) == (None, False, f"unavailable: {state.problem}")


def test_only_known_variables_are_recorded():
    environ = {"NCCL_ALGO": "Ring", "NCCL_SECRET": "x", "AWS_SECRET_ACCESS_KEY": "x", "OMP_NUM_THREADS": "1"}
    assert environment(environ) == {"NCCL_ALGO": "Ring", "OMP_NUM_THREADS": "1"}


def test_every_variable_that_a_training_pins_is_recorded():
    assert environment(dict.fromkeys(ENVIRONMENT, "1")).keys() == ENVIRONMENT.keys()


def test_a_patch_that_git_cannot_make_is_reported(repository, tmp_path):
    """Another process may hold an object that git needs; here it is gone."""
    (repository / "alone.py").write_text("alone\n")
    git(repository, "add", "--all")
    git(repository, "commit", "--quiet", "--message", "second")
    (repository / "alone.py").write_text("changed\n")
    blob = git(repository, "rev-parse", "HEAD:alone.py").strip()
    (repository / ".git/objects" / blob[:2] / blob[2:]).unlink()
    found = capture(tmp_path / "git.patch")
    assert (found.git.dirty, found.patch, (tmp_path / "git.patch").exists()) == (True, None, False)
    assert blob[:12] in found.patch_problem
    assert git_changes(git_state()) == f"unavailable: {found.patch_problem}"


def test_a_file_that_goes_away_while_git_looks_is_in_no_patch(repository, tmp_path, monkeypatch):
    """Here git itself removes it, once it has listed it."""
    script = tmp_path / "git"
    then = f'case "$*" in *--others*) rm "{repository}/gone away.py";; esac'
    script.write_text(f'#!/bin/sh\n{shutil.which("git")} "$@" || exit\n{then}\n')
    script.chmod(0o755)
    for name in ("gone away.py", "new.py"):
        (repository / name).write_text(f"{name}\n")
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    patch, omitted = git_patch()
    assert (b"+new.py" in patch, b"gone away" in patch, omitted) == (True, False, [])
