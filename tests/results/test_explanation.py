"""Causes, advice and words, from breakdowns that say one thing each."""

import re

import pytest

from samebits.params import parse_params
from samebits.records.breakdown import (
    AllReduce,
    Bounds,
    Breakdown,
    Bucket,
    Launches,
    Phases,
    RankPhases,
    Reads,
    Traffic,
)
from samebits.remarks import Oversubscribed
from samebits.results.answers import explained_row
from samebits.results.comparison import SliceSteps
from samebits.results.explanation.causes import CAUSES, LEAST_SHARE, OF_THE_HOST
from samebits.results.explanation.explain import explain
from samebits.results.explanation.parts import mean_parts, plain_ms, turns_of
from samebits.results.explanation.remedies import REPLAYED_MS
from samebits.results.explanation.words import (
    NOTHING,
    advice_of,
    cause_of,
    say_explanation,
    say_losses,
)
from samebits.results.page.write import write_report
from samples import comparison, placed, ratio, row, run_record

TURNS = 6
MIB = 2**20


def turns(count=TURNS, **phases):
    return tuple(Phases(**phases) for _ in range(count))


def rank(noted, alone=None, *, threads=1):
    return RankPhases(noted=turns(**noted), alone=turns(**alone) if alone else (), threads=threads)


def breakdown(*ranks, step=None, half=None, gradient_bytes=4 * MIB, reduced=1, bus=1.0, latency_ms=0.1, buffers=0,
              floor_ms=0.1, flying_ms=20.0, **changes):  # fmt: skip
    steps = step or max(one.noted[0].total for one in ranks)
    several = len(ranks) > 1
    bucket = Bucket(size_bytes=gradient_bytes, ready_ms=1.0, done_ms=1.0 + flying_ms)
    return Breakdown(
        steps=4,
        plain_ms=(steps,) * TURNS,
        noted_ms=(steps,) * TURNS,
        ranks=ranks,
        traffic=Traffic(buckets=(bucket,) * reduced, gradient_bytes=gradient_bytes, buffer_bytes=buffers)
        if several
        else None,
        bounds=Bounds(
            all_reduces=(
                AllReduce(size_bytes=4096, ms=latency_ms, bus_gb_per_s=4096 / latency_ms / 1e6),
                AllReduce(size_bytes=gradient_bytes, ms=1.0, bus_gb_per_s=bus),
            )
            if several
            else (),
            copy_gb_per_s=20.0,
            optimizer_floor_ms=floor_ms,
            half_ms=(half,) * TURNS if half else None,
        ),
        **{"cores": 2, "other_cores": 0.0, **changes},
    )


SOUND = {"data": 0.2, "forward": 6.0, "backward": 12.0, "optimizer": 0.4, "host": 0.2}
SENDING = {**SOUND, "backward": 18.0}
SLOW = {**SOUND, "forward": 12.0}

SINGLE = None
SLICES, SENT = (SliceSteps(strategy=strategy, single=37.6, share=18.8, together=18.8) for strategy in (18.8, 24.8))

