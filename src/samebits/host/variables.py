"""The environment variables by which a user decides what ``params.yaml`` does not.

None of them changes the bits of a training. Those that one part of the kit sets for another are not among them.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

from samebits.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Mapping

RUNTIME = "SAMEBITS_RUNTIME"
IMAGE = "SAMEBITS_IMAGE"
MOUNTS = "SAMEBITS_MOUNTS"
SHM_SIZE = "SAMEBITS_SHM_SIZE"
LAUNCHER = "SAMEBITS_LAUNCHER"
NODES = "SAMEBITS_NODES"
SLURM = "SAMEBITS_SLURM_"
"""Begins the variables of Slurm's settings."""
SECRET = "SAMEBITS_SECRET"  # noqa: S105 - the name of the variable
START_SECONDS = "SAMEBITS_START_SECONDS"
KERNELS = "SAMEBITS_KERNELS"
PRODUCTS = "SAMEBITS_PRODUCTS"
SHARDS = "SAMEBITS_SHARDS"


@dataclass(frozen=True, kw_only=True)
class Variable:
    """What a variable decides, the values that it accepts, and the one that an unset variable stands for.

    ``choices`` are all values, or none if ``accepts`` tells them in words. ``only`` is who alone reads it, if not the
    kit's commands.
    """

    decides: str
    choices: tuple[str, ...] = ()
    accepts: str = ""
    default: str = ""
    only: str = ""


VARIABLES = {
    RUNTIME: Variable(decides="where stages run", choices=("auto", "container", "host"), default="auto"),
    IMAGE: Variable(
        decides="the image in which stages run", accepts="a name that the engine knows", default="that of the locks"
    ),
    MOUNTS: Variable(
        decides="what the image sees besides the repository; a line of `.env` does too",
        accepts="paths, separated by colons",
    ),
    SHM_SIZE: Variable(
        decides="the size of `/dev/shm` in the image", accepts="bytes, or k, m or g of them", default="8g"
    ),
    LAUNCHER: Variable(
        decides="whether `dvc repro` trains here or on a cluster", choices=("local", "slurm"), default="local"
    ),
    NODES: Variable(
        decides="the number of machines on a cluster", accepts="integer, ≥ 1", default="those of `cluster.toml`"
    ),
    **{
        f"{SLURM}{name.upper()}": Variable(decides=f"Slurm's {name}", accepts="text", default="that of `cluster.toml`")
        for name in ("partition", "account", "time")
    },
    f"{SLURM}ARGUMENTS": Variable(
        decides="further arguments of `srun` and `sbatch`",
        accepts="words of a shell",
        default="those of `cluster.toml`",
    ),
    SECRET: Variable(
        decides="which messages machines of one training take from each other",
        accepts="a text that nobody else on their network knows",
        default="none: anybody's",
    ),
    START_SECONDS: Variable(
        decides="how long machines wait for each other to start", accepts="integer, ≥ 0", default="`train.timeout_s`"
    ),
    KERNELS: Variable(
        decides="whether `exact` uses its compiled kernels", choices=("compiled", "python"), default="compiled"
    ),
    PRODUCTS: Variable(
        decides="how `exact` multiplies large matrices",
        choices=("int8", "float64"),
        default="the faster on this device",
    ),
    SHARDS: Variable(
        decides="whether `exact` runs several shards in one pass",
        choices=("together", "apart"),
        default="together where that gives the same bits",
    ),
    "SAMEBITS_PORT": Variable(
        decides="the port of MLflow on this host", accepts="integer", default="5000", only="Compose"
    ),
    "SAMEBITS_ALLOWED_HOSTS": Variable(
        decides="further names under which MLflow answers", accepts="names, separated by commas", only="Compose"
    ),
}


def chosen(name: str, environ: Mapping[str, str] = os.environ) -> str | None:
    """The value of a variable with choices, None if it is unset. Raises UserError: it is another value."""
    return require_one_of(VARIABLES[name].choices, name, environ.get(name) or None)


def require_one_of(accepted: tuple[str, ...], name: str, given: str | None) -> str | None:
    """The value that a variable has. Raises UserError: it has one, which is not accepted."""
    if given is not None and given not in accepted:
        some = " or ".join(filter(None, (", ".join(accepted[:-1]), accepted[-1])))
        raise UserError(f"{name}: got {given!r}, accepts {some}", hint=f"unset {name}")
    return given
