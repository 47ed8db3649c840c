"""What other users of the host, or of its network, could change."""

import os
import subprocess
import sys
from types import SimpleNamespace
from urllib.parse import urlsplit

import pytest

from conftest import needs_root
from samebits.doctor import sharing
from samebits.doctor.store import _answers

NOBODY = 65534
COMPILED = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")


def texts(findings):
    ((status, text, hint),) = [(one.status, one.text, one.hint) for one in findings]
    return status, text, hint


@pytest.fixture
def repository(tmp_path, monkeypatch):
    """Where others come, as to no folder of pytest's."""
    monkeypatch.setattr(sharing, "_is_private", lambda path: False)
    monkeypatch.setattr(sharing.sys, "prefix", sys.base_prefix)
    for name in COMPILED:
        monkeypatch.delenv(name, raising=False)
    for name in (".git", ".dvc", "src", "pipeline"):
        (tmp_path / name).mkdir(mode=0o755)
    (tmp_path / "dvc.yaml").touch(0o644)
    return tmp_path


def test_a_clone_that_nobody_else_writes_to(repository):
    (repository / ".venv").mkdir()
    (repository / ".venv/.lock").touch()
    (repository / ".venv/.lock").chmod(0o666)
    assert texts(sharing.clone(repository))[:2] == ("ok", "nobody else writes to it")


@pytest.mark.parametrize(
    ("name", "mode"),
    [("src", 0o777), ("dvc.yaml", 0o646), ("pipeline", 0o1777), (".git/hooks", 0o777), (".git/config", 0o666),
     ("src/net.py", 0o666), (".samebits/resume", 0o777), ("mlflow.db", 0o666), ("data/train.safetensors", 0o666)],
)  # fmt: skip
@pytest.mark.attack("another user of the host", outcome="warned")
def test_a_clone_that_all_write_to(name, mode, repository):
    path = repository / name
    path.parent.mkdir(exist_ok=True)
    path.touch()
    path.chmod(mode)
    status, text, hint = texts(sharing.clone(repository))
    assert (status, hint) == ("warning", f"chmod -R go-w {repository}")
    assert text == f"other users can write to {repository / name}, and so decide what runs"


@pytest.mark.attack("another user of the host", outcome="warned")
def test_a_folder_above_the_clone_that_all_write_to(repository):
    """Whoever writes to it gives the clone another name, and its own to another one."""
    folder = repository / "shared"
    (folder / "clone").mkdir(parents=True)
    folder.chmod(0o1777)
    assert texts(sharing.clone(folder / "clone"))[0] == "ok"
    folder.chmod(0o777)
    status, text, hint = texts(sharing.clone(folder / "clone"))
    assert (status, hint) == ("warning", f"ask for `chmod go-w {folder}`")
    assert text == f"other users can write to {folder}, and so decide what runs"


@pytest.mark.parametrize("variable", COMPILED)
@pytest.mark.attack("another user of the host", outcome="warned")
def test_compiled_code_that_all_write_to(variable, repository, tmp_path_factory):
    folder = tmp_path_factory.mktemp("compiled")
    folder.chmod(0o777)
    status, _, hint = texts(sharing.clone(repository, {variable: str(folder)}))
    assert (status, hint) == ("warning", f"chmod -R go-w {folder}")


def test_files_in_a_private_folder_are_safe(repository, monkeypatch):
    (repository / "src").chmod(0o777)
    monkeypatch.setattr(sharing, "_is_private", lambda path: path == repository.parent)
    assert texts(sharing.clone(repository))[0] == "ok"


@needs_root
@pytest.mark.parametrize(("owner", "group", "mode"), [(0, NOBODY, 0o775), (NOBODY, NOBODY, 0o755)])
@pytest.mark.parametrize("root", [0o755, 0o2775])
@pytest.mark.attack("another user of the host", outcome="warned")
def test_a_clone_that_a_group_or_another_owner_writes_to(root, owner, group, mode, repository):
    """A group's clone stays the group's."""
    os.chown(repository / "src", owner, group)
    (repository / "src").chmod(mode)
    repository.chmod(root)
    status, _, hint = texts(sharing.clone(repository))
    own = f"trust all who may write there, or work in your own: git clone --no-hardlinks {repository}"
    assert (status, hint) == ("warning", own if owner or root == 0o2775 else f"chmod -R go-w {repository}")


@needs_root
def test_files_of_another_users_clone_are_left_as_they_are(repository):
    """git clone makes hard links on one disk: a change of the owner would be the other clone's, too."""
    (repository / "object").touch()
    (repository / ".git/object").hardlink_to(repository / "object")
    os.chown(repository / ".git/object", NOBODY, NOBODY)
    (repository / "object").unlink()
    (repository.parent / "other").hardlink_to(repository / ".git/object")
    status, _, hint = texts(sharing.clone(repository))
    assert (status, "chown" in hint, "git clone --no-hardlinks" in hint) == ("warning", False, True)


@needs_root
def test_the_owners_own_group_is_safe(repository):
    (repository / "src").chmod(0o775)  # root's own
    assert texts(sharing.clone(repository))[0] == "ok"


