"""A comparison for each state that the page has to show, with figures that somebody made up."""

from __future__ import annotations

import hashlib
from typing import Any

from samebits.params import parse_params
from samebits.records.provenance import GitState
from samebits.results.comparison import RefusedRow
from samebits.results.explanation.causes import CAUSES
from samebits.results.explanation.explain import Explanation
from samebits.results.remarks import SpokenRemark
from samples import comparison, explanation, host, memory, ratio, row, verdict

SMALL_BATCH = {
    "cause": "small_batch", "lost_ms": 1.69, "share": 0.1, "rank": None, "phase": None, "remedy": "larger_batch",
    "change": {"train.global_batch_size": 4}, "gain": {"median": 1.14, "low": 1.01, "high": 1.18},
    "evidence": [{"name": "a device's share of the batch, alone", "value": 12.4, "unit": "ms"},
                 {"name": "the whole batch on one device", "value": 25.9, "unit": "ms"}],
}  # fmt: skip
COMMUNICATION = {
    **SMALL_BATCH, "cause": "communication", "lost_ms": 13.4, "remedy": "accumulate",
    "change": {"train.global_batch_size": 4, "train.grad_accum_steps": 4},
    "evidence": [{"name": "communication that is not hidden", "value": 13.4, "unit": "ms"}],
}  # fmt: skip
COPIES = {**SMALL_BATCH, "cause": "dp_copies", "lost_ms": 48.6, "remedy": "use_ddp", "gain": None,
          "change": {"train.strategies": "ddp"}, "evidence": []}  # fmt: skip


def sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def why(*findings: Any, slices: Any = None, **parts: float) -> Explanation:
    """An explanation whose losses are those between a run's slices."""
    found = [finding["cause"] for finding in findings]
    looked = [{"cause": cause, "state": "found" if cause in found else "not_found"} for cause in CAUSES]
    looked[2] = {"cause": list(CAUSES)[2], "state": "not_judged", "why": "there was no time"}
    losses = None
    if slices:
        sent = slices["strategy"] - (slices.get("together") or slices["share"])
        losses = {**dict.fromkeys(("wrapper", "buffers", "copies", "unexplained"), 0.0),
                  "ideal_ms": slices["single"] / slices["devices"],
                  "fixed": slices["share"] - slices["single"] / slices["devices"],
                  "contention": (slices.get("together") or slices["share"]) - slices["share"],
                  "communication": 0.8 * sent, "waiting": 0.2 * sent}  # fmt: skip
    told = explanation(**(parts or {"forward": 5.0, "backward": 10.0, "communication": 1.4})).model_dump()
    return Explanation.model_validate({**told, "findings": findings, "looked_for": looked, "losses": losses})


def run(strategy: str, devices: int = 1, *, kind: str = "cpu", numerics: str = "fast", speedup: Any = None,
        bound: Any = None, slices: Any = None, weights: str = "one", **changes: Any) -> Any:  # fmt: skip
    steps = slices and {name: ms for name, ms in slices.items() if name != "devices"}
    facts = {
        "numerics": numerics,
        "device_type": kind,
        "speedup": ratio(1.0) if strategy == "single" else speedup,
        "bound": bound,
        "scaling_efficiency": speedup.median / devices if speedup else None,
        "slice_step_ms": steps,
        "weights_sha256": sha256(f"{numerics} {weights}"),
        "data_sha256": sha256("data"),
        "memory": memory({"weights": 2**20, "activations": 2**24, "baseline": 2**28}),
        "floor": 1.9,
        **changes,
    }
    return row(strategy, devices=devices, **facts)


def fallback(numerics: str = "fast") -> Any:
    text = "no CUDA device is visible, so DataParallel ran the plain module on one device"
    label = SpokenRemark(kind="fallback", text=text)
    alike = verdict("bitwise", against=f"single-{numerics}")
    return run("dp", numerics=numerics, speedup_unavailable=label, labels=[label], verdict=alike)


NOISE = SpokenRemark(kind="noisy", text="samples per second differed by 22% between repeats")
SLICES = {"strategy": 16.4, "single": 25.9, "share": 12.4, "together": 14.45, "devices": 2}
SAME, ROUNDING = (
    verdict("bitwise", against="single-exact"),
    verdict("within tolerance", losses=1.8e-7, weights=1e-6, steps=20),
)


def on_cpus(speedup: Any = None, *, bound: Any = None, findings: Any = (SMALL_BATCH,), slices: Any = None,
            alike: Any = ROUNDING, same: Any = SAME, **changes: Any) -> list[Any]:  # fmt: skip
    """The six runs of two CPU devices."""
    slices = slices or SLICES
    speedup, bound = speedup or ratio(1.54, 1.25, 1.85), bound or ratio(2.08, 1.99, 2.29)
    explained = why(*findings, slices=slices)
    facts = {"speedup": speedup, "bound": bound, "slices": slices, "explanation": explained, **changes}
    return [
        run("single", explanation=explanation(forward=8.0, backward=16.0)),
        fallback(),
        run("ddp", 2, verdict=alike, weights="two", **facts),
        run("single", numerics="exact", price=ratio(3.6, 3.5, 3.7)),
        fallback("exact"),
        run("ddp", 2, numerics="exact", speedup=ratio(1.66, 1.57, 1.83), bound=ratio(1.94), verdict=same,
            slices={**SLICES, "strategy": 55.0, "single": 91.0, "share": 47.0, "together": 51.0},
            weights="one" if same.grade == "bitwise" else "two"),
    ]  # fmt: skip


