"""The comparison as data and as a table."""

import json
import os
import re
from contextlib import nullcontext
from pathlib import Path

import pytest
from click.testing import CliRunner
from hypothesis import example, given, settings

from generated import changed, refusal
from samebits.cli.commands import main
from samebits.errors import UserError, printable_lines
from samebits.files import write_json, write_text
from samebits.params import parse_params
from samebits.records.breakdown import Phases
from samebits.records.measurement import Measurement, Repeats
from samebits.records.run import Node, Run, read_losses, read_run
from samebits.remarks import NOT_APPLIED, AnyOrder, Fallback, Missing, OneDevice, Oversubscribed, Resumed
from samebits.results.comparison import Comparison, compare
from samebits.results.curves import MAX_POINTS, curve
from samebits.results.page.render import render
from samebits.results.remarks import SpokenRemark, all_notes
from samebits.results.sameness import is_it_the_same
from samebits.results.table import HEADINGS, cells, markdown
from samebits.results.terminal import show
from samebits.results.text import (
    describe_row,
    describe_run,
    figures_in_words,
    notes_of,
    remarks,
    row_remarks,
    say_price,
    say_speed,
)
from samples import comparison as sample
from samples import device_usage, evaluation, host, memory, placed, ratio, row, run_files, run_record, timing, verdict

TRAIN = {"global_batch_size": 64, "epochs": 1, "numerics": ["fast"]}
PARAMS = parse_params({"data": {"num_samples": 128}, "train": TRAIN})  # 2 steps
GIT = sample().git
RESUMED = Resumed(steps=(1,))


def write_stage_files(folder, strategy, *, losses=(2.0, 1.5), weight=1.0, labels=(), devices=1, **changes):
    """Write the files of stages train and evaluate for one run."""
    placement, _ = placed("single", PARAMS, gpus=4)
    placement = placement.model_copy(
        update={"strategy": strategy, "num_devices": devices, "devices_used": devices, "labels": tuple(labels)}
    )
    repeats, seconds = changes.pop("repeats", None), changes.pop("chunk_seconds", {})
    timings = {name: changes.pop(name) for name in [*type(timing()).model_fields] if name in changes}
    record = run_record(
        strategy,
        **{"placement": placement, "params": PARAMS, "weights_sha256": f"{strategy}-hash-0123456789", **changes},
    )
    if timings.get("speedup"):  # a step takes 40 ms on one device
        ratios = {"strategy": timings["speedup"].median, "single": 1.0, "share": timings["bound"].median}
        seconds = {name: ((0.1 / ratio, 0.3 / ratio),) for name, ratio in ratios.items()}
    measurement = Measurement(step_ms=(1.0, 2.0), slice_steps=10, chunk_steps=5, chunk_seconds=seconds, repeats=repeats)
    record = record.model_copy(update={"measurement": measurement})
    run_files(folder / "runs" / record.name, record, losses=losses, weight=weight, **timings)
    evaluation(weights_sha256=record.weights_sha256).write(folder / f"reports/evaluation/{record.name}.json")


def compare_in(folder, params=PARAMS):
    return compare(params, GIT, folder=folder)


@pytest.fixture
def compared(tmp_path):
    def make(**dp):
        write_json(tmp_path / "host.json", host(gpus=4).model_dump(mode="json"))
        write_stage_files(tmp_path, "single")
        write_stage_files(tmp_path, "dp", **{"devices": 4, "speedup": ratio(1.3, 1.2, 1.4), "bound": ratio(3.6), **dp})
        write_stage_files(
            tmp_path, "ddp", devices=4, speedup=ratio(3.2, 3.1, 3.3), bound=ratio(3.6), losses=(2.0, 1.50001)
        )
        return compare_in(tmp_path)

    return make


def test_rows_stand_in_the_order_of_the_params(compared):
    comparison = compared()
    assert [row.strategy for row in comparison.rows] == ["single", "dp", "ddp"]
    single, dp, ddp = comparison.rows
    assert single.speedup == ratio(1.0)
    assert (dp.scaling_efficiency, ddp.scaling_efficiency) == (pytest.approx(0.325), pytest.approx(0.8))
    assert dp.scaling_efficiency_interval == pytest.approx((0.3, 0.35))
    assert single.scaling_efficiency_interval == (1.0, 1.0)