CASES = {
    # name: (breakdown, slices, first cause, predicted gain of its advice)
    "nothing, one device": (breakdown(rank(SOUND), half=9.4), SINGLE, None, None),
    "nothing, two devices": (breakdown(*[rank(SOUND, SOUND)] * 2), SLICES, None, None),
    "communication": (
        breakdown(*[rank(SENDING, SOUND)] * 2), SENT, "communication", 4 * 24.8 / (24.8 + 3 * 18.2),
    ),
    "slow link": (breakdown(*[rank(SENDING, SOUND)] * 2, bus=0.05), SENT, "slow_link", 4 * 24.8 / (24.8 + 3 * 18.2)),
    "latency is no slow link": (
        breakdown(*[rank(SENDING, SOUND)] * 2, bus=0.05, latency_ms=0.5), SENT, "small_batch", None,
    ),
    "reduced for each of four micro-batches": (
        breakdown(*[rank(SENDING, SOUND)] * 2, reduced=4), SENT, "reduced_often", 24.8 / (24.8 - 4.5),
    ),
    "straggler": (
        breakdown(rank({**SOUND, "backward": 18.0}, SOUND), rank({**SLOW, "backward": 12.0}, SLOW)),
        SliceSteps(strategy=24.8, single=37.6, share=18.8, together=24.8), "straggler", 24.8 / 18.8,
    ),
    "buffers": (
        breakdown(*[rank({**SOUND, "forward": 10.0}, SOUND)] * 2, buffers=MIB),
        SliceSteps(strategy=22.8, single=37.6, share=18.8, together=18.8), "buffers", 22.8 / 18.8,
    ),
    "a slower forward pass without buffers": (
        breakdown(*[rank({**SOUND, "forward": 10.0}, SOUND)] * 2), SENT, None, None,
    ),
    "input": (breakdown(rank({**SOUND, "data": 6.2})), SINGLE, "data", 24.8 / 18.6),
    "reads": (breakdown(rank(SOUND), reads=Reads(count=1000, ms=4.7)), SINGLE, "device_reads", 18.8 / 14.1),
    "busy host": (breakdown(rank({**SOUND, "queued": 18.8}), other_cores=2.0), SINGLE, "busy_host", 2.0),
    "queued, and nobody else is there": (breakdown(rank({**SOUND, "queued": 18.8})), SINGLE, None, None),
    "threads": (
        breakdown(rank(SOUND, threads=8), one_thread_ms=(9.4,) * TURNS), SINGLE, "own_threads", 2.0,
    ),
    "launches": (breakdown(rank(SOUND), half=17.0), SINGLE, "launch_bound", 4 * 18.8 / (18.8 + 6 * 1.8)),
    "too small to share": (
        breakdown(*[rank(SOUND, SOUND)] * 2),
        SliceSteps(strategy=18.8, single=30.0, share=18.8, together=18.8), "small_batch", 4 * 18.8 / (18.8 + 3 * 11.2),
    ),
    "optimizer": (
        breakdown(rank({**SOUND, "optimizer": 20.0}), floor_ms=5.0), SINGLE, "optimizer", 4 * 38.4 / (38.4 + 3 * 18.2),
    ),
    "an optimizer that launches more than it moves": (
        breakdown(rank({**SOUND, "optimizer": 20.0}), half=30.0), SINGLE, "launch_bound", None,
    ),
    "threads that send take a core": (
        breakdown(*[rank({**SOUND, "queued": 6.0}, SOUND)] * 2), SENT, "communication", 4 * 24.8 / (24.8 + 3 * 18.2),
    ),
    "dp's copies": (breakdown(rank({**SOUND, "replicate": 9.4})), SINGLE, "dp_copies", None),
    "one device is faster": (
        breakdown(*[rank(SOUND, SOUND)] * 2),
        SliceSteps(strategy=19.2, single=9.6, share=4.8, together=18.4), "contention", 2.0,
    ),
}  # fmt: skip


def explained(broken, slices=SINGLE, speedup=None):
    placement, _ = placed("ddp" if len(broken.ranks) > 1 else "single", gpus=0)
    if slices and speedup is None:
        speedup = ratio(slices.single / slices.strategy)
    return explain(run_record(placement.strategy, placement=placement, breakdown=broken), slices, speedup)


@pytest.mark.parametrize("name", CASES)
def test_the_first_cause_and_the_gain_of_its_advice(name):
    broken, slices, cause, gain = CASES[name]
    explanation = explained(broken, slices)
    first = explanation.findings[0] if explanation.findings else None
    assert (first and first.cause) == cause
    if gain:
        assert first.gain.median == pytest.approx(gain, rel=1e-3)
    assert [finding.share for finding in explanation.findings] == sorted(
        (finding.share for finding in explanation.findings), reverse=True
    )
    assert all(finding.share >= LEAST_SHARE for finding in explanation.findings)


def test_the_straggler_has_its_rank_and_its_phase():
    first = explained(*CASES["straggler"][:2]).findings[0]
    assert (first.rank, first.phase) == (1, "forward")
    assert "rank 1, whose forward pass takes longer" in cause_of(first)


