"""The trainings of a scaling curve, their points, and the text and plot of a curve."""

import re
from dataclasses import replace

import pytest
from click.testing import CliRunner
from matplotlib.figure import Figure

from conftest import small
from samebits.cli.commands import main
from samebits.errors import HostError, UserError
from samebits.params import parse_params, write_params
from samebits.records.breakdown import Breakdown, Bucket, Traffic
from samebits.records.run import read_run
from samebits.remarks import Missing, Oversubscribed
from samebits.results.scaling import measure
from samebits.results.scaling.assemble import assemble
from samebits.results.scaling.curve import Scaling
from samebits.results.scaling.measure import PlannedTraining
from samebits.results.scaling.model import Coefficients, Step, costs
from samebits.results.scaling.network import parse_network
from samebits.results.scaling.plot import draw, draw_scaling
from samebits.results.scaling.words import lines_of
from samples import placed, run_files, run_record

BATCH = 64
PARAMS = parse_params(small(num_devices=2, repeats=5))
BY = Coefficients(fixed=1e-3, per_row=1e-4, contention_per_row=1e-5, per_byte=2e-5, latency=5e-4)
"""A model of 4 parameters sends 16 bytes."""


def say(scaling, width=100):
    return "\n".join(line.plain for line in lines_of(scaling, width))


@pytest.fixture
def cores(monkeypatch):
    def have(count, gpus=0):
        monkeypatch.setattr(measure, "count_cores", lambda: count)
        monkeypatch.setattr(measure, "count_gpus", lambda: gpus)

    return have


@pytest.mark.parametrize(("text", "numbers"), [("1", (1,)), ("1,2,4", (1, 2, 4)), (" 4, 2 ,2", (2, 4)), ("64", (64,))])
def test_numbers_of_devices_are_read(text, numbers):
    assert measure.parse_counts("--devices", text) == numbers


@pytest.mark.parametrize("text", ["", "0", "2,", "2;4", "-2", "two", "1.5", "²", "9" * 5000])
def test_numbers_of_devices_that_are_none_are_refused(text):
    with pytest.raises(UserError, match=r"--project: got .*, expected numbers from 1 with commas\. hint: such as"):
        measure.parse_counts("--project", text)


@pytest.mark.parametrize(
    ("count", "devices", "projected"),
    [(2, (1, 2), (4, 8, 16)), (7, (1, 2, 4), (8, 16, 32)), (100, (1, 2, 4, 8, 16, 32, 64), ())],
)
def test_what_is_measured_and_projected_unless_it_is_said(count, devices, projected, cores):
    cores(count)
    assert measure.default_devices(PARAMS) == devices
    assert measure.default_projections(PARAMS, devices) == projected


@pytest.mark.parametrize(
    ("count", "batch", "error", "message"),
    [
        (1, 64, HostError, "this host has 1 CPU core, expected 2 devices or more to scale over. hint: train.oversub"),
        (4, 63, UserError, "the 63 samples of a micro-batch divide by none of 2, 4, ... up to 4 devices. hint: change"),
    ],
)
def test_what_nothing_can_be_scaled_over_is_said(count, batch, error, message, cores):
    cores(count)
    params = PARAMS.model_copy(update={"train": PARAMS.train.model_copy(update={"global_batch_size": batch})})
    with pytest.raises(error) as caught:
        measure.default_devices(params)
    assert str(caught.value).startswith(message)


def test_gpus_come_before_cores(cores):
    cores(2, gpus=4)
    assert measure.default_devices(PARAMS) == (1, 2, 4)
    with pytest.raises(HostError, match=r"--devices: got 8, this host has 4 GPUs\. hint: "):
        measure.plan(PARAMS, (1, 8), ())


def test_the_trainings_of_a_curve(cores):
    cores(4)
    found, notes = measure.plan(PARAMS, (1, 2, 4), (8, 16))
    assert found == [
        PlannedTraining("strong", 2, 32),
        PlannedTraining("strong", 4, 16),
        PlannedTraining("weak", 2, 64),
        PlannedTraining("weak", 4, 64),
        PlannedTraining("few", 2, 4),  # as on 16 devices
    ]
    assert notes == []
    assert [one.kind for one in measure.plan(PARAMS, (1, 2), ())[0]] == ["strong", "weak"]


def test_rows_of_a_projection_come_in_whole_micro_batches(cores):
    cores(2)
    params = parse_params(small(grad_accum_steps=4, repeats=5))
    assert measure.plan(params, (2,), (5,))[0][-1] == PlannedTraining("few", 2, 4 * 3)


