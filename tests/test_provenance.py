"""Commit, patch, packages and environment, in real repositories."""

import subprocess

import pytest

from samebits.provenance import capture, environment, git_patch, git_state


def git(folder, *arguments):
    done = subprocess.run(["git", *arguments], cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture
def repository(tmp_path, monkeypatch):
    for name in ("AUTHOR", "COMMITTER"):
        monkeypatch.setenv(f"GIT_{name}_NAME", "test")
        monkeypatch.setenv(f"GIT_{name}_EMAIL", "test@localhost")
    folder = tmp_path / "repository"
    (folder / "package").mkdir(parents=True)
    files = {"kept.py": "1\n", "changed.py": "1\n", "gone.py": "1\n", "package/inner.py": "1\n", "dvc.lock": "1\n",
             ".gitignore": "ignored/\n"}  # fmt: skip
    for name, text in files.items():
        (folder / name).write_text(text)
    git(folder, "init", "--quiet")
    git(folder, "add", "--all")
    git(folder, "commit", "--quiet", "--message", "first")
    monkeypatch.chdir(folder)
    return folder


def change(folder):
    (folder / "changed.py").write_text("2\n")
    (folder / "gone.py").unlink()
    (folder / "dvc.lock").write_text("2\n")
    (folder / "package" / "new näme.py").write_text("new\n")
    (folder / "binary.bin").write_bytes(bytes(range(256)))
    (folder / "large.bin").write_bytes(bytes(2**20 + 1))
    (folder / "ignored").mkdir()
    (folder / "ignored" / "data").write_text("data")


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
    files = {str(file.relative_to(clone)): file.read_bytes() for file in clone.rglob("*") if ".git/" not in str(file)
             and file.is_file()}  # fmt: skip
    expected = {name: (repository / name).read_bytes() for name in files}
    assert files == {**expected, "dvc.lock": b"1\n"}
    assert set(files) == {"kept.py", "changed.py", "package/inner.py", "package/new näme.py", "binary.bin", "dvc.lock",
                          ".gitignore"}  # fmt: skip


def test_a_lock_file_alone_does_not_make_the_tree_dirty(repository, tmp_path):
    assert git_state()["dirty"] is False
    (repository / "dvc.lock").write_text("2\n")
    found = capture(tmp_path / "patch")
    assert (found["git"]["dirty"], found["patch"], (tmp_path / "patch").exists()) == (False, None, False)
    (repository / "changed.py").write_text("2\n")
    found = capture(tmp_path / "patch")
    assert (found["git"]["dirty"], found["patch"]) == (True, "patch")
    assert found["packages"]["torch"]


@pytest.mark.parametrize(
    ("prepare", "reason"),
    [(lambda folder: None, "not a git repository"), (lambda folder: git(folder, "init", "--quiet"), "HEAD")],
)
def test_without_a_commit_the_reason_is_said(prepare, reason, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    prepare(tmp_path)
    state = git_state()
    assert state["commit"].startswith("unavailable: ")
    assert reason in state["commit"]


def test_without_git_the_reason_is_said(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert git_state() == {"commit": "unavailable: git is not installed", "dirty": False}


def test_only_known_variables_are_recorded():
    environ = {"NCCL_ALGO": "Ring", "NCCL_SECRET": "x", "AWS_SECRET_ACCESS_KEY": "x", "OMP_NUM_THREADS": "1"}
    assert environment(environ) == {"NCCL_ALGO": "Ring", "OMP_NUM_THREADS": "1"}
