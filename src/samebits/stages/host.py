"""Stage host: write what DVC cannot see, so that a change of it reruns what depends on it.

host.json holds the stable facts of this host, source.json and files.json the hashes of the user's own model and data,
and in a user's repository the version of the library.

\b
Example:
  samebits stage host
"""

import os
from pathlib import Path

import click

from samebits import __version__
from samebits.data.prepare import prepare
from samebits.data.user import sources
from samebits.engines.launch import goes_elsewhere
from samebits.errors import SamebitsError, UserError
from samebits.files import scratch_folder, write_json
from samebits.hashes import sha256_remembered, sha256_tree
from samebits.here import is_kit
from samebits.host import count_cores, count_gpus, host_facts
from samebits.numerics.environment import prepare_environment
from samebits.params import Params, require_every_key
from samebits.stages.interface import StageSpec, experiment_folder, say_what_stays_unused, stage
from samebits.strategies.placement import Devices
from samebits.tasks import FileData
from samebits.training.models.sources import find_sources, is_known, recalled
from samebits.training.placement import place

SAMPLES = 8  # in the batch with which a user's model runs once, to see what it reads
MEMORY = Path(".samebits/hashes.json")


@stage(
    StageSpec(
        about="facts that DVC cannot see - the host's, and the user's own model and data",
        writes=("host.json", "source.json", "files.json"),
        always=True,
    )
)
def main(params: Params) -> None:
    prepare_environment()
    params_file = click.get_current_context().params["params_file"]
    require_every_key(params, params_file)
    source = params.model.source
    if source and not Path(source).exists():
        raise UserError(f"{params_file}: model.source: {source}: no such file or folder", hint="correct the path")
    say_what_stays_unused()
    gpus, cores = count_gpus(), count_cores()
    for strategy in params.train.strategies:  # report a wrong number of devices before anything trains
        for numerics in params.train.numerics:
            if not goes_elsewhere(strategy, os.environ):
                place(strategy, params, numerics, Devices(gpus=gpus, cores=cores))
    folder = experiment_folder()
    library = {} if is_kit() else {"samebits": version_of_library()}  # whose sources are dependencies in dvc.yaml there
    write_json(folder / "source.json", {**sources_of(params), **library})
    files = sources(params.data) if isinstance(params.data, FileData) else {}
    hashes = {key: sha256_remembered(file.path, MEMORY) for key, file in files.items()}
    write_json(folder / "files.json", {**hashes, **library})
    write_json(folder / "host.json", host_facts().model_dump(mode="json"))


def version_of_library() -> str:
    """Version and hash of the installed library, so that another one makes data and trains again."""
    return f"{__version__} {sha256_tree(Path(__file__).parents[1])[:12]}"


def sources_of(params: Params) -> dict[str, object]:
    """The sources of the user's model. It runs once with a small batch if they are not known yet."""
    model = params.model
    sources = find_sources(model, recalled(model))
    if sources and not is_known(model, sources):
        from samebits.workers.discover import discover  # importing torch takes seconds

        with scratch_folder() as folder:
            few_samples = params.data.model_copy(update={"num_samples": SAMPLES, "test_samples": SAMPLES})
            small = params.model_copy(update={"data": few_samples})
            try:
                prepare(small, folder)
                discover(small, folder)
            except SamebitsError as error:  # the training reports it with its hint
                click.echo(f"{model.name} could not be run to see what else it reads: {error.message}", err=True)
        sources = find_sources(model, recalled(model))
    found = sources.model_dump(mode="json") if sources else {}
    return {"source": model.source, "sha256": sources.digest if sources else None, **found}