def test_a_comparison_is_read_as_it_was_written(compared, tmp_path):
    comparison = compared()
    comparison.write(tmp_path / "comparison.json")
    assert json.loads((tmp_path / "comparison.json").read_text())["schema"] == 9
    assert Comparison.read(tmp_path / "comparison.json", made_by="") == comparison


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda whole: whole.update(rows=[]), r"rows: Tuple should have at least 1 item"),
        (lambda whole: whole["rows"][0]["curve"]["loss"].pop(), r"rows\.0\.curve: .* should have as many points"),
        (
            lambda whole: whole["rows"][0]["curve"].update(step=[], seconds=[], loss=[]),
            r"rows\.0\.curve: .* one at lea",
        ),
        (
            lambda whole: whole["rows"][0]["step_ms_percentiles"].pop(),
            r"rows\.0\.step_ms_percentiles: Tuple should have at lea",
        ),
    ],
)
def test_a_comparison_that_no_plot_can_show_is_refused(change, message, tmp_path):
    sample().write(tmp_path / "comparison.json")
    whole = json.loads((tmp_path / "comparison.json").read_text())
    change(whole)
    write_json(tmp_path / "comparison.json", whole)
    with pytest.raises(UserError, match=rf"comparison\.json: {message}"):
        Comparison.read(tmp_path / "comparison.json", made_by="")


def test_the_memory_of_a_run_is_that_of_its_row(compared):
    taken = memory({"weights": 5}, {"weights": 6})
    comparison = compared(memory=taken)
    assert [row.memory for row in comparison.rows] == [None, taken, None]


def test_runs_are_judged_against_the_first(compared):
    single, dp, ddp = compared().rows
    assert single.verdict is None
    assert (dp.verdict.against, dp.verdict.grade) == ("single-fast", "bitwise")
    assert ddp.verdict.grade == "within tolerance"
    assert ddp.verdict.losses.first_difference == 2
    assert ddp.verdict.weights.grade == "bitwise"


SLOWED, NETWORK = "is lost as devices slow each other down", "goes to the network and to waiting for other machines"


@pytest.mark.parametrize(
    ("steps", "devices_by_node", "parts"),
    [
        ({}, (), "50% (20 ms) goes to communication and waiting"),
        ({"together": 28.0}, (), f"20% (8 ms) {SLOWED} and 30% (12 ms) goes to communication and waiting"),
        ({"together": 19.0}, (), "52% (21 ms) goes to communication and waiting"),
        ({"together": 41.0}, (), f"52% (21 ms) {SLOWED}"),
        ({"together": 20.0}, (1, 1), f"50% (20 ms) {NETWORK}"),
        ({"together": 22.0, "node": 24.0}, (2, 2),
         f"5% (2 ms) {SLOWED}, 5% (2 ms) goes to communication and waiting inside machines and 40% (16 ms) {NETWORK}"),
    ],
)  # fmt: skip
def test_where_the_time_of_a_step_goes(steps, devices_by_node, parts):
    steps = {"strategy": 40.0, "single": 80.0, "share": 20.0, **steps}
    several = {"devices_by_node": devices_by_node, "devices_used": 4}
    said = say_speed(row("ddp", slice_step_ms=steps, speedup=ratio(2.0), bound=ratio(4.0), **several))
    assert said.endswith(f"which bounds the speed at 4.00 times. Of a step, {parts}.")


def test_curves_are_short_and_true():
    steps = MAX_POINTS * 2 + 1
    measurement = Measurement(step_ms=(500.0,) * steps, slice_steps=0, chunk_steps=0, chunk_seconds={})
    run = Run(None, run_record(measurement=measurement), timing(), [float(step) for step in range(steps)])
    short = curve(run)
    assert len(short.step) == steps // 3
    assert (short.step[:2], short.seconds[:2], short.loss[:2]) == ((3, 6), (1.5, 3.0), (1.0, 4.0))


