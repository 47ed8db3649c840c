"""The three answers, the waterfall and what changed: of every state that a comparison may be in."""

import re

import pytest
from dvc.utils.cli_parse import to_path_overrides
from dvc.utils.hydra import to_hydra_overrides

from page_states import COMMUNICATION, STATES, of_cpus, on_cpus, on_gpus
from samebits.params import parse_params
from samebits.results.answers import facts, headline, helps, how_much_faster, is_it_the_same, summary
from samebits.results.since import since
from samebits.results.waterfall import percent, waterfall
from samples import ratio, verdict

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
    for row in STATES[name].rows:
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