@pytest.mark.parametrize(
    ("own", "others", "named"), [((1, 1, 1, 1, 1, 1), 0.0, True), ((1, 1, 0, 1, 1, 1), 0.0, False),
                                 ((1,) * 6, 0.5, False), ((1,) * 6, None, False)]
)  # fmt: skip
def test_a_straggler_is_the_same_rank_in_every_turn_of_a_quiet_host(own, others, named):
    noted = [Phases(**{**SOUND, "backward": 18.0})] * TURNS
    alone = [[Phases(**(SLOW if slow == number else SOUND)) for slow in own] for number in (0, 1)]
    ranks = [RankPhases(noted=tuple(noted), alone=tuple(one), threads=1) for one in alone]
    causes = [finding.cause for finding in explained(breakdown(*ranks, other_cores=others), None).findings]
    assert ("straggler" in causes) is named


def test_communication_takes_no_longer_than_all_reduces_were_in_flight():
    """The rest is DDP's own work, which shows where launches take longer than kernels."""
    slices = SliceSteps(strategy=24.8, single=37.6, share=18.8, together=18.8)
    explanation = explained(breakdown(*[rank(SENDING, SOUND)] * 2, flying_ms=2.0), slices)
    parts, losses = explanation.parts, explanation.losses
    assert (parts.communication, parts.wrapper, parts.waiting) == pytest.approx((2.0, 4.0, 0.0))
    assert (losses.communication, losses.wrapper, losses.unexplained) == pytest.approx((2.0, 4.0, 0.0))
    assert re.search(r"DDP's own work +\+4 ms", say_explanation("ddp-fast", explanation))
    (finding,) = explanation.findings
    assert (finding.cause, finding.lost_ms) == ("small_batch", pytest.approx(4.0))
    assert finding.evidence[-1].name == "DDP's own work on the host, as long for a larger batch"


@pytest.mark.parametrize(
    ("flights", "ms"),
    [((), 0.0), (((1, 3),), 2.0), (((1, 3), (2, 5)), 4.0), (((4, 5), (1, 3)), 3.0), (((1, 9), (2, 3), (10, 11)), 9.0)],
)
def test_buckets_may_be_in_flight_together(flights, ms):
    buckets = tuple(Bucket(size_bytes=4, ready_ms=ready, done_ms=done) for ready, done in flights)
    assert Traffic(buckets=buckets, gradient_bytes=4, buffer_bytes=0).in_flight_ms == ms


LAUNCHES = Launches(passes=45, rest=15)


@pytest.mark.parametrize(
    ("gpus", "train", "launches", "half", "remedy"),
    [
        (1, {}, LAUNCHES, 0.6, "fewer_launches"),
        (1, {}, None, 0.6, "larger_batch"),  # nobody has counted them
        (1, {}, Launches(passes=2, rest=58), 0.6, "larger_batch"),  # those of the optimizer stay
        (1, {}, Launches(passes=450, rest=150), 0.6, "larger_batch"),  # the device takes as long
        (1, {"cuda_graphs": True}, LAUNCHES, 0.6, "larger_batch"),
        (1, {"compile": True}, LAUNCHES, 0.6, "larger_batch"),
        (1, {"grad_accum_steps": 2}, LAUNCHES, 0.6, "larger_batch"),
        (0, {}, LAUNCHES, 0.6, "larger_batch"),  # a CPU has no graphs
    ],
)
def test_where_launches_bind_fewer_of_them_are_advised(gpus, train, launches, half, remedy):
    params = parse_params({"train": train})
    short = {"forward": 0.2, "backward": 0.3, "optimizer": 0.1}
    broken = breakdown(rank(short), half=half, floor_ms=0.001, launches=launches)
    record = run_record(placement=placed("single", params, gpus=gpus)[0], breakdown=broken, params=params)
    (finding,) = explain(record, None, None).findings
    assert (finding.cause, finding.remedy) == ("launch_bound", remedy)
    shown = {one.name: one.value for one in finding.evidence}
    if remedy == "fewer_launches":
        assert finding.change == {"train.cuda_graphs": True}
        assert finding.gain.median == pytest.approx(0.6 / (0.6 - 45 * (0.6 / 60 - REPLAYED_MS)))
        assert (shown["launches of a step"], shown["of these, in the passes"]) == (60, 45)
        said = advice_of(finding)
        assert said.startswith("Next: set train.cuda_graphs: true, ")
        assert "train.compile: true" in said
        assert "Predicted: 2.50 times" in said


