"""Stage prepare: draw the data set that params.yaml describes.

\b
Example:
  samebits stage prepare --params other.yaml --out-dir /tmp/data
"""

from pathlib import Path

import click

from samebits.data.prepare import prepare
from samebits.params import Params
from samebits.stages.interface import StageSpec, path_option, stage


@stage(
    StageSpec(
        about="synthetic data with a known floor, the same bytes on every host; or the user's own",
        reads=("files.json",),
        writes=("data/train.safetensors", "data/test.safetensors", "data/card.json"),
        params=("seed", "data"),
    )
)
@path_option("--out-dir", default="data", told="Folder to write.")
def main(params: Params, out_dir: str) -> None:
    card = prepare(params, Path(out_dir))
    told = f"{card.task}: {card.train.num_samples} + {card.test.num_samples} samples"
    if card.floor is not None:
        told += f", floor {card.floor:.6f}"
    elif card.loss != "own":  # what the targets were taken for
        told += f", {card.num_classes} classes" if card.num_classes else ", values"
    click.echo(told)
