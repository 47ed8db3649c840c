"""How well devices are used, in figures, words and labels."""

import json

import pytest

from samebits.records.usage import CoreUsage, Interval, Roof, Usage
from samebits.remarks import Oversubscribed
from samebits.results.page.render import render
from samebits.results.table import HEADINGS, cells, markdown
from samebits.results.text import figures_in_words, remarks
from samebits.results.usage import disturbances, row_usage, say_use
from samples import comparison, placed, row, run_record
from samples import device_usage as device

WHY = "the counter is gone"


def cores(others, *, available=2, throttled=None):
    return CoreUsage(available=available, training=1.0, others=others, throttled=throttled)


def used(*, slices=None, roof=None, samples=1000, **training):
    interval = Interval(**{"seconds": 2.0, **training})
    return Usage(samples=samples, training=interval, slices=slices, sampler_share=0.0, roof=roof)


def record(usage, *, gpus=0, strategy="single", **changes):
    placement, _ = placed(strategy, gpus=gpus, cores=2)
    return run_record(strategy, placement=placement, usage=usage, **changes)


def steps_of(*milliseconds):
    return {"step_ms": milliseconds, "slice_steps": 0, "chunk_steps": 0, "chunk_seconds": {}}


def test_what_others_leave_on_the_first_of_several_machines():
    """The cores are those of the first machine, and the devices those of all."""
    one = record(used(cores=cores(0.6, available=4)), strategy="ddp")
    over_two = one.placement.model_copy(update={"devices_used": 4, "devices_by_node": (2, 2)})
    assert disturbances(one.model_copy(update={"placement": over_two})) == []
    over_one = one.placement.model_copy(update={"devices_used": 4})
    assert disturbances(one.model_copy(update={"placement": over_one})) == [
        "others used 0.6 of 4 cores during training"
    ]


@pytest.mark.parametrize(
    ("usage", "expected"),
    [
        (None, {}),
        (used(energy_unavailable=WHY), {"energy_unavailable": WHY}),
        (used(energy_j=5.0), {"energy_j_per_million_samples": 5000.0}),
        (used(energy_j=5.0, samples=0), {}),
        (used(roof=Roof(problem="why")), {"roof_unavailable": "why"}),
        (used(roof=Roof(flops_per_step=4096e9)), {"tflops": 1.0}),
        (used(roof=Roof(roof_flops=4e12)), {"roof_tflops": 4.0}),
        (
            used(roof=Roof(flops_per_step=4096e9, roof_flops=4e12)),
            {"tflops": 1.0, "roof_tflops": 4.0, "roof_share": 0.25},
        ),
    ],
)
def test_the_figures_of_a_row(usage, expected):
    """A step takes 4.096 s."""
    figures = row_usage(run_record(usage=usage, measurement=steps_of(4096.0)))
    assert figures.model_dump(exclude_none=True, exclude={"uncounted"}) == pytest.approx(expected)


def test_the_rate_is_that_of_the_fastest_slice():
    """A short training is over before the clocks of a GPU have risen, to which the roof belongs."""
    slices = {"step_ms": [1.0], "slice_steps": 10, "chunk_steps": 5, "chunk_seconds": {"strategy": [[4, 4], [2, 3]]}}
    one = record(used(roof=Roof(flops_per_step=4e12, roof_flops=16e12)), measurement=slices)
    found = row_usage(one)
    assert (found.tflops, found.roof_share) == (8.0, 0.5)


def test_without_slices_the_rate_is_that_of_the_fastest_ten_steps_in_a_row():
    """So the rate of single, which has none, is that of a moment as quiet as the fastest slice of the others."""
    steps = steps_of(*[9.0] * 5, *[2.0] * 10, *[1.0] * 3, *[9.0] * 10)
    one = record(used(roof=Roof(flops_per_step=1.7e9)), measurement=steps)
    assert row_usage(one).tflops == pytest.approx(1.0)
    few = record(used(roof=Roof(flops_per_step=1.7e9)), measurement=steps_of(1.0, 2.4))
    assert row_usage(few).tflops == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("labels", "tflops"), [((), 0.5), ((Oversubscribed(workers=2, devices=1, device="CPU core"),), 1.0)]
)
def test_two_devices_share_the_rate_and_two_workers_of_one_have_it_together(labels, tflops):
    one = record(used(roof=Roof(flops_per_step=4096e9)), strategy="ddp", gpus=0, measurement=steps_of(4096.0))
    assert one.placement.devices_used == 2
    labelled = one.model_copy(update={"placement": one.placement.model_copy(update={"labels": labels})})
    assert row_usage(labelled).tflops == tflops