@pytest.mark.parametrize(
    ("dp", "sentences"),
    [
        (
            {},
            [
                "**ddp on 4 GPUs: 3.20× the speed of one, and the same model** (",
                "- How much faster? 3.20×, ddp on 4 GPUs; 95% sure: 3.10 to 3.30\n",
                "- dp-fast on 4 GPUs ran at 1.30 times the speed of single (1.20 to 1.40), in slices that took turns: "
                "a step takes 30.8 ms, on one device 40 ms. Alone, without communication, a device needs 11.1 ms for "
                "its share, which bounds the speed at 3.60 times. Of a step, 64% (19.7 ms) goes to copies, "
                "communication and waiting.\n",
                "- Is it the same model? yes: fast: losses differ by 0.00067%, as rounding explains\n",
            ],
        ),
        ({"weight": -1.0}, ["- Is it the same model? no: fast: dp-fast left single-fast: weight differ by"]),
        (
            {"speedup": None, "bound": None, "speedup_unavailable": Missing(kind="one_repeat")},
            ["95% sure: 3.10 to 3.30; dp was not measured\n", "dp-fast has no speed-up: train.repeats is 1."],
        ),
        (
            {"labels": [OneDevice()], "speedup": None, "bound": None, "speedup_unavailable": OneDevice()},
            ["95% sure: 3.10 to 3.30\n", "dp-fast has no speed-up (one device): one device was used."],
        ),
        ({"speedup": ratio(3.65)}, ["which bounds the speed at 3.60 times."]),
    ],
)
def test_the_answers_and_figures_in_words(dp, sentences, compared):
    text = markdown(compared(**dp))
    assert [sentence for sentence in sentences if sentence not in text] == []


def test_exact_passes_with_the_same_bits_alone(tmp_path):
    write_json(tmp_path / "host.json", host().model_dump(mode="json"))
    params = parse_params({**PARAMS.model_dump(mode="json"), "train": {**TRAIN, "numerics": ["exact"]}})

    def said(**ddp):
        write_stage_files(tmp_path, "single", numerics="exact", price=ratio(3.7, 3.5, 3.9))
        write_stage_files(tmp_path, "dp", numerics="exact")
        write_stage_files(tmp_path, "ddp", numerics="exact", **ddp)
        compared = compare_in(tmp_path, params)
        return [is_it_the_same(compared).told["exact"], figures_in_words(compared)[-1]]

    took = "3.7 times the time of a fast step on one device, 95% sure: 3.5 to 3.9"
    price = f"A step in exact, with the same bits on any host, takes {took}."
    assert said() == ["every bit, under single, dp and ddp, on any host", price]
    assert said(losses=(2.0, 1.5000001))[0] == "ddp-exact left single-exact at step 2: losses differ by 0.0000067%"


@pytest.mark.parametrize(
    ("train", "seconds", "why"),
    [
        ({"repeats": 1}, {}, "train.repeats is 1"),
        (
            {"repeats": 2},
            {"strategy": ((3.0, 3.0),), "fast": ((1.0, 1.0),)},
            "one pair of times tells no interval, and train.repeats and train.prolong_s allow",
        ),
        ({"repeats": 2}, {}, "it was not measured"),
    ],
)
def test_why_exact_has_no_price_is_said(train, seconds, why, tmp_path):
    write_json(tmp_path / "host.json", host().model_dump(mode="json"))
    params = {
        **PARAMS.model_dump(mode="json"),
        "train": {**TRAIN, "numerics": ["exact"], "strategies": ["single"], **train},
    }
    params = parse_params(params)
    write_stage_files(tmp_path, "single", numerics="exact", params=params, price=None, chunk_seconds=seconds)
    (said,) = [line for line in remarks(compare_in(tmp_path, params)) if "price" in line]
    assert said.startswith(f"single-exact: no price of exact: {why}")


def repeats(count, half_width, stopped):
    return Repeats(planned=2, count=count, prolonged_seconds=9.5, half_width=half_width, stopped=stopped)


DIFFERED = "samples per second differed by {}% between repeats"
KNOWN = "after {} the speed-up is known within {}% only, and "
SHARED_GPU = {
    "samples": 1,
    "sampler_share": 0.0,
    "training": {"seconds": 1.0, "devices": [device_usage(0, shared=0.5)]},
}


@pytest.mark.parametrize(
    ("changes", "remark"),
    [
        ({"labels": [Oversubscribed(workers=2, devices=1, device="GPU")]}, "oversubscribed: 2 workers share 1 GPU"),
        ({"first_unrepeated_step": 7}, "not repeatable: a repeat on this host gave another loss at step 7"),
        ({"samples_per_sec_spread": ratio(100.0, 100.0, 116.0)}, f"noisy: {DIFFERED.format(16)}"),
        (
            {"repeats": repeats(7, 0.083, "limit")},
            f"noisy: {KNOWN.format('7 repeats', 8.3)}train.prolong_s allows no more",
        ),
        (
            {"repeats": repeats(1, 0.2, "off"), "samples_per_sec_spread": ratio(100.0, 80.0, 120.0)},
            f"noisy: {DIFFERED.format(50)}; {KNOWN.format('1 repeat', 20.0)}train.prolong_s is 0",
        ),
        ({"repeats": repeats(100, 0.053, "most")}, f"noisy: {KNOWN.format('100 repeats', 5.3)}there are never more"),
        ({"usage": SHARED_GPU}, "disturbed: another process was on GPU 0 too"),
        (
            {"initial_sha256": "other"},
            "different start: its first weights are not those of single-fast: the factory draws without a seed",
        ),
        ({"notes": [RESUMED]}, RESUMED.sentence()),
        (
            {"not_applied": {"train.compile": "dp_is_not_compiled"}},
            f"train.compile was not applied: {NOT_APPLIED['dp_is_not_compiled']}",
        ),
    ],
)
def test_what_a_reader_must_know_is_said(changes, remark, compared):
    comparison = compared(**changes)
    assert remarks(comparison) == [f"dp-fast: {remark}"]
    assert f"- dp-fast: {remark}" in markdown(comparison)


