"""Labels that a training itself cannot know, found when runs are compared."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from samebits.errors import counted, few
from samebits.params import flatten
from samebits.remarks import LabelOf, Remark
from samebits.results.usage import disturbances
from samebits.results.verdict import SPLIT

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from samebits.records.measurement import StopKind
    from samebits.records.run import Node, Run


class Noisy(LabelOf):
    """The times of a run are uncertain."""

    MEANS: ClassVar[str] = (
        "Repeats differed by more than 15%, or the speed-up could not be told within 5%, often because something else "
        "used the host. Seconds are uncertain; paired speed-ups are less so, as their interval shows."
    )
    SAYS: ClassVar[str] = "{why}"
    kind: Literal["noisy"] = "noisy"
    why: str


class Disturbed(LabelOf):
    """Something kept a device from its pace."""

    MEANS: ClassVar[str] = "A device was slowed down, or others used it too. Its figures may be too low."
    kind: Literal["disturbed"] = "disturbed"
    why: tuple[str, ...]

    def sentence(self) -> str:
        """See ``Remark.sentence``."""
        return "; ".join(self.why)


class NotRepeatable(LabelOf):
    """A repeat on the same host gave another loss at ``step``."""

    MEANS: ClassVar[str] = "Training again here gave other losses: an operation of the model is not deterministic."
    SAYS: ClassVar[str] = "a repeat on this host gave another loss at step {step}"
    kind: Literal["not_repeatable"] = "not_repeatable"
    step: int


class DifferentStart(LabelOf):
    """The first weights are not those of the run ``reference``."""

    MEANS: ClassVar[str] = "It began from other weights than the run it is compared with, so it is another training."
    SAYS: ClassVar[str] = "its first weights are not those of {reference}: the factory draws without a seed"
    kind: Literal["different_start"] = "different_start"
    reference: str


class LostDigits(LabelOf):
    """The first loss in ``exact`` is not that of ``reference``, a run in ``fast``, from the same weights."""

    MEANS: ClassVar[str] = (
        "Exact rounds each row of a product to the grid of its largest number, so a small number beside a very large "
        "one is lost. Scale the columns of the inputs, or the weights that do it, to similar sizes."
    )
    SAYS: ClassVar[str] = (
        "from the same weights and samples, the first loss is {loss:.6g}, and {other:.6g} in {reference}"
    )
    kind: Literal["lost_digits"] = "lost_digits"
    loss: float
    other: float
    reference: str


class DifferentHosts(LabelOf):
    """A machine differs from the ``first`` one in facts that times depend on."""

    MEANS: ClassVar[str] = "The slowest machine sets the pace of all; a figure holds for this mixture alone."
    kind: Literal["different_hosts"] = "different_hosts"
    node: str
    first: str
    unlike: tuple[str, ...]

    def sentence(self) -> str:
        """See ``Remark.sentence``."""
        return f"{self.node} is not like {self.first}: other {few(self.unlike)}"


class OneMachine(LabelOf):
    """Several nodes are one machine."""

    MEANS: ClassVar[str] = "More machines of this kind would not share cores and memory."
    kind: Literal["one_machine"] = "one_machine"
    nodes: tuple[str, ...]

    def sentence(self) -> str:
        """See ``Remark.sentence``."""
        return f"{few(self.nodes)} run on one kernel, and share its cores and its memory"


_NOISY_SPREAD = 0.15  # relative range of samples per second over repeats, above which a run is noisy
_TIMED_BY = ("cpu.model", "cpu.instruction_sets", "cpu.cores", "driver", "torch", "cuda", "nccl", "libc")
"""Facts of a host that may change the speed of a training, or its bits in ``fast``."""


def labels_of(run: Run, reference: Run, fast: Run | None) -> Iterator[Remark]:
    """Labels that the training itself cannot know; ``fast`` is a run in these numerics."""
    if noise := _noise(run):
        yield Noisy(why=noise)
    if disturbed := disturbances(run.record):
        yield Disturbed(why=tuple(disturbed))
    if step := run.record.first_unrepeated_step:
        yield NotRepeatable(step=step)
    if run.record.initial_sha256 != reference.record.initial_sha256:
        yield DifferentStart(reference=reference.name)
    if run.record.numerics == "exact" and fast:
        yield from _lost_digits(run, fast)
    yield from _labels_of_nodes(run.record.nodes)


_NO_MORE: dict[StopKind, str] = {
    "limit": "train.prolong_s allows no more",
    "off": "train.prolong_s is 0",
    "most": "there are never more",
}


def _noise(run: Run) -> str:
    """How uncertain the times of a run are; empty if they are not."""
    texts, speeds, repeats = [], run.timing.samples_per_sec_spread, run.record.measurement.repeats
    if speeds.high > speeds.low * (1 + _NOISY_SPREAD):
        texts.append(f"samples per second differed by {100 * (speeds.high / speeds.low - 1):.0f}% between repeats")
    if repeats and repeats.half_width is not None and (why := _NO_MORE.get(repeats.stopped)):
        times = counted(repeats.count, "repeat")
        texts.append(f"after {times} the speed-up is known within {repeats.half_width:.1%} only, and {why}")
    return "; ".join(texts)


_SPLIT = {"batch_norm", *SPLIT}
_ROUNDED = 1e-3  # the largest relative difference between two first losses that rounding explains


def _lost_digits(run: Run, fast: Run) -> Iterator[Remark]:
    """A label on an exact run, if its first loss is not that of the same weights in ``fast``."""
    records, (loss, other) = (run.record, fast.record), (run.losses[0], fast.losses[0])
    are_split = any(record.batch_norms or _SPLIT & {note.kind for note in record.notes} for record in records)
    if (
        not are_split
        and not fast.record.draws
        and fast.record.params.train.precision == "fp32"
        and len({record.initial_sha256 for record in records}) == 1
        and abs(loss - other) > _ROUNDED * abs(other)
    ):
        yield LostDigits(loss=loss, other=other, reference=fast.name)


def _labels_of_nodes(nodes: Sequence[Node]) -> Iterator[Remark]:
    """Labels of machines that differ, and of nodes that are one machine."""
    for node in nodes[1:]:
        facts, others = (flatten(one.host.model_dump(mode="json")) for one in (nodes[0], node))
        unlike = [key for key in _TIMED_BY if facts.get(key) != others.get(key)]
        if [gpu.name for gpu in nodes[0].host.gpus] != [gpu.name for gpu in node.host.gpus]:
            unlike.append("gpus")
        if unlike:
            yield DifferentHosts(node=node.name, first=nodes[0].name, unlike=tuple(unlike))
            break
    machines = [node.machine for node in nodes]
    if shared := tuple(node.name for node in nodes if machines.count(node.machine) > 1):
        yield OneMachine(nodes=shared)
