"""The comparison as data and as a table."""

import json

import numpy as np
import pytest
from safetensors.numpy import save_file

from samebits.compare import MAX_POINTS, compare, curve
from samebits.errors import UserError
from samebits.files import write_json, write_text
from samebits.params import parse_params
from samebits.records import Run, read_losses
from samebits.report.table import COLUMNS, cells, markdown, show
from samebits.report.text import answers, remarks, row_remarks
from samebits.summary import describe_run, times

TRAIN = {"global_batch_size": 64, "epochs": 1, "numerics": ["fast"]}
PARAMS = parse_params({"data": {"num_samples": 128}, "train": TRAIN})  # 2 steps
SINGLE = {"median": 1000.0, "low": 990.0, "high": 1010.0}


def spread(median, low=None, high=None):
    return {"median": median, "low": low or median, "high": high or median}


def write_run(folder, strategy, *, losses=(2.0, 1.5), weight=1.0, labels=(), devices=1, **changes):
    """The files of one run, with what a stage would have put there."""
    run = {
        "run": f"key-{strategy}",
        "strategy": strategy,
        "numerics": "fast",
        "placement": {"num_devices": devices, "devices_used": devices, "device_type": "cuda", "labels": list(labels)},
        "notes": [],
        "not_applied": {},
        "speedup_unavailable": None,
        "first_unrepeated_step": None,
        "initial_sha256": "initial",
        "weights_sha256": f"{strategy}-hash-0123456789",
        "data_sha256": "data",
        "params": PARAMS.model_dump(mode="json"),
        "measurement": {"step_ms": [1.0, 2.0], "slice_steps": 10, "chunk_seconds": {}},
    }
    timing = {
        "training_seconds": 3.0,
        "samples_per_sec": 1000.0,
        "samples_per_sec_spread": SINGLE,
        "step_time_ms": 3.0,
        "step_time_p5_ms": 2.0,
        "step_time_p95_ms": 4.0,
        "peak_memory_gib": {"device0": 1.0},
        "speedup": None,
        "bound": None,
        "price": None,
    }
    evaluation = {
        "eval_loss": 2.0,
        "accuracy": 0.25,
        "floor": 1.9,
        "teacher_loss": 1.9,
        "above_floor": 0.05,
        "samples": 9,
    }
    for values in (run, timing, evaluation):
        values.update({name: value for name, value in changes.items() if name in values})
    if timing["speedup"]:  # a step takes 40 ms on one device
        ratios = {"own": timing["speedup"]["median"], "single": 1.0, "share": timing["bound"]["median"]}
        run["measurement"]["chunk_seconds"] = {name: [[0.1 / ratio, 0.3 / ratio]] for name, ratio in ratios.items()}
    path = folder / "runs" / f"{strategy}-{run['numerics']}"
    write_json(path / "run.json", run)
    write_json(path / "timing.json", timing)
    write_json(path / "evaluation.json", evaluation)
    save_file({"weight": np.full(4, weight, np.float32)}, path / "model.safetensors")
    write_text(path / "losses.csv", "step,loss\n" + "".join(f"{i},{x}\n" for i, x in enumerate(losses, start=1)))


@pytest.fixture
def compared(tmp_path):
    def make(**dp):
        host = {"gpus": [{"name": "GPU"}] * 4, "cpu": {"model": "CPU", "cores": 8}, "torch": "2.13.0"}
        write_json(tmp_path / "host.json", host)
        write_run(tmp_path, "single")
        write_run(tmp_path, "dp", **{"devices": 4, "speedup": spread(1.3, 1.2, 1.4), "bound": spread(3.6), **dp})
        write_run(tmp_path, "ddp", devices=4, speedup=spread(3.2, 3.1, 3.3), bound=spread(3.6), losses=(2.0, 1.50001))
        return compare(PARAMS, tmp_path / "runs", tmp_path / "host.json")

    return make