@pytest.mark.parametrize(
    ("usage", "gpus", "said"),
    [
        (None, 0, []),
        (used(), 0, []),
        (used(devices=[device(reasons={"sw_power_cap": 1.0, "gpu_idle": 1.0, "sync_boost": 1.0})]), 1, []),
        (used(devices=[device(reasons={"sw_thermal_slowdown": 0.05})]), 1, []),
        (
            used(devices=[device(), device(1, reasons={"sw_thermal_slowdown": 0.1, "hw_slowdown": 0.1})]),
            2,
            ["GPU 1 was slowed down, as it was too hot"],
        ),
        (
            used(devices=[device(reasons={"hw_thermal_slowdown": 0.1, "hw_power_brake_slowdown": 0.1})]),
            1,
            ["GPU 0 was slowed down, as it was much too hot and its power supply asked for it"],
        ),
        (used(devices=[device(reasons={"hw_slowdown": 0.5})]), 1, []),
        (used(devices=[device(reasons={"hw_slowdown": 1.0}, readings=1)]), 1, []),
        (
            used(devices=[device(reasons={"hw_slowdown": 0.6})]),
            1,
            ["GPU 0 was slowed down, as its hardware asked for it"],
        ),
        (used(devices=[device(shared=0.0)]), 1, []),
        (used(devices=[device(shared=0.1)]), 1, ["another process was on GPU 0 too"]),
        (
            used(devices=[device(shared=0.1)], slices=Interval(seconds=1.0, devices=(device(shared=1.0),))),
            1,
            ["another process was on GPU 0 too"],
        ),
        (used(cores=cores(1.9)), 1, []),
        (used(cores=cores(0.5)), 0, []),
        (used(cores=cores(0.6)), 0, ["others used 0.6 of 2 cores during training"]),
        (used(cores=cores(0.6, available=3)), 0, []),
        (used(cores=cores(7.0, available=8)), 0, ["others used 7.0 of 8 cores during training"]),
        (
            used(slices=Interval(seconds=1.0, cores=cores(1.2))),
            0,
            ["others used 1.2 of 2 cores during its slices"],
        ),
        (used(cores=cores(0.0, throttled=0.05)), 0, []),
        (
            used(cores=cores(0.0, throttled=0.12)),
            0,
            ["the control group's limit of CPU time held it up for 12% of the time"],
        ),
    ],
)
def test_what_disturbs_a_training(usage, gpus, said):
    assert disturbances(record(usage, gpus=gpus)) == said


USED = {"tflops": 0.03, "roof_tflops": 0.14, "roof_share": 0.214, "energy_j_per_million_samples": 1234.0}
WIDE = {
    "energy_j_per_million_samples": 123_456_789.0,
    "roof_share": 0.000021,
    "training_seconds": 12345.67,
    "speedup": {"median": 10.01, "low": 10.01, "high": 11.11},
    "bound": {"median": 10.01, "low": 10.01, "high": 11.11},
    "scaling_efficiency": 1.11,
    "eval_loss": 12.3456,
    "above_floor": 10.123,
    "weights_sha256": "0123456789ab",
}


def test_whether_a_device_is_used_well_is_said_before_whether_it_is_shared_well():
    said = figures_in_words(comparison(row(**USED), row("ddp", devices=2)))
    assert said[0] == (
        "A device does 30 GFLOP/s in single-fast, 21% of the 140 GFLOP/s that a product of matrices of this "
        "precision reaches here."
    )
    assert said[1].startswith("ddp-fast")


def test_nothing_is_said_of_use_where_it_was_not_measured():
    assert say_use([row(tflops=0.1), row(roof_tflops=0.1)]) == []
    assert figures_in_words(comparison(row(), row("ddp", devices=2)))[0].startswith("ddp-fast")


def test_the_columns():
    found = dict(zip(HEADINGS, cells(row(**USED)), strict=True))
    assert (found["roof"], found["energy"]) == ("21%", "1.23 kJ")
    missing = dict(zip(HEADINGS, cells(row()), strict=True))
    assert (missing["roof"], missing["energy"]) == ("–", "–")


def test_gaps_are_said_once():
    gaps = {"energy_unavailable": WHY, "roof_unavailable": "RuntimeError: no", "uncounted": ("aten::a", "mine::b")}
    several = comparison(*(row(strategy, **gaps) for strategy in ("single", "dp", "ddp")))
    assert remarks(several) == [
        f"energy: {WHY}",
        "roof: RuntimeError: no",
        "roof: nothing is counted of aten::a, mine::b, for which PyTorch has no formula",
    ]
    assert markdown(several).count(WHY) == 1
    assert render(several).count(WHY) == 1


def test_a_record_is_read_as_it_was_written(tmp_path):
    usage = used(
        energy_j=5.0,
        devices=[device(counters={"power_w": {"mean": 1.0, "maximum": 2.0}}, shared=0.5)],
        cores=cores(0.5),
        roof=Roof(flops_per_step=1.0, uncounted=("aten::fft",)),
    )
    run_record(usage=usage).write(tmp_path / "run.json")
    read = type(run_record()).read(tmp_path / "run.json", made_by="")
    assert read.usage == usage
    older = json.loads((tmp_path / "run.json").read_text())
    del older["usage"]
    (tmp_path / "run.json").write_text(json.dumps(older))
    assert type(run_record()).read(tmp_path / "run.json", made_by="").usage is None