@pytest.mark.parametrize(("strategy", "remedy"), [("ddp", "fewer_launches"), ("dp", "larger_batch")])
def test_a_share_that_launches_bind_is_told_so(strategy, remedy):
    """Each device launches as much for its share of the batch as one device for the whole."""
    short = {"forward": 0.2, "backward": 0.3, "optimizer": 0.1}
    ranks = [rank(short, short)] * 4 if strategy == "ddp" else [rank(short)]
    placement = placed(strategy, gpus=4)[0]
    broken = breakdown(*ranks, floor_ms=0.001, launches=LAUNCHES)
    slices = SliceSteps(strategy=0.6, single=0.6, share=0.6, together=0.6 if strategy == "ddp" else None)
    record = run_record(strategy, placement=placement, breakdown=broken)
    (finding,) = explain(record, slices, ratio(1.0, 0.9, 1.1)).findings
    assert (finding.cause, finding.remedy) == ("small_batch", remedy)
    if remedy == "fewer_launches":
        assert finding.gain.median == pytest.approx(0.6 / (0.6 - 45 * (0.6 / 60 - REPLAYED_MS)))


def test_workers_that_share_a_gpu_are_told_so_in_place_of_communication():
    """No phase of a worker shows how long it waits for the kernels of another one."""
    placement = placed("ddp", gpus=2)[0]
    label = Oversubscribed(workers=4, devices=2, device="GPU")
    shared = placement.model_copy(update={"labels": (label,)})
    for one, cause in ((placement, "communication"), (shared, "oversubscribed")):
        record = run_record(placement=one, breakdown=breakdown(*[rank(SENDING, SOUND)] * 2))
        assert [finding.cause for finding in explain(record, None, None).findings] == [cause]


@pytest.mark.parametrize(
    ("data", "train", "change", "said"),
    [
        (4, {}, {"train.grad_accum_steps": 4, "train.global_batch_size": 4}, "4 times"),
        (3, {}, {"train.grad_accum_steps": 3, "train.global_batch_size": 3}, "3 times"),
        (1, {}, {"train.grad_accum_steps": 4, "train.global_batch_size": 4, "data.num_samples": 4}, "takes 4 times"),
        (4, {"cuda_graphs": True}, {"train.global_batch_size": 4}, "4 times as large, and adapt the learning rate"),
    ],
)
def test_advice_can_be_followed(data, train, change, said):
    """The data have enough samples for it, and it does not turn CUDA graphs off."""
    params = parse_params({"data": {"num_samples": 4096 * data}, "train": train})
    record = run_record(placement=placed("ddp", gpus=2)[0], breakdown=breakdown(*[rank(SENDING, SOUND)] * 2))
    record = record.model_copy(update={"params": params})
    first = explain(record, SENT, None).findings[0]
    assert (first.cause, first.change) == ("communication", change)
    assert said in advice_of(first)


@pytest.mark.parametrize(
    ("loaders", "wait", "ranks", "cores", "workers", "step"),
    [
        (1, 12.4, 1, 8, 2, 18.6),  # loading takes 31 ms of one process
        (1, 12.4, 1, 2, None, 18.6),
        (2, 12.4, 2, 8, 3, 62 / 3),  # two processes are busy for 31 ms, and four would be needed
        (2, 12.4, 2, 6, None, 18.6),
        (0, 12.4, 1, 2, 1, 18.6),
        (0, 24.8, 1, 2, 1, 24.8),
        (0, 24.8, 1, 1, None, 18.6),
    ],
)
def test_more_loading_processes_are_advised_as_far_as_there_are_cores(loaders, wait, ranks, cores, workers, step):
    params = parse_params(
        {"data": {"task": "dataset"}, "model": {"name": "mine:make"}, "train": {"loader": {"num_workers": loaders}}}
    )
    noted = {**SOUND, "data": wait}
    broken = breakdown(*[rank(noted, noted)] * ranks, cores=cores)
    record = run_record(placement=placed("ddp" if ranks > 1 else "single", gpus=0)[0], breakdown=broken)
    first = explain(record.model_copy(update={"params": params}), None, None).findings[0]
    assert (first.cause, first.change.get("train.loader.num_workers")) == ("data", workers)
    assert first.gain.median == pytest.approx((18.6 + wait) / step)
    assert (f"load samples with {workers} processes for each rank" if workers else "no core here") in advice_of(first)


