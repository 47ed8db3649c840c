"""What labels, notes and reasons say, and that each kind has words."""

import json
from typing import get_args

import pytest
from pydantic import TypeAdapter, ValidationError

from samebits.errors import UserError
from samebits.files import first_fault
from samebits.params import parse_params
from samebits.records.run import read_run
from samebits.records.statistics import NARROW
from samebits.remarks import (
    BatchNorm,
    Fallback,
    IdleParameters,
    Label,
    Missing,
    Note,
    OneDevice,
    Prolonged,
    Reason,
    Resumed,
    Unrepeated,
)
from samebits.results.remarks import KINDS, LABELS, SpokenRemark, in_words, spoken
from samebits.strategies.placement import Devices
from samebits.training.placement import place
from samples import placed, run_files, run_record

MORE_THAN_ITS_SHARE = {"num_devices": 4, "oversubscribe": True}

RING = (
    "NCCL is held to its ring algorithm, so that the run can be repeated; where GPUs share an NVSwitch its own choice "
    "may be faster, with train.ddp.deterministic: false"
)


def test_every_remark_has_a_kind_of_its_own_and_every_label_says_what_it_means():
    assert len({*KINDS}) == len(KINDS)
    labels, *_ = get_args(Label)
    assert {one.model_fields["kind"].default for one in get_args(labels)} < {*LABELS}
    assert all(text.endswith(".") for text in LABELS.values())


@pytest.mark.parametrize(
    ("strategy", "train", "host", "said"),
    [
        ("dp", {}, {"gpus": 0}, ["no CUDA device is visible, so DataParallel ran the plain module on one device"]),
        ("dp", {}, {"gpus": 1}, ["one GPU is used, so DataParallel ran the plain module on one device"]),
        ("ddp", {}, {"gpus": 1}, ["ddp ran with a world size of 1: one process, nothing to reduce"]),
        ("ddp", MORE_THAN_ITS_SHARE, {"gpus": 0, "cores": 2}, ["4 workers share 2 CPU cores"]),
        ("dp", MORE_THAN_ITS_SHARE, {"gpus": 1}, ["4 workers share 1 GPU"]),
        ("dp", {"num_devices": 5}, {"gpus": 5},
         ["DataParallel cuts 8 samples into 4 chunks, so 1 of 5 devices get none"]),
        ("dp", {}, {"gpus": 3}, ["2 of 3 devices, the most that divide 8 samples equally"]),
        ("ddp", {}, {"gpus": 16, "numerics": "exact"},
         ["8 of 16 devices, at most one for each of the 8 shards of exact.shards"]),
        ("ddp", {}, {"gpus": 3}, ["2 of 3 devices, the most that divide 8 samples equally", RING]),
        ("ddp", {"ddp": {"deterministic": False}}, {"gpus": 2},
         ["NCCL chose its algorithm, so a repeat may give other bits"]),
    ],
)  # fmt: skip
def test_what_a_placement_says(strategy, train, host, said):
    train = {"global_batch_size": 8, "strategies": [strategy], **train}
    placement, _ = placed(strategy, parse_params({"data": {"num_samples": 8}, "train": train}), **host)
    assert [remark.sentence() for remark in (*placement.labels, *placement.notes)] == said


def test_what_a_placement_over_machines_says():
    shared = parse_params({"train": {"global_batch_size": 24, "num_devices": 4, "oversubscribe": True}})
    two, four = (
        Devices(gpus=0, cores=cores, wanted=4, name=name, machine=name) for cores, name in ((2, "one"), (4, "two"))
    )
    placement, _ = place("ddp", shared, "fast", two, four)
    assert [label.sentence() for label in placement.labels] == ["4 workers share 2 CPU cores of one"]
    machines = [Devices(gpus=3, cores=8, name=name, machine=name) for name in ("one", "two")]
    placement, _ = place("ddp", parse_params({"train": {"global_batch_size": 64}}), "fast", *machines)
    assert [note.sentence() for note in placement.notes][:1] == ["4 of 6 devices, as 64 samples are shared out equally"]