def test_how_exact_computed_is_a_note_where_it_took_longer():
    def said(**changes):
        arithmetic = {"steps_made_again": 0, "below_window": 0.0, "compiled_kernels": True, **changes}
        return [note.sentence() for note in all_notes(one(arithmetic))]

    def one(arithmetic):
        return Run(Path(), run_record("single", "exact", arithmetic=arithmetic), timing(), (2.0,))

    assert said() == []
    assert said(shards_apart="model.body (Body): it asks for a number")[0].endswith(
        "which takes longer than one pass: model.body (Body): it asks for a number"
    )
    assert said(compiled_kernels=False)[0].startswith("exact ran without compiled kernels")
    assert all_notes(one({"steps_made_again": 0, "below_window": 0.0})) == []  # an older one


def test_a_fallback_is_never_a_speed_up(compared):
    label = Fallback(gpus=1)
    why = {"speedup": None, "bound": None, "speedup_unavailable": label}
    row = compared(labels=[label], devices=1, **why).rows[1]
    assert (row.speedup, row.scaling_efficiency) == (None, None)
    assert dict(zip(HEADINGS, cells(row), strict=True))["speed-up"] == "–"
    assert row_remarks(row) == []  # the answers say it


def test_what_a_record_says_moves_no_cursor(compared, capsys):
    """The record may come from somebody else, by a shared store or cache."""
    text = "\x1b[2Kgone\u202e"
    changed = compared().model_copy(update={"rows": (row(notes=[SpokenRemark(kind="resumed", text=text)], run=text),)})
    show(changed, Path("reports"), verbose=True)
    assert "\\x1b[2Kgone\\u202e" in capsys.readouterr().out
    assert printable_lines(f"a\n{text}").isprintable() is False
    assert printable_lines(f"a\n{text}").split("\n") == ["a", "\\x1b[2Kgone\\u202e"]


def test_seconds_of_several_goes_are_called_that():
    """The seconds contain the start of each part. The speed-up comes from slices, which are all of the last part."""
    once = cells(row("ddp", training_seconds=1.5))
    again = cells(row("ddp", training_seconds=1.5, notes=[SpokenRemark(kind="resumed", text="went on at step 3")]))
    changed = {HEADINGS[i]: value for i, value in enumerate(again) if value != once[i]}
    assert changed == {"seconds": "1.50, in parts"}
    assert "0.0104" in cells(row("ddp", training_seconds=0.010432))


def test_the_table(compared):
    comparison = compared()
    lines = markdown(comparison).splitlines()
    assert lines[0].endswith(
        "(mlp on vectors, global batch 64, 2 steps, 4 × GPU, torch 2.13.0, commit c0ffee and changes)"
    )
    assert [line for line in lines if line.startswith("| run | devices | seconds | speed-up | bound |")]
    row = "| ddp-fast | 4 GPU | 3.00 | 3.20x (3.10–3.30) | 3.60x | 80% (78–82%) | 2.0000 | +5.0% | 25.0% | "
    assert f"{row}within tolerance | – | – | ddp-hash-012 |" in lines


OTHER_WEIGHTS = '{"schema": 1, "eval_loss": 1, "accuracy": null, "floor": null, "teacher_loss": null, \
"above_floor": null, "samples": 1, "weights_sha256": "other"}'