@pytest.mark.parametrize(
    "data", [{"task": "file", "kwargs": {"inputs": "x.npy", "targets": "y.npy"}}, {"task": "dataset"}]
)
def test_a_users_data_are_not_enough_for_each_weak_training(data, cores):
    cores(16)
    raw = {**small(), "data": {**data, "num_samples": 512}, "model": {"name": "mine:make"}}
    found, notes = measure.plan(parse_params(raw), (8, 16), ())
    assert [one.name for one in found] == ["strong-8", "strong-16", "weak-8"]
    assert notes == ["weak scaling on 16 devices was left out: its batch has 1024 samples, more than data"]


@pytest.mark.parametrize(
    ("devices", "projected", "error", "message"),
    [
        ((1,), (4,), UserError, "--devices: got 1 alone, expected more than one number. hint: such as --devices 1,2"),
        ((1, 4), (8,), HostError, "--devices: got 4, this host has 3 CPU cores. hint: --project says what more"),
        ((1, 2), (65,), UserError, "--project: got 65 devices for 64 samples of a micro-batch. hint: raise"),
        ((3,), (), UserError, "--devices: got 3, expected a divisor of the 64 samples"),
    ],
)
def test_what_cannot_be_trained_is_refused_first(devices, projected, error, message, cores):
    cores(3)
    with pytest.raises(error) as caught:
        measure.plan(PARAMS, devices, projected)
    assert str(caught.value).startswith(message)


# -- points out of records -------------------------------------------------------------------------------------


