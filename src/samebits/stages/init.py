"""``samebits init``: an experiment in a user's own repository, which calls the installed library."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from samebits.errors import HostError, UserError, few, last_line, reason
from samebits.files import own_cache_of_dvc, regular, write_text
from samebits.stages.pipeline import pipeline_yaml, stages

_TEMPLATES = Path(__file__).parent / "templates"
_PLOT = Path(".dvc/plots/stacked_bars.json")
_BEGIN, _END = "# what samebits writes\n", "# end of what samebits writes\n"
_OTHERS = (
    "/.samebits/",
    "/reports/scaling.json",
    "/dvc_plots/",
    "/mlflow.db",
    "/mlflow.db-*",
    "/mlartifacts/",
    "__pycache__/",
)


def template(name: str) -> str:
    """The text of a file that comes with the library."""
    return (_TEMPLATES / name).read_text(encoding="utf-8")


def init() -> list[str]:
    """Make an experiment of the working directory, and return the names of the files that are new or longer.

    Raises:
        UserError: one of the files is there, or this is no root of its git repository.
        HostError: DVC cannot be set up.
    """
    root = _root_of_git()
    if root and root != Path.cwd().resolve():
        hint = f"run this in {root}, or `git init` here for a repository of its own"
        raise UserError(f"{Path.cwd()} lies inside of the git repository {root}", hint=hint)
    new = {
        "params.yaml": template("params.yaml"),
        "experiment.py": template("experiment.txt"),
        "dvc.yaml": pipeline_yaml("Written by `samebits init`.", lambda name: f"samebits stage {name}"),
    }
    if there := [name for name in new if os.path.lexists(name)]:
        hint = "move them away, or begin in another folder; they are yours, and nothing was written"
        raise UserError(f"{few(there)}: there already", hint=hint)
    _refuse_links([Path(".gitignore"), Path(".dvcignore"), Path(".dvc"), Path(".dvc/config"), _PLOT.parent, _PLOT])
    _set_up_dvc(with_git=root is not None)
    longer = {".gitignore": _ignored(), ".dvcignore": ["/.samebits/", "/mlartifacts/", "__pycache__/"]}
    for name, lines in longer.items():
        new[name] = _with_block(Path(name), lines)
    if not _PLOT.exists():
        new[str(_PLOT)] = template(_PLOT.name)
    for name, text in new.items():
        path = Path(name)
        mode = path.stat().st_mode if path.exists() else None
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, text)
        if mode is not None:
            path.chmod(mode)
    return [*new]


def _refuse_links(paths: list[Path]) -> None:
    """Raise UserError: one of these is a link, by which another file would be read or written."""
    if link := next((path for path in paths if path.is_symlink()), None):
        raise UserError(f"{link}: a link, which is not followed", hint="replace it by what it leads to")


def _root_of_git() -> Path | None:
    """The root of the git repository that this folder is in; None without git or a repository."""
    try:
        done = subprocess.run(["git", "rev-parse", "--show-toplevel"], capture_output=True, check=True)
    except (FileNotFoundError, subprocess.CalledProcessError):
        return None
    return Path(os.fsdecode(done.stdout.removesuffix(b"\n"))).resolve()


def _set_up_dvc(*, with_git: bool) -> None:
    """Run ``dvc init`` where that was not done. Without git, say what is missing."""
    if not with_git:
        sys.stderr.write(
            "warning: no git repository here: results cannot name their commit, and `samebits reproduce` has none to "
            "go back to. hint: git init, then `dvc config core.no_scm false`\n"
        )
    if Path(".dvc/config").exists():
        return
    command = [sys.executable, "-P", "-m", "dvc", "init", "--quiet", *([] if with_git else ["--no-scm"])]
    environ = {**os.environ, "DVC_NO_ANALYTICS": "true", **own_cache_of_dvc()}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environ)
    if done.returncode:
        hint = "run `dvc init` by hand, then this again"
        raise HostError(f"`dvc init` failed: {last_line(done.stderr)}", hint=hint)


def _ignored() -> list[str]:
    """What git is to ignore: what the stages write, and nothing else in folders that may hold a user's own files."""
    files = [file for command in stages().values() for file in command.spec.files]
    written = {f"/{file.partition('/')[0]}/" if "${" in file else f"/{file}" for file in files}
    return [*sorted(written), *_OTHERS]


def _with_block(file: Path, lines: list[str]) -> str:
    """The text of a file with these lines between marks: at its end, or in the place of such a block."""
    try:
        before = regular(file).read_text(encoding="utf-8") if file.exists() else ""
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{file}: cannot be read: {reason(error)}", hint="correct it, or move it away") from None
    block = _BEGIN + "".join(f"{line}\n" for line in lines) + _END
    if _BEGIN in before and _END in before:
        return re.sub(f"{_BEGIN}.*?{_END}", lambda _: block, before, count=1, flags=re.DOTALL)
    apart = "\n" if before and not before.endswith("\n") else ""
    return before + apart + block