@pytest.mark.parametrize(
    ("file", "text", "message"),
    [
        ("runs/dp-fast/run.json", None, r"run\.json: no such file\. hint: run `python pipeline/train.py --strategy dp"),
        ("reports/evaluation/dp-fast.json", None, r"run `python pipeline/evaluate.py --folder .*` first"),
        ("reports/evaluation/dp-fast.json", OTHER_WEIGHTS, r"dp-fast\.json: speaks of other weights"),
        (
            "runs/dp-fast/run.json",
            "{}",
            r"run\.json: no schema, so it is foreign or older; this version reads schema 11",
        ),
        ("runs/dp-fast/timing.json", '{"schema": 2}', r"timing\.json: schema 2; this version reads schema 1"),
        ("runs/dp-fast/timing.json", '{"schema": 1}', r"timing\.json: training_seconds: Field required"),
        ("runs/dp-fast/run.json", "[1]", r"run\.json: no schema"),
        ("runs/dp-fast/losses.csv", "step\n1\n", r"losses\.csv: cannot be read"),
        ("runs/dp-fast/losses.csv", "step,loss\n1,2\n", r"losses\.csv: 1 steps, expected the 2 that run\.json has"),
        ("runs/dp-fast/losses.csv", "step,loss\n", r"losses\.csv: 0 steps, expected the 2 that run\.json has times of"),
        (
            "runs/dp-fast/losses.csv",
            "step,loss\n1,2\n2,nan\n",
            r"losses\.csv: the loss of step 2 is nan, expected a fin",
        ),
        ("runs/dp-fast/losses.csv", "step,loss\n1,inf\n2,1\n", r"losses\.csv: the loss of step 1 is inf, expected"),
        ("runs/dp-fast/losses.csv", "step,loss\n" + "9" * 200_000, r"losses\.csv: cannot be read: field larger than"),
        ("runs/dp-fast/losses.csv", os.mkfifo, r"losses\.csv: cannot be read: expected a regular file"),
        ("runs/dp-fast/run.json", os.mkfifo, r"run\.json: cannot be read: expected a regular file"),
        ("runs/dp-fast/model.safetensors", os.mkfifo, r"model\.safetensors: not a safetensors file: expected a regul"),
        ("host.json", "{", r"host\.json: cannot be read"),
        ("host.json", "{}", r"host\.json: cpu: Field required\. hint: run `python pipeline/host.py --folder .*` again"),
        ("host.json", "[]", r"host\.json: the file: Input should be "),
    ],
)
def test_what_is_missing_names_its_command(file, text, message, compared, tmp_path):
    compared()
    (tmp_path / file).unlink()
    if callable(text):
        text(tmp_path / file)
    elif text:
        (tmp_path / file).write_text(text)
    with pytest.raises(UserError, match=message):
        compare_in(tmp_path)


TURN = Phases(forward=6.0, backward=12.0).model_dump()
TWIN = {"perturbation": 1e-7, "steps": 2, "losses": [{"step": 1, "difference": 1e-7}], "weights": {"weight": 1e-7}}
DIVIDED = {
    "breakdown": {
        "steps": 4,
        "plain_ms": [18.0] * 3,
        "noted_ms": [18.0] * 3,
        "one_thread_ms": [17.0] * 3,
        "ranks": [{"noted": [TURN] * 3, "alone": [TURN] * 3, "threads": 2}] * 2,
        "bounds": {"copy_gb_per_s": 20.0, "optimizer_floor_ms": 0.1, "half_ms": [9.0] * 3},
        "cores": 2,
        "other_cores": 0.1,
    },
    "usage": {"samples": 128, "training": {"seconds": 1.0, "energy_j": 9.0}, "sampler_share": 0.01},
    "rounding": TWIN,
    "speedup": ratio(1.3, 1.2, 1.4),
    "bound": ratio(3.6),
}


def rewrite(file, *places, value):
    """Replace one value in a JSON file."""
    tree = part = json.loads(file.read_text())
    for key in places[:-1]:
        part = part[key]
    part[places[-1]] = value
    file.write_text(json.dumps(tree))


