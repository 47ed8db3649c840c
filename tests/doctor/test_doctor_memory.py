"""The largest batch that fits: forecast, tried, and told."""

import json
import signal
from functools import partial

import pytest
import torch

from conftest import small
from samebits.doctor import fitting, memory, memory_trial
from samebits.doctor.finding import Finding
from samebits.doctor.fitting import Bracket, Case, Estimate, Forecast, largest_batch, search
from samebits.doctor.memory_trial import FULL, STEP_MEMORY, Attempt, StepMemory
from samebits.errors import HostError, UserError
from samebits.files import write_json
from samebits.params import parse_params
from samebits.strategies.placement import Devices
from samebits.workers.processes import WorkerSignalledError
from samples import memory as taken
from standins import raising

MIB = 2**20


# -- the search ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("first", [8, 400, 1000, 1016, 5000])
@pytest.mark.parametrize(
    ("limit", "expected"),
    [(1000, Bracket(1000, 1008)), (8, Bracket(8, 16)), (0, Bracket(None, 8)), (4000, Bracket(2048, None))],
)
def test_the_search_ends_between_neighbours(first, limit, expected):
    tried = []

    def fits(samples):
        tried.append(samples)
        return samples <= limit

    assert search(fits, first, unit=8, most=2048, precision=0) == expected
    assert len(tried) == len({*tried}) <= 20
    assert all(samples % 8 == 0 and 8 <= samples <= 2048 for samples in tried)


@pytest.mark.parametrize("off", [0.8, 0.95, 1.0, 1.05, 1.3])
def test_a_good_forecast_needs_few_trials(off):
    tried = []

    def fits(samples):
        tried.append(samples)
        return samples <= 100_000

    fitted, failed = search(fits, int(100_000 * off), unit=4, most=10**6)
    assert fitted <= 100_000 < failed <= fitted * 1.02
    assert len(tried) <= 9


# -- a forecast from two looks -----------------------------------------------------------------------------------


def step(samples, peaks, rooms):
    return StepMemory(memory=taken(samples=samples), peaks=peaks, rooms=rooms)


@pytest.mark.parametrize(
    ("small", "large", "rooms", "expected"),
    [
        # 10 bytes a sample on top of 100: 700 are left for 70 more than 20
        ((200,), (300,), [1000], Forecast(90, 0)),
        ((200,), (300,), [1009], Forecast(90, 0)),
        ((200,), (300,), [250], Forecast(15, 0)),  # less than what was measured
        ((200,), (300,), [50], Forecast(0, 0)),
        ((300,), (300,), [1000], None),  # no line rises
        ((300,), (200,), [1000], None),
        # of dp: the first device gathers, and is full first
        ((250, 50), (400, 100), [1000, 1000], Forecast(60, 0)),
        # but not where the others have less
        ((250, 50), (400, 100), [1000, 200], Forecast(40, 1)),
        ((300, 50), (300, 100), [1000, 200], Forecast(40, 1)),
    ],
)
def test_the_device_that_is_full_first_sets_the_batch(small, large, rooms, expected):
    assert largest_batch(step(10, small, rooms), step(20, large, rooms)) == expected


def test_two_looks_at_one_batch_say_nothing():
    with pytest.raises(AssertionError, match="two different batches"):
        largest_batch(step(10, (1,), [1]), step(10, (2,), [1]))


# -- a case, with made-up workers ------------------------------------------------------------------------------


def make_case(folder, *, strategy="single", numerics="fast", gpus=0, limit=None, num_samples=4096, **train):
    raw = small(numerics=[numerics], **train)
    raw["data"]["num_samples"] = num_samples
    facts = {"strategy": strategy, "numerics": numerics, "machine": Devices(gpus=gpus, cores=2), "seconds": 60}
    return Case(params=parse_params(raw), data_dir=folder, folder=folder, limit=limit, **facts)


@pytest.mark.parametrize(
    ("strategy", "numerics", "gpus", "train", "unit", "most"),
    [
        ("single", "fast", 0, {}, 1, 4090),
        ("single", "fast", 0, {"grad_accum_steps": 4}, 4, 4088),
        ("ddp", "fast", 0, {"grad_accum_steps": 4}, 8, 4088),
        ("dp", "fast", 4, {}, 4, 4088),
        ("ddp", "exact", 2, {}, 8, 4088),
    ],
)
def test_batches_that_can_be_tried(strategy, numerics, gpus, train, unit, most, tmp_path):
    case = make_case(tmp_path, strategy=strategy, numerics=numerics, gpus=gpus, num_samples=4090, **train)
    assert (case.unit, case.most) == (unit, most)