def run_of(folder, kind, devices, *, speed=1.0, oversubscribed=False, by=BY, problem=None):
    """A training and its run, whose slices take the cost model's time, on a host that is ``speed`` times as fast."""
    rows = {"strong": BATCH // devices, "weak": BATCH, "few": 2}[kind]
    training = PlannedTraining(kind, devices, rows)
    shared = Step(devices=devices, rows=rows, sharing=devices)
    steps = {
        "single": Step(devices=1, rows=devices * rows),
        "share": Step(devices=1, rows=rows),
        "together": shared,
        "strategy": shared.model_copy(update={"bytes": 16}),
    }
    if oversubscribed or problem:
        steps = {"strategy": steps["strategy"]}
    seconds = {name: costs(by, step).seconds / speed for name, step in steps.items()}
    lengths = (4, 2)
    chunks = {name: [[one * length for length in lengths]] * 2 for name, one in seconds.items()}
    placement = placed("ddp", parse_params(small(num_devices=devices, oversubscribe=True)), gpus=0, cores=8)[0]
    labels = (Oversubscribed(workers=4, devices=2, device="CPU core"),) if oversubscribed else ()
    record = run_record(
        "ddp",
        params=PARAMS,
        placement=placement.model_copy(update={"labels": labels}),
        speedup_unavailable=problem,
        measurement={"step_ms": [1.0, 1.0], "slice_steps": 6, "chunk_steps": 4, "chunk_seconds": chunks},
    )
    run_files(folder / training.name, record)
    return training, read_run(folder / training.name)


def pairs_of(folder, *devices, **changes):
    return [run_of(folder, kind, n, **changes) for n in devices for kind in ("strong", "weak")]


def curve(pairs, **changes):
    return assemble(PARAMS, pairs, **{"projected": (8, 16), "network": None, "per_host": 4, **changes})


def test_the_points_of_a_training(tmp_path):
    found = measure.points_of([run_of(tmp_path, "strong", 2), run_of(tmp_path, "weak", 2)], BATCH)
    steps = [(one.devices, one.rows, one.bytes, one.sharing) for one in found.points]
    strong = [(1, 32, 0, 1), (2, 32, 0, 2), (2, 32, 16, 2), (1, 64, 0, 1)]
    weak = [(1, 64, 0, 1), (2, 64, 0, 2), (2, 64, 16, 2)]  # a device alone with 128 samples is none of a projection's
    assert sorted(steps) == sorted(strong + weak)
    assert all(one.seconds == pytest.approx(costs(BY, one).seconds) for one in found.points)
    assert [(name, one.rows) for name, one in found.trainings] == [("strong", 32), ("weak", 64)]
    one, two = [one for one in found.measured if one.scaling == "weak"]
    assert (one.devices, one.speedup.median) == (1, 1.0)
    gain = 2 * costs(BY, Step(devices=1, rows=64)).seconds / costs(BY, found.trainings[1][1]).seconds
    assert two.speedup.median == pytest.approx(gain)
    assert two.step_ms.median == pytest.approx(1e3 * costs(BY, found.trainings[1][1]).seconds)
    assert found.notes == []


def test_the_drift_of_a_host_is_taken_out_and_said(tmp_path):
    pairs = [run_of(tmp_path, "strong", 2), run_of(tmp_path, "weak", 2, speed=0.5), run_of(tmp_path, "strong", 4)]
    found = measure.points_of(pairs, BATCH)
    assert all(one.seconds == pytest.approx(costs(BY, one).seconds) for one in found.points)
    assert found.notes == ["the host's speed drifted between trainings by a factor of 2.00"]


def test_workers_that_share_a_device_are_shown_and_count_for_nothing(tmp_path):
    pairs = [*pairs_of(tmp_path, 2), *pairs_of(tmp_path, 4, oversubscribed=True)]
    found = curve(pairs, per_host=2)
    assert {one.devices for one in found.points} == {1, 2}
    shown = [one for one in found.measured if one.devices == 4]
    assert [(one.counts, one.speedup, one.label) for one in shown] == [
        (False, None, "oversubscribed: 4 workers share 2 CPU cores")
    ] * 2
    assert found.held_out == ()
    lines = say(found).splitlines()
    why = [number for number, line in enumerate(lines) if line == "  oversubscribed: 4 workers share 2 CPU cores"]
    assert [lines[number - 1][:9] for number in why] == ["4 devices"] * 2
    assert "█" not in lines[why[0] - 1]


def test_nothing_is_projected_from_workers_that_share_a_device_alone(tmp_path):
    found = curve(pairs_of(tmp_path, 2, oversubscribed=True), per_host=1)
    assert (found.fit, found.projections, found.points) == (None, (), ())
    said = say(found)
    assert "note: no training counts that timed one device beside several, so nothing is projected" in said
    assert "What do more buy?       –       no training counts that shared a batch out\n" in said
    assert "And still more?         –       nothing is projected for a batch that is shared out: see" in said
    assert "How far to trust it?" not in said
    draw(found, tmp_path)


def test_nothing_is_projected_where_no_device_was_timed_alone(tmp_path):
    problem = {"kind": "no_memory_left"}
    found = curve(pairs_of(tmp_path, 2, problem=problem))
    assert (found.fit, found.projections, len(found.points)) == (None, (), 2)
    assert found.notes[0] == "strong, 2 devices: memory ran out in the slices after the training"


def test_a_training_without_its_references_is_said(tmp_path):
    problem = Missing(kind="no_memory")
    found = curve([run_of(tmp_path, "strong", 2), run_of(tmp_path, "weak", 2, problem=problem)])
    assert f"weak, 2 devices: {problem.sentence()}" in found.notes
    assert [one.speedup for one in found.measured if one.scaling == "weak" and one.devices == 2] == [None]
    assert len([one for one in found.points if one.rows == BATCH and one.bytes]) == 1  # its own time counts


def test_nothing_is_projected_by_a_fit_that_misses_the_points(tmp_path):
    found = curve([*pairs_of(tmp_path, 2), run_of(tmp_path, "few", 2, speed=0.02)])
    assert found.projections == ()
    assert re.fullmatch(r"the fit misses the points by \d+%, so nothing is projected: measure when .*", found.notes[-1])
    assert re.search(r"How far to trust it\? +not far +the fit misses the points by \d+%; see the notes", say(found))


def test_the_command_trains_each_and_writes_the_curve(tmp_path, monkeypatch, cores):
    def train_in(scratch, params, name, *arguments):
        asked.append((name, params.train.global_batch_size, params.train.epochs, *arguments[-3:]))
        run_of(scratch, name.partition("-")[0], arguments[-3])
        return scratch / name

    asked = []
    cores(2)
    monkeypatch.chdir(tmp_path)
    write_params(PARAMS, tmp_path / "params.yaml")
    monkeypatch.setattr(measure, "prepare_in", lambda scratch, params: asked.append(params.data.num_samples))
    monkeypatch.setattr(measure, "train_in", train_in)
    done = CliRunner().invoke(main, ["scale", "--devices", "1,2", "--steps", "40"])
    few = ("few-2", 8, 1, 2, "--steps", 40)
    assert asked == [512, ("strong-2", 64, 5, 2, "--steps", 40), ("weak-2", 128, 10, 2, "--steps", 40), few], done
    assert "1 of 3: 2 devices with 32 samples each, median step 3 ms\n" in done.stderr
    assert done.stderr.endswith("reports/scaling.json and reports/plots/scaling.png\n")
    written = Scaling.read(tmp_path / "reports/scaling.json", made_by="")
    assert done.stdout == f"{say(written)}\n"
    assert (tmp_path / "reports/plots/scaling.png").exists()


def test_a_curve_finds_what_was_planted(tmp_path):
    found = curve([*pairs_of(tmp_path, 2, 4), run_of(tmp_path, "few", 2)])
    assert found.fit.coefficients.model_dump() == pytest.approx(BY.model_dump(), rel=1e-6, abs=1e-12)
    assert found.fit.points == len(found.points) == 2 * 7 + 4
    assert [(one.devices, one.scaling) for one in found.held_out] == [
        (devices, scaling) for devices in (2, 4) for scaling in ("strong", "weak")
    ]
    # A fit of one number of devices does not tell latency from bandwidth, and its range says so.
    assert all(one.predicted_ms.low < one.measured_ms < one.predicted_ms.high for one in found.held_out)
    beyond = Step(devices=16, rows=4, bytes=16, sharing=4)
    projected = next(one for one in found.projections if (one.devices, one.scaling) == (16, "strong"))
    assert projected.step_ms.median == pytest.approx(1e3 * costs(BY, beyond).seconds)
    assert found.notes == (
        "beyond the 4 of this host, projections are of several hosts like it, joined by links as fast as those inside: "
        "--network says what is between hosts",
    )


def test_two_devices_alone_do_not_tell_latency_from_bandwidth(tmp_path):
    found = curve(pairs_of(tmp_path, 2), network=parse_network("1Gb/s,1us"))
    assert "steps whose range spans a factor of more than 4 are not projected" in found.notes
    note = found.notes[-1]
    assert note.startswith("the points do not tell latency from bandwidth")
    assert "How far to trust it?    ?       untested here: that takes two numbers of devices above 1\n" in say(found)


def test_what_costs_nothing_is_not_called_unknown(tmp_path):
    """If messages take no time, or gradients none at all, nothing more has to be measured."""
    for free in ({"latency": 0.0}, {"latency": 0.0, "per_byte": 0.0}):
        by = BY.model_copy(update=free)
        found = curve(pairs_of(tmp_path, 2, 4, by=by), network=parse_network("1Gb/s,1us"))
        assert found.notes == (), free


def test_what_was_measured_is_not_projected_too(tmp_path):
    found = curve(pairs_of(tmp_path, 2, 4), projected=(1, 2, 3, 4, 8), network=parse_network("1Gb/s,1us"))
    assert {one.devices for one in found.projections} == {3, 8}


def test_what_is_sent_is_what_was_traced(tmp_path):
    _, run = run_of(tmp_path, "strong", 2)
    assert measure.gradients_of(run).bytes == 4 * run.record.model_parameters
    bucket = Bucket(size_bytes=8, ready_ms=1.0, done_ms=2.0)
    traffic = Traffic(buckets=(bucket, bucket), gradient_bytes=16, buffer_bytes=0)
    divided = Breakdown.model_construct(traffic=traffic)
    traced = replace(run, record=run.record.model_copy(update={"breakdown": divided}))
    assert measure.gradients_of(traced) == Step(devices=1, rows=0, bytes=16, messages=2)


def test_a_curve_is_made_of_one_training(tmp_path):
    """All that is left on two devices, where a user's data are too few for weak scaling."""
    found = curve([run_of(tmp_path, "strong", 2)])
    assert {(one.scaling, one.devices) for one in found.measured} == {("strong", 1), ("weak", 1), ("strong", 2)}


def test_weak_scaling_is_known_where_one_device_has_no_room_for_the_whole_batch(tmp_path):
    training, run = run_of(tmp_path, "weak", 2)
    chunks = {name: of for name, of in run.record.measurement.chunk_seconds.items() if name != "single"}
    measurement = run.record.measurement.model_copy(update={"chunk_seconds": chunks})
    changed = {"measurement": measurement, "speedup_unavailable": Missing(kind="no_memory")}
    without = replace(run, record=run.record.model_copy(update=changed))
    found = measure.points_of([run_of(tmp_path, "strong", 2), (training, without)], BATCH)
    assert found.notes == []
    assert [one.speedup is None for one in found.measured if one.scaling == "weak"] == [False, False]


def test_nothing_is_projected_where_more_devices_do_less(tmp_path):
    crowded = BY.model_copy(update={"contention_per_row": 2 * BY.per_row, "per_byte": 0.0, "latency": 0.0})
    found = curve(pairs_of(tmp_path, 2, by=crowded), projected=(4, 8), per_host=2)
    (weak,) = [one for one in found.measured if one.scaling == "weak" and one.devices == 2]
    assert weak.speedup.high < 1
    assert not [one for one in found.projections if one.scaling == "weak"]
    (note,) = [note for note in found.notes if note.startswith("weak scaling: the 2 devices")]
    assert f"({weak.speedup.median:.2f}x)" in note
    assert "no more of them are projected" in note


def test_a_projection_is_no_faster_than_fewer_devices_were(tmp_path):
    """Time that the fit does not explain, here half of a step, is no gain of more devices."""
    pairs = pairs_of(tmp_path, 2, 4)
    (slow,) = [run for training, run in pairs if training.name == "weak-4"]
    chunks = slow.record.measurement.chunk_seconds
    chunks["strategy"] = [[2 * one for one in repeat] for repeat in chunks["strategy"]]
    found = curve(pairs, projected=(8,))
    (measured,) = [one for one in found.measured if (one.scaling, one.devices) == ("weak", 4)]
    (projected,) = [one for one in found.projections if one.scaling == "weak"]
    assert measured.speedup.high > 1
    assert projected.step_ms.median >= measured.step_ms.median
    assert projected.step_ms.low <= projected.step_ms.median <= projected.step_ms.high


def test_every_projection_is_called_one(tmp_path):
    found = curve(pairs_of(tmp_path, 2, 4), network=parse_network("1Gb/s,1us"))
    assert {one.kind for one in found.projections} == {"projection"}
    lines = say(found).splitlines()
    for devices, beyond in ((1, False), (2, False), (4, False), (8, True), (16, True)):
        shown = [line for line in lines if line.split()[:1] == [str(devices)]]
        assert [line.partition("  ")[0].endswith(", projected") for line in shown] == [beyond] * 2
        assert [("░" in line, "█" in line) for line in shown] == [(beyond, not beyond)] * 2
    assert re.search(r"And still more\? +\S+× +16 CPU devices over 1Gb/s,1us, projected; range ", "\n".join(lines))
    axes = Figure().add_subplot()
    draw_scaling(found, axes)
    looks = {line.get_label(): line.get_linestyle() for line in axes.get_lines()}
    for name in ("strong", "weak"):
        assert looks[f"{name}, projection"] == "--"
    measured = [container.get_label() for container in axes.containers]
    assert measured == ["strong, measured", "weak, measured"]
    for name, container in zip(("strong", "weak"), axes.containers, strict=True):
        (bars,) = (lines.get_segments() for lines in container.lines[2])
        gains = [one.speedup for one in found.measured if one.scaling == name]
        assert [tuple(bar[:, 1]) for bar in bars] == [pytest.approx((one.low, one.high)) for one in gains]
    assert "over 1Gb/s,1us" in axes.get_title(loc="left")


@pytest.mark.parametrize("width", [80, 100])
def test_a_curve_fits_its_width_and_begins_with_the_answers(width, tmp_path):
    lines = say(curve(pairs_of(tmp_path, 2, 4)), width).splitlines()
    assert max(map(len, lines)) <= width
    assert {len(line) for line in lines if line.startswith(("1 device ", "2 devices "))} == {width}
    assert [line[:20].rstrip() for line in lines if "?  " in line] == [
        "What do more buy?", "And still more?", "How far to trust it?",
    ]  # fmt: skip
    one, two = (
        next(line for line in lines if line.startswith(name)).count("█") for name in ("1 device ", "2 devices ")
    )
    assert one < two < 2 * one + 2


def test_a_curve_is_written_and_drawn_alike(tmp_path):
    found = curve(pairs_of(tmp_path, 2, 4))
    found.write(tmp_path / "scaling.json")
    again = Scaling.read(tmp_path / "scaling.json", made_by="samebits scale")
    assert again == found
    texts = []
    for folder in ("a", "b"):
        assert draw(found, tmp_path / folder).exists()
        texts.append((tmp_path / folder / "scaling.svg").read_text())
    assert texts[0] == texts[1]
    assert "strong, projection" in texts[0]