@pytest.mark.parametrize("name", CASES)
def test_parts_add_up_to_the_step_and_losses_to_the_distance(name):
    broken, slices, *_ = CASES[name]
    explanation = explained(broken, slices)
    assert explanation.parts.total == pytest.approx(explanation.step_ms)
    if losses := explanation.losses:
        lost = sum(losses.model_dump(exclude={"ideal_ms"}).values())
        assert losses.ideal_ms + lost == pytest.approx(slices.strategy)


@pytest.mark.parametrize(
    ("changes", "less_ms"),
    [({"reduced": 4}, 6.0 * 3 / 4), ({"one_thread_ms": (0.8 * 24.8,) * TURNS}, 0.2 * 24.8)],
    ids=["reduced more than once", "threads"],
)
def test_a_small_batch_is_not_blamed_for_what_has_a_name_of_its_own(changes, less_ms):
    def lost(**kwargs):
        broken = breakdown(*[rank(SENDING, SOUND)] * 2, latency_ms=0.5, **kwargs)
        found = explained(broken, SliceSteps(strategy=24.8, single=37.6, share=24.0, together=18.8)).findings
        return next(finding.lost_ms for finding in found if finding.cause == "small_batch")

    assert lost() - lost(**changes) == pytest.approx(less_ms)


UNSTEADY = "This host was too unsteady to say what shares of a step its parts have: "


@pytest.mark.parametrize(
    ("slices", "why"),
    [
        (SliceSteps(strategy=25.0, single=37.6, share=28.8), ""),
        (SliceSteps(strategy=40.0, single=37.6, share=28.8), "a step took 40 ms beside one device, and 24.8 ms "),
        (SliceSteps(strategy=16.0, single=37.6, share=15.0), "a step took 16 ms beside one device, and 24.8 ms "),
        (
            SliceSteps(strategy=25.0, single=266.0, share=1422.0),
            "its share of the batch took one device 1422 ms, and the whole batch 25 ms",
        ),
        (
            SliceSteps(strategy=25.0, single=15.0, share=24.0),
            "its share of the batch took one device 24 ms, and the whole ",
        ),
        (
            SliceSteps(strategy=25.0, single=37.6, share=18.8, together=22.0),
            "what is sent took 3 ms of a step beside one device, and 6 ms a moment later",
        ),
    ],
)
def test_slices_of_another_moment_blame_nobody(slices, why):
    explanation = explained(breakdown(*[rank(SENDING, SOUND)] * 2, latency_ms=0.5), slices)
    assert (explanation.losses is None, explanation.unsteady is not None) == (bool(why),) * 2
    assert (explanation.findings == ()) == bool(why)
    states = {one.state for one in explanation.looked_for if one.cause not in OF_THE_HOST}
    assert (states == {"not_judged"}) == bool(why)
    said = say_explanation("ddp-fast", explanation)
    assert (f"{UNSTEADY}{why}" in said) == bool(why)
    assert ("%" in said, "Predicted" in said) == (not why,) * 2
    assert all(finding.gain.low >= 1 for finding in explanation.findings if finding.gain)