@pytest.mark.parametrize(
    ("file", "places", "value", "message"),
    [
        ("run", "measurement step_ms", [1.0], r"losses\.csv: 2 steps, expected the 1"),
        ("run", "measurement chunk_seconds share", [], r"measurement: .*of share: expected 1 repeats of 2 chunks each"),
        ("run", "measurement chunk_seconds share", [[]], r"of share: expected 1 repeat"),
        ("run", "measurement chunk_seconds share", [[1.0]], r"of share: expected 1 repeat"),
        ("run", "measurement slice_steps", 0, r"run\.json: measurement: .* without a step"),
        ("run", "measurement chunk_seconds", {"single": [[0.1, 0.3]]}, r"measurement: .* without the strategy's own"),
        ("run", "placement devices_used", 0, r"run\.json: placement\.devices_used: .* than 0"),
        ("run", "breakdown noted_ms", [18.0], r"breakdown: .*1 turns beside 3 of plain_ms"),
        ("run", "breakdown ranks 1 alone", [TURN], r"breakdown: .*1 turns beside 3"),
        ("run", "breakdown ranks 1 alone", [], r"breakdown: .*some ranks have turns alone"),
        ("run", "breakdown ranks 1 noted", [], r"breakdown: .*0 turns beside 3"),
        ("run", "breakdown bounds half_ms", [9.0], r"breakdown: .*1 turns beside 3"),
        ("run", "breakdown bounds half_ms", [], r"\.half_ms: .* at least 1"),
        ("run", "breakdown plain_ms", [0.0] * 3, r"breakdown\.plain_ms\.0: .* greater than 0"),
        ("run", "breakdown ranks", [], r"breakdown\.ranks: .* at least 1"),
        ("run", "rounding weights weight", 1e308, r"rounding\.weights\.weight: .* 2\.01"),
        ("run", "usage training energy_j", 1e308, r"runs/dp-fast: figures from which none .*: energy_j_per_million"),
        ("run", "breakdown ranks 0 alone", [{**TURN, "data": 1e308}] * 3, r"dp-fast: figures from .*: intermediate"),
        ("timing", "samples_per_sec_spread low", 0, r"timing\.json: samples_per_sec_spread"),
        ("timing", "step_time_ms", 0, r"timing\.json: step_time_ms: .* greater than 0"),
    ],
)
def test_figures_that_do_not_fit_each_other_are_refused(file, places, value, message, compared, tmp_path):
    compared(**DIVIDED)
    compare_in(tmp_path)
    keys = (int(key) if key.isdigit() else key for key in places.split())
    rewrite(tmp_path / f"runs/dp-fast/{file}.json", *keys, value=value)
    with pytest.raises(UserError, match=message):
        compare_in(tmp_path)


@pytest.mark.parametrize(
    ("file", "places", "value", "named"),
    [
        ("dp-fast/run.json", ("breakdown", "ranks", 0, "noted"), [dict.fromkeys(TURN, 1e308)] * 3, ("dp-fast",)),
        ("single-fast/timing.json", ("step_time_ms",), 5e-324, ("dp-fast", "single-fast")),
    ],
)
def test_an_explanation_is_made_or_refused(file, places, value, named, compared, tmp_path):
    compared(**DIVIDED)
    runs = tmp_path / "runs"
    asked = ["explain", str(runs / "dp-fast"), "--against", str(runs / "single-fast")]
    assert CliRunner().invoke(main, asked).exit_code == 0
    rewrite(runs / file, *places, value=value)
    refused = CliRunner().invoke(main, asked)
    folders = ", ".join(str(runs / name) for name in named)
    assert refused.exit_code == 2
    assert refused.stderr.startswith(f"error: {folders}: figures from which none can be computed: ")


RECORDS = ["runs/dp-fast/run.json", "runs/dp-fast/timing.json", "reports/evaluation/dp-fast.json"]


@pytest.mark.parametrize("file", RECORDS)
def test_whatever_a_record_says_its_row_is_made_or_refused(file, compared, tmp_path):
    """A reader of one record finds faults inside it. Figures that do not fit each other show when a row is made."""
    compared(**DIVIDED)
    path = tmp_path / file
    whole = json.loads(path.read_text())

    @given(changed(whole))
    @example(whole | {"placement": whole.get("placement", {}) | {"strategy": ""}})
    @settings(max_examples=200)
    def look(tree):
        path.write_text(json.dumps(tree), errors="surrogatepass")

        def read():
            markdown(compare_in(tmp_path))

        assert refusal(read).isprintable()

    look()


def test_runs_of_fewer_steps_are_not_compared_under_these_params(compared, tmp_path):
    compared()
    run = tmp_path / "runs/dp-fast"
    rewrite(run / "run.json", "measurement", "step_ms", value=[1.0])
    (run / "losses.csv").write_text("step,loss\n1,2\n")
    with pytest.raises(UserError, match=r"losses\.csv: 1 steps, expected the 2 of the params"):
        compare_in(tmp_path)


def test_losses_are_read_as_they_were_written(tmp_path):
    write_text(tmp_path / "losses.csv", "step,loss\n1,2.3025851\n2,1e-09\n")
    assert read_losses(tmp_path / "losses.csv") == [2.3025851, 1e-09]


