"""Bad input of every kind. Each is refused at once and in one line, and changes nothing outside its folder."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, ClassVar

from faults import inputs_commands, inputs_records
from faults.area import Area, Case
from faults.inputs_arrays import spoil_arrays
from faults.inputs_bench import REFUSED, Attempt, Bench, make_template
from faults.inputs_params import SMALL_RUN, spoil_params
from faults.subject import Broken

if TYPE_CHECKING:
    import random
    from collections.abc import Callable
    from pathlib import Path

    Trial = Callable[[random.Random, Bench], Attempt]

STAGES = (
    ("prepare",),
    ("host",),
    ("train", "--strategy", "single", "--steps", "2", "--no-tracking"),
    ("evaluate",),
    ("compare", "--no-tracking"),
)


class Inputs(Area):
    """Wrong parameters, arrays, records, logs, archives, checkpoints and command lines."""

    NAME: ClassVar[str] = "inputs"
    UNIT: ClassVar[str] = "bad inputs"
    IN_AN_HOUR = 300

    def __init__(self, folder: Path, seed: int) -> None:
        super().__init__(folder, seed)
        self._template: Path | None = None
        self._kinds: dict[str, Trial] = {
            "params.yaml": self._loaded,
            "arrays": _prepared,
            "records, stages": inputs_records.stages,
            "command line": inputs_commands.commands,
            "params.yaml, stages": _staged,
            "records, commands": inputs_records.commands,
            "archives": inputs_commands.archives,
            "tracking": self._tracked,
            "checkpoints": inputs_records.checkpoints,
        }

    def case(self, number: int) -> Case:
        """One bad input; the kinds take turns."""
        kinds = list(self._kinds)
        kind = kinds[number % len(kinds)]
        return Case(f"{kind}, bad input {number}", lambda: self._try(number, kind))

    def _try(self, number: int, kind: str) -> None:
        if self._template is None:
            self._template = self._prepared()
        folder = self.folder / str(number)
        bare = kind in ("params.yaml", "arrays")
        bench = Bench(folder, SMALL_RUN, None if bare else self._template)
        what = kind
        try:
            attempt = self._kinds[kind](self.random(number), bench)
            what = attempt.what
            bench.check(attempt.start(), attempt.codes, attempt.names)
        except Broken as error:
            raise Broken(f"{kind}: {what}: {error}") from None
        finally:
            bench.close()

    def _prepared(self) -> Path:
        """Make the pipeline to damage, and import once what every case needs."""
        import docker  # noqa: F401
        import matplotlib.pyplot  # noqa: F401
        import mlflow.entities  # noqa: F401

        import samebits.cli.commands
        import samebits.doctor.model
        import samebits.results.page
        import samebits.tracking.reproduce  # noqa: F401

        return make_template(self.folder / "template")

    def _loaded(self, rng: random.Random, bench: Bench) -> Attempt:
        from samebits.params import load_params

        what = spoil_params(rng, bench, runs=False)
        return Attempt(what, partial(bench, lambda: load_params("params.yaml")), REFUSED)

    def _tracked(self, rng: random.Random, bench: Bench) -> Attempt:
        assert self._template is not None
        return inputs_records.tracking(rng, bench, self._template)


def _staged(rng: random.Random, bench: Bench) -> Attempt:
    what, stage = spoil_params(rng, bench, runs=True), rng.choice(STAGES)
    return Attempt(f"{stage[0]}: {what}", partial(bench, *stage), REFUSED)


def _prepared(rng: random.Random, bench: Bench) -> Attempt:
    what = spoil_arrays(rng, bench)
    stage = rng.choice(("prepare", "prepare", "prepare", "host"))
    files = ("x.npy", "y.npy", "s.npy", "x.safetensors")  # "data." and params.yaml: YAML may refuse the file's name
    return Attempt(what, partial(bench, stage), REFUSED, (*files, "data.", "params.yaml"))