@pytest.mark.parametrize("factor", [0.85, 1.0, 1.2])
@pytest.mark.parametrize("name", ["communication", "straggler", "buffers", "threads that send take a core"])
def test_all_figures_of_a_run_have_one_step_as_their_base(name, factor):
    """The profiling pass comes a moment later, when the host is faster or slower."""
    broken, slices, *_ = CASES[name]
    slices = SliceSteps(**{key: factor * ms for key, ms in slices if ms is not None})
    explanation = explained(broken, slices)
    parts, losses = explanation.parts, explanation.losses
    assert explanation.step_ms == parts.total == pytest.approx(slices.strategy)
    assert losses.waiting == parts.waiting
    queued = parts.queued if name == "threads that send take a core" else 0
    assert losses.communication == pytest.approx(parts.communication + queued)
    assert losses.communication + losses.buffers == pytest.approx(slices.strategy - slices.together)
    assert losses.unexplained == pytest.approx(0, abs=1e-9)


def test_a_share_that_is_not_compiled_as_the_batch_is_shows_no_unsteady_host():
    """Under dp, the step of one device is captured or compiled, and that of its share is not."""
    params = parse_params({"train": {"compile": True}})
    for strategy in ("dp", "ddp"):
        record = run_record(placement=placed(strategy, gpus=2)[0], breakdown=breakdown(rank(SOUND)), params=params)
        explanation = explain(record, SliceSteps(strategy=18.8, single=8.0, share=18.0), None)
        assert (explanation.unsteady is None) == (strategy == "dp")


@pytest.mark.parametrize(("speedup", "named"), [(ratio(0.9, 0.85, 0.95), True), (ratio(0.99, 0.95, 1.04), False)])
def test_one_device_is_advised_where_it_is_shown_to_be_faster(speedup, named):
    slices = SliceSteps(strategy=19.2, single=18.8, share=9.6, together=18.4)
    findings = explained(breakdown(*[rank(SOUND, SOUND)] * 2), slices, speedup).findings
    gains = [finding.gain for finding in findings if finding.cause == "contention"]
    expected = pytest.approx((1 / 0.9, 1 / 0.95, 1 / 0.85))
    assert [(gain.median, gain.low, gain.high) for gain in gains] == [expected] * named


def test_workers_that_share_a_device_are_what_to_change():
    placement = placed("ddp", parse_params({"train": {"oversubscribe": True, "num_devices": 2}}), gpus=0, cores=1)[0]
    broken = breakdown(*[rank({**SOUND, "queued": 18.8}, SOUND)] * 2, other_cores=2.0)  # which is no busy host here
    (finding,) = explain(run_record(placement=placement, breakdown=broken), None, None).findings
    assert (finding.cause, finding.remedy, finding.gain) == ("oversubscribed", "share_no_device", None)
    assert "train.oversubscribe: false" in advice_of(finding)


def test_of_gains_no_more_is_said_to_be_lost_than_a_step_takes():
    losses = {"ideal_ms": 31.4, "fixed": 7.3, "contention": -2.0, "communication": 2.2, "wrapper": 0.0, "waiting": 0.0,
              "buffers": 0.0, "copies": 0.0, "unexplained": 0.0}  # fmt: skip
    for contention in (-2.0, -9.2):
        explanation = explained(breakdown(*[rank(SOUND, SOUND)] * 2), SLICES)
        lost = explanation.losses.model_validate({**losses, "contention": contention})
        explanation = explanation.model_copy(update={"losses": lost})
        shares = re.findall(r"(-?\d+)%", "\n".join(say_losses(explanation)))
        assert all(abs(int(share)) <= 100 for share in shares), shares


def test_the_run_that_is_explained_is_ddps_in_whatever_order_they_stand():
    explanation = explained(breakdown(*[rank(SOUND, SOUND)] * 2), SLICES)
    rows = [row("ddp", devices=2, explanation=explanation), row("dp", devices=2, explanation=explanation)]
    assert [explained_row(comparison(*order)).strategy for order in (rows, rows[::-1])] == ["ddp", "ddp"]


def test_a_step_that_is_faster_than_ideal_has_lost_nothing():
    explanation = explained(breakdown(*[rank(SOUND, SOUND)] * 2), SliceSteps(strategy=18.8, single=45.0, share=18.0))
    assert "No step is longer than that." in say_explanation("ddp-fast", explanation)