BATCH_NORM = (
    "BatchNorm: each of 2 devices normalises by its own part of the batch, and the running statistics of the first are "
    "kept, so the model differs from single; GroupNorm does not have this"
)


@pytest.mark.parametrize(
    ("remark", "said"),
    [
        (BatchNorm(devices=2, strategy="dp"), BATCH_NORM),
        (IdleParameters(names=tuple("abcde")),
         "no gradient reaches a, b, c and 2 more: ranks, as those of ddp, would wait for it, and under dp weight decay "
         "changes it"),
        (Resumed(steps=(3, 7)),
         "the training was stopped and continued after step 3, 7; its times are of all parts"),
        (Resumed(steps=(3,), elsewhere=True),
         "the training was stopped and continued after step 3; its times are of all parts, some of which had another "
         "strategy or other devices"),
        (Unrepeated(),
         "slices were timed once, so the interval does not hold how far such measurements differ; raise train.repeats "
         "or train.prolong_s"),
        (Prolonged(count=5, planned=2, known=True, prolonged_seconds=6.04),
         "slices were timed 5 times in place of 2, until the speed-up was known within 5% (6.0 s more)"),
        (Prolonged(count=5, planned=2, known=False, prolonged_seconds=6.04),
         "slices were timed 5 times in place of 2, as often as allowed, and the speed-up is not known within 5% (6.0 s "
         "more)"),
        (OneDevice(), "one device was used"),
        (Missing(kind="no_memory"), "the references do not fit on one device beside the training"),
        (Missing(kind="no_memory_left"), "memory ran out in the slices after the training"),
        (Missing(kind="one_pair"),
         "one pair of times tells no interval, and train.repeats and train.prolong_s allow no more"),
    ],
)  # fmt: skip
def test_what_a_remark_says(remark, said):
    assert f"{NARROW:.0%}" == "5%"
    assert remark.sentence() == type(remark).model_validate_json(remark.model_dump_json()).sentence() == said
    assert in_words(remark).text == said
    assert spoken(remark.kind) == remark.kind.replace("_", " ")


@pytest.mark.parametrize(
    ("kind", "remark", "fault"),
    [
        (Label, {"kind": "fallback", "gpus": 0, "text": "words"}, "fallback.text: Extra inputs are not permitted"),
        (Label, {"kind": "fallback"}, "fallback.gpus: Field required"),
        (Label, {"kind": "ring"}, "tag 'ring' found using 'kind' does not match any of the expected tags: 'fallback'"),
        (Note, {"kind": "prolonged", "planned": 2, "count": 5, "prolonged_seconds": 6.0, "known": "x"},
         "prolonged.known: Input should be a valid boolean"),
        (Note, {"kind": "resumed", "steps": ["after"]}, "resumed.steps.0: Input should be a valid integer"),
        (Reason, {"kind": "because"}, "tag 'because' found using 'kind'"),
        (Reason, {}, "Unable to extract tag using discriminator 'kind'"),
    ],
)  # fmt: skip
def test_a_remark_whose_figures_were_damaged_is_refused(kind, remark, fault):
    with pytest.raises(ValidationError) as refused:
        TypeAdapter(kind).validate_python(remark)
    assert fault in first_fault(refused.value)


def test_a_record_whose_label_was_damaged_is_named(tmp_path):
    label = Fallback(gpus=0)
    record = run_record("dp", placement=placed("dp", gpus=0)[0].model_copy(update={"labels": (label,)}))
    run_files(tmp_path, record)
    raw = json.loads((tmp_path / "run.json").read_text())
    del raw["placement"]["labels"][0]["gpus"]
    (tmp_path / "run.json").write_text(json.dumps(raw))
    with pytest.raises(UserError, match=r"run\.json: placement\.labels\.0\.fallback\.gpus: Field required\. hint: run"):
        read_run(tmp_path)


def test_a_remark_of_an_unknown_kind_is_refused_in_words_too():
    with pytest.raises(ValidationError, match="kind"):
        SpokenRemark(kind="because", text="it is")