OPEN, FASTER, SLOWER = ratio(1.02, 0.98, 1.05), ratio(1.5, 1.4, 1.6), ratio(0.7, 0.6, 0.8)
ONE_REPEAT = SpokenRemark(kind="one_repeat", text="train.repeats is 1")
FALLBACK = SpokenRemark(kind="fallback", text="one device")
SHARED = SpokenRemark(kind="oversubscribed", text="8 workers share 4 GPUs")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"seed": 7}, r"single-fast/run\.json: was made with seed 0, and the params say 7\. hint: train again"),
        ({"model": {"kwargs": {"hidden": [8]}}}, r"run\.json: was made with model\.kwargs\.hidden "),
        (
            {"train": {**TRAIN, "optimizer": {"lr": 7.0}}},
            r"was made with train\.optimizer\.lr 0\.\d+, and the params say 7\.0",
        ),
        ({"train": {**TRAIN, "checkpoint_every_steps": 3, "num_devices": 2}}, None),
        ({"tracking": {"experiment": "elsewhere"}}, None),
    ],
)
def test_runs_of_other_params_are_not_compared_under_these(changes, message, compared, tmp_path):
    compared()
    params = parse_params({"data": {"num_samples": 128}, "train": TRAIN, **changes})
    with pytest.raises(UserError, match=message) if message else nullcontext():
        compare_in(tmp_path, params)


def test_runs_of_other_data_are_not_compared(compared, tmp_path):
    compared()
    rewrite(tmp_path / "runs/ddp-fast/run.json", "data", "sha256", value="f" * 64)
    with pytest.raises(UserError, match=r"runs/ddp-fast/run\.json: trained on other data: SHA-256 f{12}, single-fast"):
        compare_in(tmp_path)


def rows_of(found):
    """Rows by strategy, each with its speed-up or with the reason for none."""
    for strategy, value in found.items():
        known = {"speedup_unavailable": value} if isinstance(value, SpokenRemark) else {"speedup": value}
        yield row(strategy, devices=1 if strategy == "single" else 2, **known)


def test_metrics_of_ones_own_have_columns_beside_the_accuracy():
    compared = sample(row(metrics={"top-2": 0.87654}), row("dp", metrics={"f1": 1e-9}))
    headings, _, first, second = (
        [cell.strip() for cell in line.split("|")[1:-1]] for line in markdown(compared).splitlines() if line[:1] == "|"
    )
    at = headings.index("accuracy")
    assert headings[at : at + 4] == ["accuracy", "top-2", "f1", "same model"]
    assert (first[at + 1 : at + 3], second[at + 1 : at + 3]) == (["0.8765", "–"], ["–", "1e-09"])
    assert re.search(r"<th[^>]*>\s*f1\s*</th>", render(compared, {}))


def test_a_share_that_takes_longer_than_the_whole_is_called_noise():
    """One device cannot need longer for its part than all need for the batch, and no bound is told from that."""
    steps = {"strategy": 380.0, "single": 175.0, "share": 574.0, "together": 182.0}
    said = say_speed(row("ddp", devices=2, slice_step_ms=steps, speedup=ratio(0.46), bound=ratio(0.62)))
    assert said.endswith(
        ": a step takes 380 ms, on one device 175 ms. This host was too unsteady to say where the time goes: alone, a "
        "device needs 574 ms for its share, longer than a whole step. Train again when nothing else runs."
    )
    assert "bounds" in say_speed(
        row("ddp", devices=2, slice_step_ms={**steps, "share": 400.0}, speedup=ratio(0.5), bound=ratio(0.6))
    )


@pytest.mark.parametrize(
    ("labels", "reason", "said"),
    [
        ([SHARED], SHARED, " (oversubscribed): 8 workers share 4 GPUs."),
        ([], ONE_REPEAT, ": train.repeats is 1."),
    ],
)
def test_why_runs_have_no_speedup_is_said_once(labels, reason, said):
    """Of all numerics, although the other answers about speed are of the first only."""
    without = {"labels": labels, "speedup_unavailable": reason}
    compared = sample(row(), row("dp", devices=2, **without), row(numerics="exact"),
                      row("dp", devices=2, numerics="exact", **without))  # fmt: skip
    assert f"dp-fast and dp-exact have no speed-up{said}" in figures_in_words(compared)
    assert not [line for line in remarks(compared) if line.startswith("dp-")]


