"""Where a result comes from: the commit, what was changed on top of it, packages and environment."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, TypedDict

if TYPE_CHECKING:
    from collections.abc import Mapping

_PACKAGES = ("torch", "numpy", "safetensors", "mlflow", "dvc", "samebits")
_MAX_UNTRACKED_BYTES = 2**20  # a larger file is no source

# By exact name: a variable that is not known to matter may hold a secret.
_ENVIRONMENT = (
    "ATEN_CPU_CAPABILITY", "CUBLAS_WORKSPACE_CONFIG", "CUDA_DEVICE_ORDER", "CUDA_LAUNCH_BLOCKING",
    "CUDA_MODULE_LOADING", "CUDA_VISIBLE_DEVICES", "GLOO_SOCKET_IFNAME", "MKL_CBWR", "MKL_ENABLE_INSTRUCTIONS",
    "MKL_NUM_THREADS", "NCCL_ALGO", "NCCL_BUFFSIZE", "NCCL_DEBUG", "NCCL_IB_DISABLE", "NCCL_MAX_NCHANNELS",
    "NCCL_MIN_NCHANNELS", "NCCL_NVLS_ENABLE", "NCCL_P2P_DISABLE", "NCCL_P2P_LEVEL", "NCCL_PROTO", "NCCL_SHM_DISABLE",
    "NCCL_SOCKET_IFNAME", "NVIDIA_TF32_OVERRIDE", "NVIDIA_VISIBLE_DEVICES", "OMP_NUM_THREADS", "PYTHONHASHSEED",
    "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_NVML_BASED_CUDA_CHECK", "SAMEBITS_IMAGE_DIGEST",
    "SAMEBITS_RUNTIME", "TORCH_NCCL_ASYNC_ERROR_HANDLING", "TORCH_NCCL_BLOCKING_WAIT",
)  # fmt: skip


class GitState(TypedDict):
    """``commit`` is "unavailable: <reason>" outside a repository."""

    commit: str
    dirty: bool


class Provenance(TypedDict):
    """What a result comes from.

    ``patch`` is the name of a file, or "unavailable: <reason>", or None where there is nothing to patch;
    ``patch_omits`` lists the untracked files that are too large for it.
    """

    git: GitState
    patch: str | None
    patch_omits: list[str]
    packages: dict[str, str]
    environment: dict[str, str]


class _NoGit(Exception):  # noqa: N818 - a reason, not a failure
    """Why git cannot tell."""


def _git(*arguments: str, **environ: str) -> bytes:
    try:
        done = subprocess.run(["git", *arguments], capture_output=True, check=True, env={**os.environ, **environ})
    except FileNotFoundError:
        raise _NoGit("git is not installed") from None
    except subprocess.CalledProcessError as error:
        raise _NoGit(error.stderr.decode(errors="replace").strip().split("\n", maxsplit=1)[0]) from None
    return bytes(done.stdout)


def git_state() -> GitState:
    """The commit of the working directory, and whether tracked files differ from it (``dvc.lock`` aside)."""
    try:
        commit = _git("rev-parse", "HEAD").decode().strip()
        changes = _git("status", "--porcelain", "--", ":/", ":(top,exclude)dvc.lock")
    except _NoGit as reason:
        return {"commit": f"unavailable: {reason}", "dirty": False}
    return {"commit": commit, "dirty": bool(changes)}


def git_patch() -> tuple[bytes, list[str]]:
    """All changes on top of the commit as a binary patch, untracked source files included, and what it leaves out.

    The user's index and objects are not touched: both are copies in a folder that goes away.
    """
    top = Path(os.fsdecode(_git("rev-parse", "--show-toplevel").rstrip(b"\n")))
    everything = ("-C", str(top))
    scope = [":/", ":(top,exclude)dvc.lock"]
    untracked = _git(*everything, "ls-files", "-z", "--others", "--exclude-standard").split(b"\0")
    names = [os.fsdecode(name) for name in untracked if name]
    omitted = [name for name in names if (top / name).lstat().st_size > _MAX_UNTRACKED_BYTES]
    scope += [f":(top,exclude,literal){name}" for name in omitted]
    with tempfile.TemporaryDirectory(prefix="samebits-") as folder:
        index = top / os.fsdecode(_git(*everything, "rev-parse", "--git-path", "index").rstrip(b"\n"))
        objects = top / os.fsdecode(_git(*everything, "rev-parse", "--git-path", "objects").rstrip(b"\n"))
        if index.exists():
            shutil.copy(index, f"{folder}/index")
        Path(f"{folder}/objects").mkdir()
        environ = {
            "GIT_INDEX_FILE": f"{folder}/index",
            "GIT_OBJECT_DIRECTORY": f"{folder}/objects",
            "GIT_ALTERNATE_OBJECT_DIRECTORIES": str(objects.resolve()),
        }
        _git(*everything, "add", "--all", "--", *scope, **environ)
        patch = _git(*everything, "diff", "--cached", "--binary", "--full-index", "HEAD", "--", *scope, **environ)
    return patch, omitted


def versions() -> dict[str, str]:
    """Versions of the packages that a result may depend on."""
    found = {}
    for name in _PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = "unavailable: not installed"
    return found


def environment(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Variables that are known to change a timing or a bit, and that are set."""
    return {name: environ[name] for name in _ENVIRONMENT if name in environ}


def capture(patch_file: Path) -> Provenance:
    """Everything above as it is now; the patch goes to ``patch_file`` if there are changes."""
    git, patch, omitted = git_state(), None, list[str]()
    if git["dirty"]:
        try:
            text, omitted = git_patch()
        except _NoGit as reason:
            patch = f"unavailable: {reason}"
        else:
            patch_file.write_bytes(text)
            patch = patch_file.name
    installed = {(item.metadata["Name"] or "").lower(): item.version for item in metadata.distributions()}
    return {
        "git": git,
        "patch": patch,
        "patch_omits": omitted,
        "packages": dict(sorted(installed.items())),
        "environment": environment(),
    }