def test_rows_stand_in_the_order_of_the_params(compared):
    comparison = compared()
    assert [row["strategy"] for row in comparison["rows"]] == ["single", "dp", "ddp"]
    single, dp, ddp = comparison["rows"]
    assert single["speedup"] == spread(1.0)
    assert (dp["scaling_efficiency"], ddp["scaling_efficiency"]) == (pytest.approx(0.325), pytest.approx(0.8))
    assert json.loads(json.dumps(comparison, allow_nan=False)) == comparison


def test_runs_are_judged_against_the_first(compared):
    single, dp, ddp = compared()["rows"]
    assert single["verdict"] is None
    assert (dp["verdict"]["against"], dp["verdict"]["grade"]) == ("single-fast", "bitwise")
    assert ddp["verdict"]["grade"] == "within tolerance"
    assert ddp["verdict"]["losses"]["first_difference"] == 2
    assert ddp["verdict"]["weights"]["grade"] == "bitwise"


def test_curves_are_short_and_true():
    steps = MAX_POINTS * 2 + 1
    run = Run(None, {"measurement": {"step_ms": [500.0] * steps}}, {}, [float(step) for step in range(steps)])
    found = curve(run)
    assert len(found["step"]) == steps // 3
    assert (found["step"][:2], found["seconds"][:2], found["loss"][:2]) == ([3, 6], [1.5, 3.0], [1.0, 4.0])


@pytest.mark.parametrize(
    ("dp", "sentences"),
    [
        (
            {},
            [
                "Fastest here is ddp-fast on 4 GPUs: 3.20 times the speed of single (3.10 to 3.30).",
                "dp-fast on 4 GPUs ran at 1.30 times the speed of single (1.20 to 1.40), in slices that took turns: a "
                "step takes 30.8 ms, on one device 40 ms. Without communication a device needs 11.1 ms for its share, "
                "which bounds the speed at 3.60 times; 19.7 ms, 64% of a step, go to communication and waiting.",
                "Same model in fast numerics: yes, within what rounding explains: losses differ by 0.00% at most "
                "(ddp-fast, step 2, where 0.0% passes).",
            ],
        ),
        (
            {"weight": -1.0},
            ["Same model in fast numerics: NO. dp-fast against single-fast: losses: bitwise, all 2 steps; weights: d"],
        ),
        ({"speedup": None, "bound": None, "speedup_unavailable": "why"}, ["dp-fast has no speed-up: why."]),
        (
            {
                "labels": [{"kind": "one_device", "text": "one GPU is used"}],
                "speedup": None,
                "bound": None,
                "speedup_unavailable": "one GPU is used",
            },
            ["dp-fast has no speed-up (one device): one GPU is used."],
        ),
        ({"speedup": spread(3.65)}, ["which bounds the speed at 3.60 times."]),
    ],
)
def test_the_answers_in_words(dp, sentences, compared):
    text = "\n".join(answers(compared(**dp)))
    assert [sentence for sentence in sentences if sentence not in text] == []


def test_exact_passes_with_the_same_bits_alone(tmp_path):
    write_json(tmp_path / "host.json", {"gpus": [], "cpu": {"model": "CPU", "cores": 8}, "torch": "2.13.0"})
    params = parse_params({**PARAMS.model_dump(mode="json"), "train": {**TRAIN, "numerics": ["exact"]}})

    def said(**ddp):
        write_run(tmp_path, "single", numerics="exact", price=spread(3.7, 3.5, 3.9))
        write_run(tmp_path, "dp", numerics="exact")
        write_run(tmp_path, "ddp", numerics="exact", **ddp)
        return answers(compare(params, tmp_path / "runs", tmp_path / "host.json"))[-2:]

    price = "The same bits on any host cost here 3.7 times the time of a fast step on one device (3.5 to 3.9)."
    assert said() == ["Same model in exact numerics: yes, bit by bit, under every strategy, and so on any host.", price]
    assert said(losses=(2.0, 1.5000001))[0].startswith(
        "Same model in exact numerics: NO. ddp-exact against single-exact: losses: diverged: first at step 2 of 2"
    )