@pytest.fixture
def made_up(monkeypatch):
    """Workers whose steps take ``fixed + per_sample * samples`` of ``room``; what they were asked to try is kept."""

    def be(room, *, fixed=1000, per_sample=10, bend=0):
        tried = []

        def launch(function, _workers):
            (attempt,) = function.args[0].args
            samples = attempt.split.samples
            tried.append(samples)
            tensors = max(fixed + per_sample * samples, 2 * per_sample * (samples - bend) if bend else 0)
            if tensors > room:
                (attempt.out / FULL).touch()
                raise HostError("out of memory", hint="none")
            seen = StepMemory(memory=taken({"activations": tensors}, samples=samples), peaks=(tensors,), rooms=(room,))
            write_json(attempt.out / STEP_MEMORY, seen.model_dump(mode="json"))

        monkeypatch.setattr(fitting, "launch", launch)
        return tried

    return be


def test_batches_grow_until_the_forecast_is_near(made_up, tmp_path):
    tried = made_up(21_000)
    estimate = make_case(tmp_path, global_batch_size=64).estimate()
    assert estimate.forecast == Forecast(2000, 0)
    assert tried == [16, 32, 128, 512, 1000]


def test_a_line_that_bends_is_followed(made_up, tmp_path):
    """The peak of a small batch is the optimizer's, that of a large one the forward pass's."""
    made_up(21_000, fixed=5000, per_sample=10, bend=1)
    assert make_case(tmp_path).estimate().forecast.samples == 1051


@pytest.mark.parametrize(
    ("room", "tried", "forecast", "start"),
    [
        (900, [16, 4, 1], None, None),  # nothing fits
        (1015, [16, 4, 1, 2], None, 1),
        (1025, [16, 4, 1, 2], Forecast(2, 0), 2),
        (10**6, [16, 32, 128, 512, 2048, 4096], Forecast(99_900, 0), 4096),  # more than there are samples
    ],
)
def test_where_growing_ends(room, tried, forecast, start, made_up, tmp_path):
    asked = made_up(room)
    estimate = make_case(tmp_path, global_batch_size=64).estimate()
    assert asked == tried
    assert (estimate and estimate.forecast, estimate and estimate.start) == (forecast, start)


def test_another_error_of_a_training_is_not_out_of_memory(tmp_path, monkeypatch):
    case = make_case(tmp_path)
    monkeypatch.setattr(fitting, "launch", raising(UserError("wrong", hint="mend it")))
    with pytest.raises(UserError, match="wrong"):
        case.fits(64, limit=None, at_once=True)


@pytest.mark.parametrize(("signum", "fits"), [(signal.SIGKILL, False), (signal.SIGABRT, False), (signal.SIGALRM, None)])
def test_a_worker_that_a_signal_ended(signum, fits, tmp_path, monkeypatch):
    case = make_case(tmp_path)
    monkeypatch.setattr(fitting, "launch", raising(WorkerSignalledError(0, signum)))
    if fits is None:
        with pytest.raises(HostError, match="took longer than 60 s"):
            case.fits(64, limit=None, at_once=True)
    else:
        assert case.fits(64, limit=None, at_once=True) == fits
        with pytest.raises(WorkerSignalledError):  # a small batch that crashes is no matter of memory
            case.estimate()


# -- what is said ----------------------------------------------------------------------------------------------


@pytest.fixture
def said(tmp_path, monkeypatch):
    """The last finding about a case whose largest batches are so and so, at once and as a training runs."""

    def say(largest, usual, *, strategy="single", gpus=0, forecast=None, start=None, rooms=(8 * MIB,), **settings):
        devices = [{"activations": MIB}] * len(rooms)
        step = StepMemory(memory=taken(*devices, samples=64), peaks=rooms, rooms=rooms)
        estimate = Estimate(step, forecast, start or (forecast.samples if forecast else 4096))
        monkeypatch.setattr(Case, "estimate", lambda _: estimate)
        limits = {True: largest, False: usual}
        monkeypatch.setattr(Case, "fits", lambda _, samples, *, limit, at_once: samples <= limits[at_once])
        *_, last = memory._findings_of(make_case(tmp_path, strategy=strategy, gpus=gpus, **settings))
        assert last.name == "memory"
        return last

    return say