@pytest.fixture
def home(tmp_path, monkeypatch):
    home = tmp_path / "homes" / "me"
    home.mkdir(parents=True)
    monkeypatch.setenv("HOME", str(home))
    return home


@needs_root
@pytest.mark.attack("another user of the host", outcome="warned")
def test_dvcs_cache_on_a_host_with_other_users(repository, home, monkeypatch):
    cache = repository / "dvc"
    monkeypatch.setenv("DVC_SITE_CACHE_DIR", str(cache))
    monkeypatch.setattr(sharing, "_PLACES", ())
    monkeypatch.setattr(sharing.pwd, "getpwall", list)
    assert texts(sharing.dvc_cache(repository))[:2] == ("ok", f"in {cache}, on a host without other users")
    (home.parent / "other").mkdir()
    os.chown(home.parent / "other", NOBODY, NOBODY)
    status, text, hint = texts(sharing.dvc_cache(repository))
    assert status == "warning"
    assert text == f"DVC reads pickles in {cache}, which is open to all users of this host"
    assert "dvc config --local core.site_cache_dir" in hint


@needs_root
@pytest.mark.attack("another user of the host", outcome="warned")
def test_other_users_are_known_by_their_accounts_and_processes(tmp_path, home, monkeypatch):
    monkeypatch.setattr(sharing, "_PLACES", (tmp_path / "processes",))
    monkeypatch.setattr(sharing.pwd, "getpwall", list)
    (tmp_path / "processes" / "1").mkdir(parents=True)
    assert not sharing._has_other_users(tmp_path)
    os.chown(tmp_path / "processes" / "1", 2000, 2000)
    assert sharing._has_other_users(tmp_path)
    monkeypatch.setattr(sharing, "_PLACES", ())
    monkeypatch.setattr(sharing.pwd, "getpwall", lambda: [SimpleNamespace(pw_uid=uid) for uid in (0, 33, 65534)])
    assert not sharing._has_other_users(tmp_path)
    monkeypatch.setattr(sharing.pwd, "getpwall", lambda: [SimpleNamespace(pw_uid=1000)])
    assert sharing._has_other_users(tmp_path)


@pytest.mark.parametrize("level", ["local", "global"])
def test_dvcs_cache_is_where_dvc_itself_says(level, repository, home, monkeypatch):
    """Also of settings for all of a user's repositories, of which DVC alone knows where they are."""
    monkeypatch.delenv("DVC_SITE_CACHE_DIR", raising=False)
    monkeypatch.setenv("DVC_GLOBAL_CONFIG_DIR", str(home / "config"))
    assert "in /var/tmp/dvc, " in texts(sharing.dvc_cache(repository))[1]
    cache = home / "cache"
    cache.mkdir(mode=0o700)
    monkeypatch.setattr(sharing, "_is_private", lambda path: path == cache)
    (repository / ".dvc").rmdir()
    command = [sys.executable, "-m", "dvc", "config", f"--{level}", "core.site_cache_dir", str(cache)]
    subprocess.run([sys.executable, "-m", "dvc", "init", "-q", "--no-scm", "-f"], cwd=repository, check=True)
    subprocess.run(command, cwd=repository, check=True)
    assert texts(sharing.dvc_cache(repository))[:2] == ("ok", f"in {cache}, where nobody else comes")


@pytest.mark.parametrize(
    ("mode", "owner", "private"),
    [
        (0o700, None, True),
        (0o755, None, False),
        (0o710, None, False),
        pytest.param(0o700, NOBODY, False, marks=needs_root),
    ],
)
def test_a_private_folder(mode, owner, private, tmp_path):
    tmp_path.chmod(mode)
    os.chown(tmp_path, owner or -1, -1)
    assert sharing._is_private(tmp_path) == private


@pytest.mark.parametrize(
    ("uri", "environ", "status"),
    [
        ("http://mlflow.example:5000", {}, "warning"),
        ("http://me:pw@mlflow.example:5000", {}, "ok"),
        ("http://mlflow.example:5000", {"MLFLOW_TRACKING_TOKEN": "x"}, "ok"),
        ("http://127.0.0.1:5000", {}, "ok"),
        ("http://localhost:5000", {}, "ok"),
        ("http://[::1]:5000", {}, "ok"),
        ("http://mlflow:5000", {"SAMEBITS_IMAGE": "samebits:gpu"}, "ok"),
        ("http://mlflow:5000", {}, "warning"),
    ],
)
@pytest.mark.attack("a stranger on the network", outcome="warned")
def test_a_server_that_answers_without_a_login(uri, environ, status, home):
    assert _answers("it", urlsplit(uri), environ).status == status


def test_a_login_of_netrc_is_a_login(home):
    """MLflow's client takes it, as requests does."""
    (home / ".netrc").write_text("machine mlflow.example login me password pw\n")
    assert _answers("it", urlsplit("http://mlflow.example:5000"), {}).status == "ok"
    assert _answers("it", urlsplit("http://another.example:5000"), {}).status == "warning"
