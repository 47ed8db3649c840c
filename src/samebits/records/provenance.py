"""Provenance of a result: the commit, changes on top of it, packages and environment."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
from importlib import metadata
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from samebits.errors import first_line, printable
from samebits.files import Part, Record, private_mode, scratch_folder
from samebits.host import installed

if TYPE_CHECKING:
    from collections.abc import Mapping

_PACKAGES = ("torch", "numpy", "safetensors", "mlflow", "dvc", "samebits")
_MAX_UNTRACKED_BYTES = 2**20  # a larger file is not source code
_PLAIN = ("--cached", "--binary", "--full-index", "--no-color", "--no-ext-diff", "--no-textconv", "--no-renames",
          "--src-prefix=a/", "--dst-prefix=b/", "-O/dev/null")  # fmt: skip
"""A patch of the index that `git apply` takes, whatever the user's settings of git are."""
_SECRET = re.compile(
    r"^\.env|\.env$|\.(pem|key|p8|p12|pfx|jks|keystore|keytab|kdbx|ovpn|ppk|gpg|asc|der|tfstate|tfvars)(\.|$)|"
    r"(^|[._-])(id_(rsa|dsa|ecdsa|ed25519)|netrc)|"
    r"^[._](npmrc|pypirc|pgpass|htpasswd|s3cfg|boto|dockercfg|my\.cnf|mylogin\.cnf)$|"
    r"^(rclone\.conf|kaggle\.json|auth\.json)$|(^|[._-]|priv|deploy|ssh|root)keys?(\.(?!py$)|$)|"
    r"^kubeconfig|secret|credential|passw|passphrase|vault.?pass|service.?account|(api|access|private).?key|"
    r"(?<![a-z])tokens?(?![a-z])",  # not a tokenizer
    re.IGNORECASE,
)
"""Names of files that usually hold secrets. A patch leaves them out."""
_SECRET_FOLDER = re.compile(
    r"^\.(ssh|gnupg|kube|aws|azure|docker|config)$|^(keys|tokens)$|secret|credential|passw", re.IGNORECASE
)

RECORDED = (
    "ATEN_CPU_CAPABILITY", "CUBLAS_EMULATE_DOUBLE_PRECISION", "CUBLAS_EMULATE_SINGLE_PRECISION",
    "CUBLAS_EMULATION_SPECIAL_VALUES_SUPPORT_MASK", "CUBLAS_EMULATION_STRATEGY",
    "CUBLAS_FIXEDPOINT_EMULATION_MANTISSA_BIT_COUNT", "CUBLAS_WORKSPACE_CONFIG", "CUDA_DEVICE_ORDER",
    "CUDA_LAUNCH_BLOCKING", "CUDA_MODULE_LOADING", "CUDA_VISIBLE_DEVICES", "GLOO_SOCKET_IFNAME", "MKL_CBWR",
    "MKL_ENABLE_INSTRUCTIONS",
    "MKL_NUM_THREADS", "NCCL_ALGO", "NCCL_BUFFSIZE", "NCCL_DEBUG", "NCCL_IB_DISABLE", "NCCL_MAX_NCHANNELS",
    "NCCL_MIN_NCHANNELS", "NCCL_NVLS_ENABLE", "NCCL_P2P_DISABLE", "NCCL_P2P_LEVEL", "NCCL_PROTO", "NCCL_SHM_DISABLE",
    "NCCL_SOCKET_IFNAME", "NVIDIA_TF32_OVERRIDE", "NVIDIA_VISIBLE_DEVICES", "OMP_NUM_THREADS", "PYTHONHASHSEED",
    "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_NVML_BASED_CUDA_CHECK", "SAMEBITS_IMAGE_DIGEST",
    "SAMEBITS_RUNTIME", "TORCH_DISABLE_NATIVE_JIT", "TORCH_NCCL_ASYNC_ERROR_HANDLING", "TORCH_NCCL_BLOCKING_WAIT",
    "TORCH_NCCL_DUMP_ON_TIMEOUT", "NCCL_CUMEM_HOST_ENABLE",
)  # fmt: skip
"""Recorded variables, by exact name, because any other may hold a secret. Compose passes those of NCCL."""

_OUTSIDE = ":(top,exclude,glob)**/dvc.lock"
"""Which of git's files are no code: what DVC notes of its runs, at the root and in an experiment's folder."""

UNAVAILABLE = "unavailable: "
"""Prefix of the reason why a fact is missing."""


class GitState(Part):
    """The commit of the working directory, and whether files other than ``dvc.lock`` differ from it.

    ``commit`` is None if git cannot tell, and ``problem`` says why.
    """

    commit: str | None
    dirty: bool
    problem: str | None = None

    @property
    def told(self) -> str:
        """The commit, or "unavailable: <reason>"."""
        return self.commit or f"{UNAVAILABLE}{self.problem}"


class Provenance(Record):
    """Provenance of a result.

    ``patch`` is the name of the file with the changes on top of the commit; None if there are none, or if
    ``patch_problem`` says why they are missing. ``patch_omits`` lists untracked files that the patch leaves out because
    they are too large, or because their names suggest secrets.
    """

    git: GitState
    patch: Annotated[str, Field(pattern=r"^\w[\w.-]*$")] | None  # beside this file
    patch_problem: str | None
    patch_omits: tuple[str, ...]
    packages: dict[str, str]
    environment: dict[str, str]


class NoGit(Exception):  # noqa: N818 - a reason, not a failure
    """Why git cannot tell."""