BOTH = {"strategy": "dp", "gpus": 2, "rooms": (8 * MIB, 16 * MIB)}
KEPT = "; but {} while the C library keeps freed memory as it likes: "
KEPT += "MALLOC_MMAP_THRESHOLD_=65536 MALLOC_TRIM_THRESHOLD_=65536 make it give that back at once"


@pytest.mark.parametrize(
    ("largest", "usual", "facts", "text"),
    [
        (1000, 1000, {"forecast": Forecast(990, 0)},
         "single-fast: forecast a batch of 990 in 8 MiB; tried: 990 fits and 1,009 does not"),
        (9999, 9999, {},
         "single-fast: forecast all 4,096 samples of the data set in 8 MiB; tried: 4,096 fits, and there are no more"),
        (64, 64, {"start": 63},  # as many as are wanted
         "single-fast: too near the end of 8 MiB for a forecast; tried: 64 fits and 65 does not"),
        (1000, 500, {"forecast": Forecast(1000, 0)},  # what the C library keeps decides on a CPU
         "single-fast: forecast a batch of 1,000 in 8 MiB; tried: 1,000 fits and 1,020 does not"
         + KEPT.format("500 fits and 510 does not")),
        (1000, 50, {"forecast": Forecast(1000, 0)},
         "single-fast: forecast a batch of 1,000 in 8 MiB; tried: 1,000 fits and 1,020 does not"
         + KEPT.format("50 fits and 51 does not") + "; params.yaml asks for 64"),
        (1000, 0, {"forecast": Forecast(990, 0), **BOTH},
         "dp-fast: forecast a batch of 990 in 8 MiB of device 0, which also holds what dp gathers; tried: "),
        (1000, 0, {"forecast": Forecast(990, 1), **BOTH},
         "dp-fast: forecast a batch of 990 in 16 MiB of device 1; tried: "),
        (0, 0, {"forecast": Forecast(10, 0)},
         "single-fast: forecast a batch of 10 in 8 MiB; tried: 1 does not fit; params.yaml asks for 64"),
    ],
    ids=["some", "all", "near", "kept", "too much kept", "gathered", "the other device", "none"],
)  # fmt: skip
def test_what_was_forecast_and_what_was_tried(largest, usual, facts, text, said):
    found = said(largest, usual, **facts)
    assert found.text.startswith(text) if text.endswith(": ") else found.text == text
    failed = "asks for" in text
    assert (found.status, found.exit_code) == (("failed", 3) if failed else ("ok", 0))
    assert not failed or "grad_accum_steps" in found.hint


def test_dp_without_gpus_is_as_single(tmp_path):
    (found,) = memory._findings_of(make_case(tmp_path, strategy="dp"))
    assert (found.status, found.text.partition(",")[0]) == ("skipped", "dp-fast: as single")


def test_wrong_params_and_damaged_data(tmp_path):
    (tmp_path / "card.json").write_text("{")
    for text, told in (("sed: 0\n", ("skipped", "memory", 0)), ("seed: 0\n", ("failed", "data", 2))):
        (tmp_path / "params.yaml").write_text(text)
        (found,) = memory.memory_findings(tmp_path / "params.yaml", data_dir=tmp_path)
        assert (found.status, found.name, found.exit_code) == told
        assert ("params.yaml is wrong, as its line says" in found.text) == (found.status == "skipped")


def test_a_case_that_cannot_be_tried_is_named_and_the_next_one_is(tmp_path, data_dir, monkeypatch):
    raw = small(strategies=["single", "ddp"], numerics=["fast"], num_devices=2, oversubscribe=True)
    (tmp_path / "params.yaml").write_text(json.dumps(raw))  # which is YAML too

    def launch(function, _workers):
        raise UserError("wrong", hint="mend it")  # another one for each case, which gets its name

    monkeypatch.setattr(fitting, "launch", launch)
    _, *rest = memory.memory_findings(tmp_path / "params.yaml", data_dir=data_dir(parse_params(raw)))
    told = [(found.name, found.status, found.text, found.exit_code) for found in rest]
    assert told == [("memory", "failed", f"{name}-fast: wrong", 2) for name in ("single", "ddp")]


