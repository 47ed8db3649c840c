"""The three answers, the waterfall and what changed: of every state that a comparison may be in."""

import re
from types import SimpleNamespace

import pytest
from dvc.utils.cli_parse import to_path_overrides
from dvc.utils.hydra import to_hydra_overrides

from page_states import COMMUNICATION, SMALL_BATCH, STATES, of_cpus, on_cpus, on_gpus
from samebits.params import parse_params
from samebits.results.answers import facts, headline, helps, how_much_faster, nothing, summary
from samebits.results.remarks import SpokenRemark
from samebits.results.sameness import is_it_the_same
from samebits.results.since import since
from samebits.results.waterfall import percent, waterfall
from samples import comparison, ratio, row, verdict

HEADLINES = {
    "faster": "ddp on 2 CPU devices: 1.54× the speed of one, and the same model",
    "noisy": "ddp on 2 CPU devices: 1.54× the speed of one, and the same model",
    "no difference": "ddp on 2 CPU devices: no difference from the speed of one is shown, and the same model",
    "slower": "ddp on 2 CPU devices: 0.62× the speed of one, and the same model",
    "fallback only": "Nothing was parallel here, and the same model",
    "unsteady": "ddp on 2 CPU devices: 1.54× the speed of one, and the same model",
    "nothing found": "ddp on 2 CPU devices: 1.54× the speed of one, and the same model",
    "gain unknown": "ddp on 2 CPU devices: 1.54× the speed of one, and the same model",
    "diverged": "ddp on 2 CPU devices: 1.54× the speed of one, and not the same model",
    "not comparable": "ddp on 2 CPU devices: 1.54× the speed of one; whether it is the same model cannot be told",
    "refused": "ddp on 2 CPU devices: 1.54× the speed of one, and the same model",
    "one run": "single-fast was trained alone",
    "GPUs": "ddp on 4 GPUs: 3.40× the speed of one, and the same model",
    "several machines": "ddp on 4 GPUs of 2 machines: 3.40× the speed of one, and the same model",
}


@pytest.mark.parametrize("name", STATES)
def test_the_answer_in_one_sentence(name):
    assert headline(STATES[name]) == HEADLINES[name]


@pytest.mark.parametrize(
    ("name", "figure", "told"),
    [
        ("faster", "1.54×", "95% sure: 1.25 to 1.85"),
        ("no difference", "≈ 1×", "no difference from one device is shown"),
        ("slower", "0.62×", "slower than one device: use one, or change what follows"),
        ("fallback only", "–", "no CUDA device is visible, so DataParallel ran the plain module on one device"),
        ("one run", "–", "there is nothing to compare it with"),
    ],
)
def test_how_much_faster(name, figure, told):
    speed = how_much_faster(STATES[name])
    assert (speed.figure, speed.told[-1], speed.uncertain) == (figure, told, name == "slower")


FASTER = ratio(1.5, 1.4, 1.6)
ONE_REPEAT = SpokenRemark(kind="one_repeat", text="train.repeats is 1")
SHARED = SpokenRemark(kind="oversubscribed", text="8 workers share 4 GPUs")


def test_why_what_was_parallel_was_not_measured():
    """And that nobody has looked for causes."""
    fallback = SpokenRemark(kind="fallback", text="no CUDA device is visible")
    rows = [row("single"), row("dp", speedup_unavailable=fallback)]
    rows.append(row("ddp", devices=2, device_type="cpu", speedup_unavailable=ONE_REPEAT))
    assert how_much_faster(comparison(*rows)).whole == "not measured; train.repeats is 1"
    assert nothing(comparison(*rows)) == "Nothing is known: no step was divided into parts."