@pytest.mark.parametrize(
    ("changes", "remark"),
    [
        ({"labels": [{"kind": "oversubscribed", "text": "two on one"}]}, "dp-fast: oversubscribed: two on one"),
        ({"first_unrepeated_step": 7}, "dp-fast: not repeatable: a repeat on this host gave another loss at step 7"),
        (
            {"samples_per_sec_spread": spread(100.0, 80.0, 120.0)},
            "dp-fast: noisy: samples per second differed by 50% between repeats",
        ),
        (
            {"initial_sha256": "other"},
            "dp-fast: different start: its first weights are not those of single-fast: the factory draws numbers that "
            "are not seeded",
        ),
        ({"notes": ["BatchNorm: mind"]}, "dp-fast: BatchNorm: mind"),
        ({"not_applied": {"train.compile": "no"}}, "dp-fast: train.compile was not applied: no"),
    ],
)
def test_what_a_reader_must_know_is_said(changes, remark, compared):
    comparison = compared(**changes)
    assert remarks(comparison) == [remark]
    assert f"- {remark}" in markdown(comparison)


def test_a_fallback_is_never_a_speed_up(compared):
    label = {"kind": "fallback", "text": "one GPU is used"}
    why = {"speedup": None, "bound": None, "speedup_unavailable": label["text"]}
    row = compared(labels=[label], devices=1, **why)["rows"][1]
    assert (row["speedup"], row["scaling_efficiency"]) == (None, None)
    assert dict(zip(COLUMNS, cells(row), strict=True))["speed-up"] == "–"
    assert row_remarks(row) == []  # the answers say it


def test_the_table(compared, capsys):
    comparison = compared()
    lines = markdown(comparison).splitlines()
    assert lines[0] == "mlp on vectors, global batch 64, 2 steps; 4 x GPU; torch 2.13.0"
    assert [line for line in lines if line.startswith("| run | devices | seconds | speed-up | bound |")]
    row = "| ddp-fast | 4 GPU | 3.00 | 3.20x (3.10–3.30) | 3.60x | 80% | 2.0000 | +5.0% | 25.0% | within tolerance "
    assert f"{row}| ddp-hash-012 |" in lines
    show(comparison)
    shown = capsys.readouterr().out
    assert all(cell in shown for row in comparison["rows"] for cell in cells(row))


@pytest.mark.parametrize(
    ("file", "text", "message"),
    [
        ("runs/dp-fast/run.json", None, r"run\.json: no such file\. hint: run `python pipeline/train.py --strategy dp"),
        (
            "runs/dp-fast/evaluation.json",
            None,
            r"run `python pipeline/evaluate.py --strategy dp --numerics fast` first",
        ),
        ("runs/dp-fast/losses.csv", "step\n1\n", r"losses\.csv: cannot be read"),
        ("runs/dp-fast/losses.csv", "step,loss\n1,2\n", r"losses\.csv: 1 steps, expected the 2 of the params"),
        ("host.json", "{", r"host\.json: cannot be read"),
    ],
)
def test_what_is_missing_names_its_command(file, text, message, compared, tmp_path):
    compared()
    (tmp_path / file).unlink()
    if text:
        (tmp_path / file).write_text(text)
    with pytest.raises(UserError, match=message):
        compare(PARAMS, tmp_path / "runs", tmp_path / "host.json")


def test_losses_are_read_as_they_were_written(tmp_path):
    write_text(tmp_path / "losses.csv", "step,loss\n1,2.3025851\n2,1e-09\n")
    assert read_losses(tmp_path / "losses.csv") == [2.3025851, 1e-09]


@pytest.mark.parametrize(
    ("value", "text"), [(None, "–"), (spread(1.0), "1.00x"), (spread(2, 1, 3), "2.00x (1.00–3.00)")]
)
def test_ratios_for_people(value, text):
    assert times(value) == text


def test_one_line_about_a_training(compared, tmp_path):
    compared()
    assert describe_run(tmp_path / "runs/dp-fast") == (
        "dp-fast: 3.00 s, median step 3 ms, 1,000 samples/s, 1.30x (1.20–1.40) single, bound 3.60x, "
        "weights dp-hash-0123"
    )