@pytest.mark.parametrize(
    ("error", "full"), [(torch.OutOfMemoryError("CUDA out of memory"), True), (ValueError("another"), False)]
)
def test_only_a_worker_out_of_memory_leaves_a_mark(error, full, tmp_path, monkeypatch):
    monkeypatch.setattr(memory_trial.MemoryTrialRank, "_train", raising(error))
    case, facts = make_case(tmp_path), {"out": tmp_path, "limit": None, "at_once": True, "measured": False}
    split = case.params.batch_split("fast")
    attempt = Attempt(case=case, params=case.params, placement=case.placement, split=split, **facts)
    with pytest.raises(type(error)):
        memory_trial.MemoryTrialRank(attempt).run()
    assert (tmp_path / FULL).exists() is full


# -- real trials -----------------------------------------------------------------------------------------------


@pytest.fixture
def doctor(repo, stage):
    """Run ``samebits doctor --memory`` in a repository, and give its lines about memory."""
    script = repo / "command.py"
    script.write_text("from samebits.cli import main\nmain()\n")

    def run(*arguments):
        done = stage.run_script(script, "doctor", "--json", *arguments)
        findings = [Finding(**finding) for finding in json.loads(done.stdout)["findings"]]
        return done.returncode, [finding for finding in findings if finding.name == "memory"]

    return run


def test_the_whole_command(doctor, stage):
    stage.write_params(small(strategies=["single", "dp"]))
    code, (parts, outcome, dp) = doctor("--memory", "--model")
    assert (code, parts.status, outcome.status, dp.status) == (0, "ok", "ok", "skipped")
    assert parts.text.startswith("single-fast: a step of 512 samples takes ")
    assert outcome.text.endswith("; tried: 512 fits, and there are no more")


def test_a_device_that_is_too_small(doctor, stage):
    stage.write_params(small(strategies=["single"]))
    code, (found,) = doctor("--memory-gib", "0.01")
    assert (code, found.status) == (3, "failed")
    assert found.text == "single-fast: not even a batch of 1 fits in 10 MiB"


def test_ddp_and_exact_are_measured_too(tmp_path, data_dir):
    for strategy, numerics, devices in (("ddp", "fast", 2), ("single", "exact", 1)):
        case = make_case(tmp_path, strategy=strategy, numerics=numerics, num_samples=512)
        seen = fitting.Case.estimate(case.__class__(**{**case.__dict__, "data_dir": data_dir(case.params)})).step.memory
        assert len(seen.devices) == devices
        assert all(device.activations > 128 * 4 * seen.samples // devices for device in seen.devices)
        # ddp's gradients lie in buckets that stay; the exact ones come after the peak of the forward pass.
        assert (seen.devices[0].gradients >= seen.devices[0].weights) == (strategy == "ddp")


@pytest.mark.slow
@pytest.mark.parametrize("task", ["vectors", "images", "tokens"])
def test_the_forecast_is_within_a_tenth_of_the_truth(task, tmp_path, data_dir):
    """Where freed memory goes back at once; `benchmarks/memory_forecast.py` measures it otherwise."""
    model = {"name": "gpt", "kwargs": {"width": 64}} if task == "tokens" else None
    raw = small(task, model=model, global_batch_size=16)
    params = parse_params(raw)
    facts = {"strategy": "single", "numerics": "fast", "machine": Devices(gpus=0, cores=1), "seconds": 120}
    case = Case(params=params, data_dir=data_dir(params), folder=tmp_path, limit=None, **facts)
    own = case.estimate().step.memory.devices[0].baseline
    limit = own + 64 * MIB
    wide = params.model_copy(update={"data": params.data.model_copy(update={"num_samples": 10**6})})
    case = Case(params=wide, data_dir=data_dir(params), folder=tmp_path, limit=limit, **facts)
    forecast = case.estimate().forecast
    fits = partial(case.fits, limit=limit, at_once=True)
    bracket = search(fits, forecast.samples, unit=1, most=10**6)
    assert forecast.samples == pytest.approx(bracket.fitted, rel=0.1)