@pytest.mark.parametrize(
    ("dp", "ddp", "told"),
    [
        (ratio(1.45, 1.41, 1.49), FASTER, "ddp on 2 CPU devices; 95% sure: 1.40 to 1.60; dp is not shown to be slower"),
        (ratio(1.02, 0.98, 1.05), FASTER, "ddp on 2 CPU devices; 95% sure: 1.40 to 1.60"),
        (ONE_REPEAT, FASTER, "ddp on 2 CPU devices; 95% sure: 1.40 to 1.60; dp was not measured"),
        (ratio(0.7, 0.6, 0.8), ONE_REPEAT, "dp on 2 CPU devices; 95% sure: 0.60 to 0.80; ddp was not measured; slower "
                                           "than one device: use one, or change what follows"),
        (SHARED, ONE_REPEAT, "not measured; 8 workers share 4 GPUs"),
    ],
)  # fmt: skip
def test_what_is_known_of_the_others(dp, ddp, told):
    rows = [row("single", speedup=ratio(1.0))]
    for strategy, value in {"dp": dp, "ddp": ddp}.items():
        known = {"speedup_unavailable": value} if isinstance(value, SpokenRemark) else {"speedup": value}
        rows.append(row(strategy, devices=2, device_type="cpu", **known))
    assert how_much_faster(comparison(*rows)).whole == told
    assert how_much_faster(comparison(*rows[::-1])).whole == told or isinstance(dp, SpokenRemark)  # any order


@pytest.mark.parametrize(
    ("device_type", "bound", "said"),
    [("cuda", 1.05, True), ("cuda", 1.29, True), ("cuda", 1.3, False), ("cpu", 1.05, False)],
)
def test_a_model_that_is_too_small_for_several_gpus_is_told_so(device_type, bound, said, monkeypatch, tmp_path):
    """Not that ddp is slow: no strategy could make it faster, and the reader learns what would show a speed-up."""
    compared = comparison(row("ddp", devices=4, speedup=ratio(0.8), bound=ratio(bound), device_type=device_type))
    told = "this model is too small for 4 of these GPUs: a larger train.global_batch_size, or PRESET=gpu make repro,"
    assert (told in how_much_faster(compared).whole) == said
    monkeypatch.chdir(tmp_path)  # where there is no such preset
    assert ("train.global_batch_size would show a speed-up" in how_much_faster(compared).whole) == said


def test_gpus_are_counted_by_name():
    gpus = [SimpleNamespace(name=name) for name in ("RTX 3090", "GTX 1080", "RTX 3090")]
    found = comparison(row())
    unlike = found.model_copy(update={"host": found.host.model_copy(update={"gpus": gpus})})
    assert facts(unlike)[3] == "2 × RTX 3090 and 1 × GTX 1080"


@pytest.mark.parametrize(
    ("name", "figure", "of"),
    [
        ("faster", "+14%", "samples per second, predicted"),
        ("gain unknown", "10%", "of a step; what a change gains is not known"),
    ],
)
def test_what_helps(name, figure, of):
    first, *_ = helps(STATES[name])
    assert (first.figure, first.of, first.lost) == (figure, of, "1.69 ms of a step")
    assert (first.cause, first.action) == ("the batch is too small to share", "make the batch 4 times as large")
    assert first.another_training
    unknown = {**SMALL_BATCH, "share": None, "gain": None}
    (first,) = helps(of_cpus(*on_cpus(findings=(unknown,))))
    assert (first.figure, first.of) == ("1.69 ms", "of a step; what a change gains is not known")


def test_the_answers_run_is_helped_first():
    assert [one.row.strategy for one in helps(STATES["GPUs"])] == ["ddp", "dp"]
    assert helps(STATES["nothing found"]) == []


def settings_in(command):
    """Values by key, as DVC reads them."""
    (given,) = to_path_overrides(re.findall(r"-S (\S+)", command)).values()
    assert to_hydra_overrides(given)
    return dict(one.split("=") for one in given)


@pytest.mark.parametrize(
    ("pipeline", "command"),
    [
        ("dvc.yaml", "dvc exp run -S train.global_batch_size=16384 -S train.grad_accum_steps=4"),
        ("gpu/dvc.yaml", "dvc exp run gpu/dvc.yaml -S gpu/params.yaml:train.global_batch_size=16384 "
                         "-S gpu/params.yaml:train.grad_accum_steps=4"),
        (None, "train.global_batch_size: 16384\ntrain.grad_accum_steps: 4"),
    ],
)  # fmt: skip
def test_a_change_has_a_command_that_can_be_typed(pipeline, command):
    (first,) = helps(of_cpus(*on_cpus(findings=(COMMUNICATION,)), pipeline=pipeline))
    assert first.command == command
    if pipeline:
        changed = {key.partition(".")[2]: int(value) for key, value in settings_in(command).items()}
        assert parse_params({"train": changed}).train.global_batch_size == 16384


