"""What other users of the host, or of its network, could change."""

import os
import subprocess
import sys
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from conftest import needs_root
from samebits.doctor import sharing
from samebits.doctor.store import _answers

NOBODY = 65534


def texts(findings):
    ((status, text, hint),) = [(one.status, one.text, one.hint) for one in findings]
    return status, text, hint


@pytest.fixture
def repository(tmp_path):
    for name in (".git", ".dvc", "src", "pipeline"):
        (tmp_path / name).mkdir(mode=0o755)
    (tmp_path / "dvc.yaml").touch(0o644)
    return tmp_path


def test_a_clone_that_nobody_else_writes_to(repository):
    assert texts(sharing.clone(repository))[:2] == ("ok", "nobody else writes to it")


@pytest.mark.parametrize(("name", "mode"), [("src", 0o777), ("dvc.yaml", 0o646), ("pipeline", 0o1777)])
@pytest.mark.attack("another user of the host", outcome="warned")
def test_a_clone_that_all_write_to(name, mode, repository):
    (repository / name).chmod(mode)
    status, text, hint = texts(sharing.clone(repository))
    assert (status, hint) == ("warning", "chmod -R go-w .")
    assert text == f"other users can write to {repository / name}, and so decide what runs"


@needs_root
@pytest.mark.parametrize(("owner", "group", "mode"), [(0, NOBODY, 0o775), (NOBODY, NOBODY, 0o755)])
@pytest.mark.attack("another user of the host", outcome="warned")
def test_a_clone_that_a_group_or_another_owner_writes_to(owner, group, mode, repository):
    os.chown(repository / "src", owner, group)
    (repository / "src").chmod(mode)
    assert texts(sharing.clone(repository))[0] == "warning"


@needs_root
def test_a_group_that_is_its_owners_alone_is_nobody_else(repository):
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
    monkeypatch.setattr(sharing, "_is_private", lambda path: path == home)  # pytest's own folders are
    assert texts(sharing.dvc_cache(repository))[:2] == ("ok", f"in {cache}, on a host without other users")
    (home.parent / "other").mkdir()
    os.chown(home.parent / "other", NOBODY, NOBODY)
    status, text, hint = texts(sharing.dvc_cache(repository))
    assert (status, text) == (
        "warning",
        f"DVC reads pickles in {cache}, which is open to all users of this host",
    )
    assert "dvc config --local core.site_cache_dir" in hint


@pytest.mark.parametrize("level", ["local", "global"])
def test_dvcs_cache_is_where_dvc_itself_says(level, repository, home, monkeypatch):
    """Also of settings for all of a user's repositories, of which DVC alone knows where they are."""
    monkeypatch.delenv("DVC_SITE_CACHE_DIR", raising=False)
    monkeypatch.setenv("DVC_GLOBAL_CONFIG_DIR", str(home / "config"))
    assert "in /var/tmp/dvc, " in texts(sharing.dvc_cache(repository))[1]
    cache = home / "cache"
    cache.mkdir(mode=0o700)
    (repository / ".dvc").rmdir()
    command = [sys.executable, "-m", "dvc", "config", f"--{level}", "core.site_cache_dir", str(cache)]
    subprocess.run([sys.executable, "-m", "dvc", "init", "-q", "--no-scm", "-f"], cwd=repository, check=True)
    subprocess.run(command, cwd=repository, check=True)
    assert texts(sharing.dvc_cache(repository))[:2] == ("ok", f"in {cache}, where nobody else comes")


@pytest.mark.parametrize(
    ("mode", "owner", "private"),
    [(0o700, None, True), (0o755, None, False), (0o710, None, False), (0o700, NOBODY, False)],
)
def test_a_private_folder(mode, owner, private, tmp_path):
    if owner and os.geteuid():
        pytest.skip("gives files to somebody else, which root alone can")
    folder = tmp_path / "folder"
    folder.mkdir()
    folder.chmod(mode)
    os.chown(folder, owner or -1, -1)
    assert sharing._is_private(Path(folder)) == private


@pytest.mark.parametrize(
    ("uri", "environ", "status"),
    [
        ("http://mlflow.example:5000", {}, "warning"),
        ("http://me:pw@mlflow.example:5000", {}, "ok"),
        ("http://mlflow.example:5000", {"MLFLOW_TRACKING_TOKEN": "x"}, "ok"),
        ("http://127.0.0.1:5000", {}, "ok"),
        ("http://localhost:5000", {}, "ok"),
        ("http://[::1]:5000", {}, "ok"),
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