def on_gpus(**changes: Any) -> list[Any]:
    """Six runs of four GPUs."""
    slices = {"strategy": 121.0, "single": 412.0, "share": 104.5, "together": 104.6, "devices": 4}
    copies = {"strategy": 196.0, "single": 412.0, "share": 104.5, "devices": 4}
    alike = verdict("within tolerance", losses=1.9e-4, weights=1e-3, steps=200)
    exact = verdict("bitwise", against="single-exact")
    common = {"kind": "cuda", "bound": ratio(3.94, 3.9, 3.97)}
    return [
        run("single", kind="cuda", explanation=explanation(forward=150.0, backward=260.0)),
        run("dp", 4, speedup=ratio(2.1, 2.08, 2.13), slices=copies, verdict=alike, weights="two",
            explanation=why(COPIES, slices=copies), **common),
        run("ddp", 4, speedup=ratio(3.4, 3.36, 3.44), slices=slices, verdict=alike, weights="three",
            explanation=why(COMMUNICATION, slices=slices), **common, **changes),
        run("single", numerics="exact", kind="cuda"),
        run("dp", 4, numerics="exact", speedup=ratio(3.1, 3.0, 3.2), verdict=exact, **common),
        run("ddp", 4, numerics="exact", speedup=ratio(3.57, 3.5, 3.6), verdict=exact, **common),
    ]  # fmt: skip


CPU_HOST = host(cpu={"model": "Intel Xeon Processor", "machine": "x86_64", "cores": 2, "instruction_sets": []})
UNSTEADY = why(SMALL_BATCH).model_copy(update={"findings": (), "unsteady": None})
DIVERGED = verdict("diverged", losses=0.031, weights=0.2, steps=20)
DIVERGED = DIVERGED.model_copy(
    update={"losses": DIVERGED.losses.model_copy(update={"first_beyond": 7, "values": (2.0, 2.06)})}
)
NOT_COMPARABLE = verdict("not comparable", losses=0.02, weights=0.2).model_copy(
    update={"apart": "dropout draws depend on the number of devices"}
)


def unsteady() -> list[Any]:
    facts = {**UNSTEADY.model_dump(), "unsteady": {"kind": "step", "ms": 16.4, "other_ms": 31.0}}
    return on_cpus(explanation=Explanation.model_validate(facts))


def of_cpus(*rows: Any, **changes: Any) -> Any:
    params = parse_params({"train": {"global_batch_size": 4096}})
    facts = {"host": CPU_HOST, "global_batch_size": 4096, "steps": 20, "params": params, "host_fingerprint": "f0" * 32,
             "git": GitState(commit="c0ffee" * 6 + "abcd", dirty=False), **changes}  # fmt: skip
    return comparison(*rows, **facts)


REFUSED = [
    RefusedRow(run=f"{strategy}-exact", numerics="exact", what="BatchNorm2d in model.norm",
               text="BatchNorm2d in model.norm normalises a sample by others", hint="train in fast numerics")
    for strategy in ("single", "dp", "ddp")
]  # fmt: skip
STATES = {
    "faster": of_cpus(*on_cpus()),
    "noisy": of_cpus(*on_cpus(labels=[NOISE])),
    "no difference": of_cpus(*on_cpus(ratio(1.04, 0.92, 1.21), slices={**SLICES, "strategy": 24.9})),
    "slower": of_cpus(*on_cpus(ratio(0.62, 0.55, 0.7), bound=ratio(1.4, 1.35, 1.46), findings=(COMMUNICATION,),
                               slices={**SLICES, "strategy": 41.8, "share": 18.5, "together": 22.0}, labels=[NOISE])),
    "fallback only": of_cpus(run("single"), fallback()),
    "unsteady": of_cpus(*unsteady()),
    "nothing found": of_cpus(*on_cpus(findings=())),
    "gain unknown": of_cpus(*on_cpus(findings=({**SMALL_BATCH, "gain": None},))),
    "diverged": of_cpus(*on_cpus(alike=DIVERGED)),
    "not comparable": of_cpus(*on_cpus(alike=NOT_COMPARABLE)),
    "refused": of_cpus(*on_cpus()[:3], refused=REFUSED),
    "one run": of_cpus(run("single", explanation=why(SMALL_BATCH))),
    "GPUs": of_cpus(*on_gpus(), host=host(gpus=4), global_batch_size=256, model="gpt", task="tokens"),
    "several machines": of_cpus(*on_gpus(devices_by_node=(2, 2)), host=host(gpus=2)),
}  # fmt: skip