@pytest.mark.parametrize(
    ("change", "remedy", "command"),
    [
        ({"train.ddp.forward_sync_buffers": False}, "keep_buffers", "-S train.ddp.forward_sync_buffers=false"),
        ({"train.num_devices": 1}, "fewer_devices", "-S train.num_devices=1"),
        ({"train.strategies": "ddp"}, "use_ddp", ""),
        ({}, "free_cores", ""),
        ({"train.oversubscribe": False, "train.num_devices": "auto"}, "share_no_device", ""),  # as it is
    ],
)
def test_a_command_has_what_changes_and_no_more(change, remedy, command):
    (first,) = helps(of_cpus(*on_cpus(findings=({**COMMUNICATION, "change": change, "remedy": remedy},))))
    assert first.command == (command and f"dvc exp run {command}")


@pytest.mark.parametrize(
    ("name", "state", "fast", "exact"),
    [
        ("faster", "yes", "losses differ by 0.000018%, as rounding explains",
         "every bit, under single and ddp, on any host"),
        ("diverged", "no", "ddp-fast left single-fast at step 7: losses differ by 3.1%, where 1% passes",
         "every bit, under single and ddp, on any host"),
        ("not comparable", "not judged", "ddp-fast cannot be compared: dropout draws depend on the number of devices",
         "every bit, under single and ddp, on any host"),
        ("refused", "yes", "losses differ by 0.000018%, as rounding explains",
         "refused, because of BatchNorm2d in model.norm; train in fast numerics"),
        ("fallback only", "yes", "every bit, but nothing was parallel", None),
        ("one run", "one run", "there is nothing to compare it with", None),
    ],
)  # fmt: skip
def test_is_it_the_same_model(name, state, fast, exact):
    same = is_it_the_same(STATES[name])
    assert (same.state, same.told["fast"], same.told.get("exact")) == (state, fast, exact)


def test_other_data_are_told_where_the_bits_are_the_same():
    other = verdict("bitwise", against="single-exact").model_copy(update={"data": "the data differ, from step 2"})
    told = is_it_the_same(of_cpus(*on_cpus(same=other))).told["exact"]
    assert told == "every bit, under single and ddp, but the data differ, from step 2"


def test_the_largest_difference_of_all_runs_is_told():
    """It need not be that of the first run with the worst grade."""
    grades = {"dp": verdict("within tolerance", losses=1e-7), "ddp": verdict("within tolerance", losses=3e-3)}
    rows = [row(strategy, devices=2, verdict=found) for strategy, found in grades.items()]
    assert is_it_the_same(comparison(row(), *rows)).told["fast"] == "losses differ by 0.3%, as rounding explains"
    alike = row("dp", devices=2, verdict=verdict("within tolerance", losses=0.0, weights=0.002))
    told = "losses are the same, weights differ in 1 of 1 tensors, as rounding explains"
    assert is_it_the_same(comparison(row(), alike)).told["fast"] == told
    left = row("dp", devices=2, verdict=verdict("diverged"))  # as of runs of other lengths
    assert is_it_the_same(comparison(row(), left)).told["fast"] == "dp-fast left single-fast"


def test_bits_on_any_host_need_the_samples_of_a_users_own_dataset():
    rows = [row(numerics="exact"), row("dp", numerics="exact", devices=2, verdict=verdict("bitwise"))]
    params = {"data": {"task": "dataset", "num_samples": 128}, "model": {"name": "m:f"}}
    params["train"] = {"global_batch_size": 64, "epochs": 1}
    own = comparison(*rows).model_copy(update={"params": parse_params(params)})
    assert is_it_the_same(own).told["exact"].endswith("on any host, where the dataset gives the same samples")


def test_a_summary_has_the_answers_in_four_lines():
    lines = summary(STATES["faster"]).splitlines()
    assert [line.partition("?")[0] for line in lines[1:]] == [
        "- How much faster", "- What holds it back", "- Is it the same model",
    ]  # fmt: skip
    assert lines[0].startswith("**ddp on 2 CPU devices: 1.54× the speed of one, and the same model** (mlp on vectors")
    assert facts(STATES["GPUs"])[-3:] == ["4 × GPU", "torch 2.13.0", "commit c0ffeec"]