def run_git(*arguments: str, written: str = "", **environ: str) -> bytes:
    """The output of git for the input ``written``. It takes no lock, which the user's own git or DVC may need."""
    environ = {**os.environ, "GIT_OPTIONAL_LOCKS": "0", **environ}
    text = os.fsencode(written)
    try:
        done = subprocess.run(["git", *arguments], input=text, capture_output=True, check=True, env=environ)
    except FileNotFoundError:
        raise NoGit("git is not installed") from None
    except subprocess.CalledProcessError as error:
        raise NoGit(first_line(error.stderr.decode(errors="replace"))) from None
    return bytes(done.stdout)


def git_state() -> GitState:
    """Commit and changes of the working directory."""
    try:
        commit = run_git("rev-parse", "HEAD").decode().strip()
        changes = run_git("status", "--porcelain", "--", ":/", _OUTSIDE)
    except NoGit as reason:
        return GitState(commit=None, dirty=False, problem=str(reason))
    return GitState(commit=commit, dirty=bool(changes))


def _size(path: Path) -> int | None:
    """Bytes of a file; None if it went away meanwhile."""
    try:
        return path.lstat().st_size
    except FileNotFoundError:
        return None


def _stays(name: str, size: int) -> bool:
    """Whether a new file is no part of a patch: it is large, or its name or a folder's is that of a secret."""
    *folders, last = PurePosixPath(name).parts
    return size > _MAX_UNTRACKED_BYTES or bool(_SECRET.search(last) or any(map(_SECRET_FOLDER.search, folders)))


def git_patch(*, python_only: bool = False) -> tuple[bytes, list[str]]:
    """All changes on top of the commit as a binary patch with small new files, and the names it leaves out.

    With ``python_only``, Python modules are the only untracked files in it, without growing logs, for example. The
    user's index and objects stay as they are, because git works on copies in a temporary folder.
    """
    top = Path(os.fsdecode(run_git("rev-parse", "--show-toplevel").rstrip(b"\n")))
    everything = ("-C", str(top))
    scope = [":/", _OUTSIDE]
    untracked = run_git(*everything, "ls-files", "-z", "--others", "--exclude-standard").split(b"\0")
    sizes = {name: _size(top / name) for name in map(os.fsdecode, untracked) if name}
    there = {name: size for name, size in sizes.items() if size is not None}  # git refuses to add missing files
    omitted = [name for name, size in there.items() if _stays(name, size)]
    taken = set(there) - set(omitted)
    if python_only:
        taken = {name for name in taken if name.endswith(".py")}
    with scratch_folder() as folder:
        index = top / os.fsdecode(run_git(*everything, "rev-parse", "--git-path", "index").rstrip(b"\n"))
        objects = top / os.fsdecode(run_git(*everything, "rev-parse", "--git-path", "objects").rstrip(b"\n"))
        if index.exists():
            shutil.copy2(index, f"{folder}/index")  # with its time: git reads files that are not older
        Path(f"{folder}/objects").mkdir()
        environ = {
            "GIT_INDEX_FILE": f"{folder}/index",
            "GIT_OBJECT_DIRECTORY": f"{folder}/objects",
            "GIT_ALTERNATE_OBJECT_DIRECTORIES": str(objects.resolve()),
        }
        run_git(*everything, "add", "--update", "--", *scope, **environ)
        new = ("-z", "--name-only", "--diff-filter=A")
        added = run_git(*everything, "diff", *_PLAIN, *new, "HEAD", "--", *scope, **environ).split(b"\0")
        names = [os.fsdecode(name) for name in added if name]
        staged = [name for name in names if _stays(name, _size(top / name) or 0)]
        omitted += staged
        if staged:
            removed = "".join(f"{name}\0" for name in staged)
            run_git(*everything, "update-index", "-z", "--force-remove", "--stdin", written=removed, **environ)
        listed = "".join(f":(top,literal){name}\0" for name in sorted(taken))
        run_git(*everything, "add", "--pathspec-from-file=-", "--pathspec-file-nul", written=listed, **environ)
        patch = run_git(*everything, "diff", *_PLAIN, "HEAD", "--", *scope, **environ)
    return patch, omitted


def git_changes(git: GitState) -> str | None:
    """A hash of the code changes on top of the commit, or why there is none; None without changes."""
    if not git.dirty:
        return None
    try:
        patch, _ = git_patch(python_only=True)
    except NoGit as reason:
        return f"{UNAVAILABLE}{reason}"
    return hashlib.sha256(patch).hexdigest()[:12] if patch else None


def versions() -> dict[str, str]:
    """Versions of packages that a result may depend on."""
    return {name: installed(name) or f"{UNAVAILABLE}not installed" for name in _PACKAGES}


def environment(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The set variables that are known to change times or bits."""
    return {name: environ[name] for name in RECORDED if name in environ}


def provenance_of(log: Path) -> Path:
    """The provenance file beside a run's log."""
    return log.with_suffix(".provenance.json")


def note_provenance(log: Path) -> None:
    """Save a run's provenance beside its log, before the run starts and files may be edited."""
    capture(log.with_suffix(".patch")).write(provenance_of(log))


def capture(patch_file: Path) -> Provenance:
    """The provenance of this moment. The patch goes to ``patch_file`` if there are changes."""
    git, patch, problem, omitted = git_state(), None, None, list[str]()
    if git.dirty:
        try:
            text, omitted = git_patch()
        except NoGit as reason:
            problem = str(reason)
        else:
            patch_file.touch(private_mode(patch_file.parent))  # it may hold what others cannot read in the clone
            patch_file.write_bytes(text)
            patch = patch_file.name
    facts = [item.metadata for item in metadata.distributions()]  # read once, because each access reads the file again
    packages = {item["Name"].lower(): item["Version"] for item in facts if item["Name"] and item["Version"]}
    return Provenance(
        git=git,
        patch=patch,
        patch_problem=problem,
        patch_omits=tuple(map(printable, omitted)),
        packages=dict(sorted(packages.items())),
        environment=environment(),
    )