def test_the_slowest_turns_do_not_count():
    """A turn counts with both kinds of its steps, or with neither."""
    steps = [20.0] * 4 + [500.0, 80.0]
    noted = tuple(Phases(forward=step) for step in steps)
    one = RankPhases(noted=noted, alone=(), threads=1)
    plain = (21.0, 22.0, 19.0, 18.0, 15.0, 90.0)
    broken = breakdown(one).model_copy(update={"noted_ms": tuple(steps), "plain_ms": plain})
    assert mean_parts(turns_of(broken)).forward == plain_ms(broken) == 20.0


def test_without_a_breakdown_there_is_no_explanation():
    assert explain(run_record(breakdown=None), None, None) is None


@pytest.mark.parametrize("name", [name for name, (*_, cause, _) in CASES.items() if cause])
def test_words_have_the_share_the_figures_and_the_gain(name):
    explanation = explained(*CASES[name][:2])
    first = explanation.findings[0]
    text = say_explanation("ddp-fast", explanation)
    assert f"   {cause_of(first)}" in text
    assert re.search(r"^1\. [A-Z].*", text, flags=re.MULTILINE)
    assert f"{first.share:.0%} of a step." in cause_of(first)
    assert "{" not in text
    told = advice_of(first)
    assert (f"Predicted: {first.gain.median:.2f} times" if first.gain else "use ddp, which copies") in told
    assert all(one.name in text for one in first.evidence)


def test_nothing_wrong_is_said():
    assert NOTHING in say_explanation("single-fast", explained(*CASES["nothing, one device"][:2]))


# -- the report ------------------------------------------------------------------------------------------------


def report_of(name):
    explanation = explained(*CASES[name][:2])
    slices = CASES[name][1]
    return comparison(
        row("single", explanation=explained(*CASES["nothing, one device"][:2]), speedup=ratio(1.0)),
        row("ddp", devices=2, explanation=explanation, speedup=ratio(1.5), slice_step_ms=slices),
    )


def test_the_report_has_causes_and_figures_where_a_step_was_divided(tmp_path):
    write_report(report_of("communication"), tmp_path)
    page = (tmp_path / "index.html").read_text()
    for text in (
        "gradients are sent for longer than the backward pass can hide",
        "6 ms of a step",
        "its bus bandwidth",
    ):
        assert text in page
    write_report(comparison(row("single"), row("ddp", devices=2)), tmp_path)
    assert "No step was divided into parts" in (tmp_path / "index.html").read_text()
    assert (tmp_path / "breakdown.csv").read_text() == "run,part,milliseconds\n"


def test_the_table_of_parts_is_written(tmp_path):
    write_report(report_of("communication"), tmp_path)
    lines = (tmp_path / "breakdown.csv").read_text().splitlines()
    assert "ddp-fast,communication that is not hidden,6.0" in lines


@pytest.mark.parametrize(
    ("name", "found", "not_judged"),
    [
        ("straggler", ["straggler"], ["contention"]),
        ("busy host", ["busy_host"], []),
        ("nothing, one device", [], []),
        ("nothing, two devices", [], ["contention"]),
        ("latency is no slow link", ["small_batch"], ["contention"]),
    ],
)
def test_every_cause_was_found_or_not_found_or_could_not_be_judged(name, found, not_judged):
    looked = explained(*CASES[name][:2]).looked_for
    assert [one.cause for one in looked] == list(CAUSES)
    assert [one.cause for one in looked if one.state == "found"] == found
    assert {one.cause: bool(one.why) for one in looked if one.state == "not_judged"} == dict.fromkeys(not_judged, True)
    assert all(one.ms >= 0 for one in looked if one.state == "found")


@pytest.mark.parametrize(
    ("others", "why"),
    [(None, "the cores that other processes use cannot be read here"),
     (0.25, "other processes used 0.2 cores, and may slow a rank down as well")],
)  # fmt: skip
def test_why_no_straggler_could_be_told(others, why):
    looked = explained(breakdown(*[rank(SENDING, SOUND)] * 2, other_cores=others), SENT).looked_for
    told = {one.cause: one.why for one in looked if one.state == "not_judged"}
    assert told["straggler"] == why
    assert ("busy_host" in told) is (others is None)