# -- the waterfall --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", STATES)
def test_a_waterfall_begins_at_the_devices_and_ends_at_the_speed_up(name):
    for row in STATES[name].rows:  # noqa: F402
        if not row.speedup or row.strategy == "single":
            continue
        one = waterfall(row)
        if not one.stages:
            assert name == "unsteady" or row.slice_step_ms is None
            continue
        first, *_, last = one.stages
        assert (first.name, first.start, first.end) == ("fixed", row.devices_used, row.bound.median)
        assert last.end == pytest.approx(row.speedup.median, abs=0.02 * row.devices_used)
        assert [a.end for a in one.stages[:-1]] == [b.start for b in one.stages[1:]]
        assert all(abs(stage.ms) >= 0.01 * one.step_ms for stage in one.stages[1:])


def test_stages_add_up_to_the_step():
    row = STATES["faster"].rows[2]
    one = waterfall(row)
    assert row.slice_step_ms.single / 2 + sum(stage.ms for stage in one.stages) == pytest.approx(16.4)
    assert [(stage.words, stage.lost) for stage in one.stages] == [
        ("Smaller shares gain", False), ("Slowing each other down", True),
        ("Sending gradients", True), ("Waiting for the slowest", True),
    ]  # fmt: skip
    assert one.stages[-1].end == pytest.approx(1.54)


def test_a_stage_that_noise_makes_negative_is_a_gain():
    slices = {"strategy": 12.0, "single": 25.9, "share": 12.4, "together": 12.2, "devices": 2}
    (_, _, ddp, *_) = on_cpus(ratio(2.1, 2.0, 2.2), slices=slices)
    stages = waterfall(ddp).stages
    assert [stage.words for stage in stages] == ["Smaller shares gain", "Faster side by side", "Sending gradients"]
    assert not any(stage.lost for stage in stages)


def test_where_times_and_ratios_do_not_agree_on_a_sign_the_first_stage_is_noise():
    ddp = STATES["faster"].rows[2].model_copy(update={"bound": ratio(1.94, 1.8, 2.1)})
    first = waterfall(ddp).stages[0]
    assert (first.words, first.lost, first.end) == ("Smaller shares, within noise", True, 1.94)
    assert first.ms < 0


def test_without_losses_a_waterfall_has_the_slices_alone():
    exact = STATES["faster"].rows[5]
    assert [stage.name for stage in waterfall(exact).stages] == ["fixed", "contention", "sending"]
    dp = STATES["GPUs"].rows[1].model_copy(update={"explanation": None})
    assert [stage.words for stage in waterfall(dp).stages][-1] == "Copies, and work of device 0 alone"


def test_where_a_bar_stands():
    assert percent(1.0, 2.0, 4.0) == percent(2.0, 1.0, 4.0) == {"left": 25.0, "width": 25.0}
    assert percent(-0.5, 1.0, 4.0) == {"left": 0.0, "width": 25.0}


# -- what changed ---------------------------------------------------------------------------------------------


def before(speedup, **changes):
    rows = on_gpus()
    rows[2] = rows[2].model_copy(update={"speedup": speedup})
    return of_cpus(*rows, created="2025-11-12T10:00:00+00:00", **changes)


@pytest.mark.parametrize(
    ("speedup", "sign"),
    [(ratio(3.12, 3.1, 3.2), "▲"), (ratio(3.3, 3.2, 3.4), "="), (ratio(3.6, 3.5, 3.7), "▼")],
)
def test_what_moved_since_another_comparison(speedup, sign):
    told = since(of_cpus(*on_gpus()), before(speedup))
    assert told.when == "Since 2025-11-12, commit c0ffeec, same host"
    assert [(one.sign, one.name, one.now) for one in told.moved] == [("=", "dp", "2.10×"), (sign, "ddp", "3.40×")]
    assert told.bits == "= same exact bits"


def test_of_another_host_the_bits_alone_are_compared():
    rows = [one.model_copy(update={"weights_sha256": "0" * 64}) for one in on_gpus()]
    told = since(of_cpus(*rows), before(ratio(3.0), host_fingerprint="other"))
    assert (told.moved, told.bits) == ((), "≠ other exact bits")
    assert told.when.endswith("on another host")
    assert since(of_cpus(*on_gpus()[:3]), before(ratio(3.0))).bits == ""
    assert [one.name for one in since(of_cpus(*on_gpus()), before(None)).moved] == ["dp"]