@pytest.mark.parametrize(
    ("speedup", "said"),
    [
        (FASTER, "ddp-fast on 2 GPUs ran at 1.50 times the speed of single (1.40 to 1.60), in slices that took turns."),
        (
            OPEN,
            "ddp-fast on 2 GPUs ran at 1.02 times the speed of single (0.98 to 1.05), no difference shown, in slices "
            "that took turns.",
        ),
    ],
)  # fmt: skip
def test_a_speed_up_that_may_be_1_is_said_to_show_nothing(speedup, said):
    (one,) = rows_of({"ddp": speedup})
    assert say_speed(one) == said
    assert ("no difference shown" in markdown(sample(one)).partition("| ddp-fast |")[2].splitlines()[0]) == (
        speedup is OPEN
    )


@pytest.mark.parametrize(
    ("price", "said"),
    [
        (ratio(3.7, 3.5, 3.9), "3.7 times the time of a fast step on one device, 95% sure: 3.5 to 3.9."),
        (OPEN, "1.02 times the time of a fast step on one device, 95% sure: 0.98 to 1.05, no difference shown."),
    ],
)
def test_what_the_same_bits_cost(price, said):
    assert say_price(price) == f"A step in exact, with the same bits on any host, takes {said}"


def test_a_run_is_described_with_what_it_is_measured_against_and_its_verdict():
    first, other = describe_row(row()), describe_row(row("dp", verdict=verdict("bitwise")))
    assert first.startswith("single-fast on 1 GPU is what the others are measured against.\n\nTest loss 2.0000")
    assert "\n\nAgainst single-fast: **bitwise**.\n\n- losses: bitwise, all 2 steps\n\n- weights: bitwise" in other


def test_one_line_about_a_training(compared, tmp_path):
    compared()
    run = read_run(tmp_path / "runs/dp-fast")
    assert describe_run(run) == (
        "dp-fast: 3.00 s, median step 3 ms, 1,000 samples/s, 1.30x (1.20–1.40) single, bound 3.60x, "
        "weights dp-hash-0123"
    )
    compared(speedup=OPEN, training_seconds=0.010432)
    said = describe_run(read_run(tmp_path / "runs/dp-fast"))
    assert said.startswith("dp-fast: 0.0104 s, ")
    assert "1.02x (0.98–1.05) single (no difference shown), bound 3.60x" in said


def test_a_host_that_turned_out_quiet_is_not_called_noisy(compared):
    spread = ratio(107.0, 100.0, 114.0)
    assert remarks(compared(repeats=repeats(7, 0.04, "narrow"), samples_per_sec_spread=spread)) == []


def test_what_a_reader_must_know_of_a_training(compared, tmp_path):
    label = AnyOrder()
    compared(labels=[label], notes=[RESUMED], not_applied={"train.compile": "dp_is_not_compiled"})
    assert notes_of(read_run(tmp_path / "runs/dp-fast")) == [
        f"any order: {label.sentence()}",
        f"note: {RESUMED.sentence()}",
        f"note: train.compile was not applied: {NOT_APPLIED['dp_is_not_compiled']}",
    ]


OLD_CPU = {"model": "CPU", "machine": "x86_64", "cores": 4, "instruction_sets": ["avx2"]}


@pytest.mark.parametrize(
    ("hosts", "machines", "labels"),
    [
        ([{}, {}], "ab", {}),
        ([{"gpus": 2}, {"gpus": 2}, {"gpus": 2}], "abc", {}),
        ([{}, {"cpu": OLD_CPU}], "ab", {"different_hosts": "n1 is not like n0: other cpu.instruction_sets, cpu.cores"}),
        ([{}, {}, {"driver": "1"}], "abc", {"different_hosts": "n2 is not like n0: other driver"}),
        ([{"gpus": 2}, {"gpus": 1}], "ab", {"different_hosts": "n1 is not like n0: other gpus"}),
        ([{}, {"python": "3.12.1"}], "ab", {}),  # which changes neither speed nor bits
        ([{}, {}, {}], "aba", {"one_machine": "n0, n2 run on one kernel, and share its cores and its memory"}),
    ],
)
def test_machines_that_are_not_alike_or_one_are_labelled(hosts, machines, labels, compared):
    nodes = tuple(
        Node(name=f"n{number}", machine=machine, host=host(**facts))
        for number, (facts, machine) in enumerate(zip(hosts, machines, strict=True))
    )
    _, dp, _ = compared(nodes=nodes).rows
    assert {label.kind: label.text for label in dp.labels} == labels
