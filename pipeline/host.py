"""Stage host: write what DVC cannot see, so that a change of it reruns what depends on it.

host.json holds the stable facts of this host, source.json and files.json the hashes of the user's own model and data.

\b
Example:
  python pipeline/host.py
"""

from pathlib import Path

import click

from samebits.commands import HELP_OPTIONS, enter_container
from samebits.data.user import sources
from samebits.errors import UserError, exit_on_error
from samebits.files import sha256_remembered, sha256_tree, write_json
from samebits.host import count_cores, count_gpus, host_facts
from samebits.params import load_params, require_every_key
from samebits.placement import place

MEMORY = Path(".samebits/hashes.json")


@click.command(help=__doc__, context_settings=HELP_OPTIONS)
@click.option("--params", "params_file", default="params.yaml", show_default=True, help="Parameters to read.")
@click.option("--debug", is_flag=True, help="Show tracebacks.")
def main(params_file: str, debug: bool) -> None:
    with exit_on_error(debug=debug):
        enter_container()
        params = load_params(params_file)
        require_every_key(params, params_file)
        source = params.model.source
        if source and not Path(source).exists():
            raise UserError(f"{params_file}: model.source: {source}: no such file or folder", hint="correct the path")
        gpus, cores = count_gpus(), count_cores()
        for strategy in params.train.strategies:  # a count that does not exist is told before anything trains
            for numerics in params.train.numerics:
                shards = params.shards(numerics)
                place(strategy, params.train, gpus=gpus, cores=cores, shards=shards)
        write_json(Path("source.json"), {"source": source, "sha256": sha256_tree(Path(source)) if source else None})
        own = sources(params.data) if params.data.task == "file" else {}
        hashes = {key: sha256_remembered(source.path, MEMORY) for key, source in own.items()}
        write_json(Path("files.json"), hashes)
        write_json(Path("host.json"), host_facts())


if __name__ == "__main__":
    main()
