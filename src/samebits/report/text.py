"""What a comparison says, in words."""

from __future__ import annotations

from typing import Any

from samebits.summary import devices_of
from samebits.verdict import GRADES

COLOURS = {"single": "#0072B2", "dp": "#E69F00", "ddp": "#009E73"}
"""Of each strategy, here and in MLflow: Okabe and Ito's palette, which people with any colour vision can tell apart."""

LABELS = {
    "fallback": "PyTorch ran the plain module: nothing was parallel, and no speed-up is claimed.",
    "oversubscribed": "Several workers shared one device. This shows that the strategy works, not what it gains.",
    "one_device": "One device was used, so there was nothing to share the work with.",
    "unused_devices": "Some devices got no samples, because DataParallel cuts a batch into equal chunks.",
    "noisy": "Repeats differed by more than 15%, often because something else used the host. Seconds are uncertain; "
    "paired speed-ups are less so, as their range shows.",
    "different_start": "It began from other weights than the run it is compared with, so it is another training.",
    "not_repeatable": "Training again on this host gave other losses: an operation of the model is not deterministic.",
}
"""What each label means for a reader."""


def name_of(row: dict[str, Any]) -> str:
    """Strategy and numerics."""
    return f"{row['strategy']}-{row['numerics']}"


def headline(comparison: dict[str, Any]) -> str:
    """What was compared, and where."""
    host = comparison["host"]
    gpus = [gpu["name"] for gpu in host["gpus"]]
    device = f"{len(gpus)} x {gpus[0]}" if gpus else f"{host['cpu']['model']}, {host['cpu']['cores']} cores, no GPU"
    return (
        f"{comparison['model']} on {comparison['task']}, global batch {comparison['global_batch_size']}, "
        f"{comparison['steps']} steps; {device}; torch {host['torch']}"
    )


def percent(value: float) -> str:
    """A share as whole percents."""
    return f"{100 * value:.0f}%"


def fastest(comparison: dict[str, Any]) -> dict[str, Any]:
    """The row with the highest speed-up in the first numerics; ``single`` counts as 1."""
    rows = comparison["rows"]
    rows = [row for row in rows if row["numerics"] == rows[0]["numerics"] and row["speedup"]] or rows[:1]
    return max(rows, key=lambda row: row["speedup"]["median"] if row["speedup"] else 0)


def milliseconds(value: float) -> str:
    """A duration with three digits."""
    return f"{value:.3g} ms" if value < 1000 else f"{value:.0f} ms"


def say_fastest(comparison: dict[str, Any]) -> str:
    """Which strategy to use here."""
    best = fastest(comparison)
    if best["strategy"] == "single":
        others = [row for row in comparison["rows"] if row["speedup"] and row["strategy"] != "single"]
        why = "no other strategy beat one device" if others else "no other strategy could use more than one device"
        return f"Fastest here is {name_of(best)}: {why}."
    return f"Fastest here is {name_of(best)} on {devices_of(best)}: {times_single(best)}."


def times_single(row: dict[str, Any]) -> str:
    """A speed-up with its range, in words."""
    speedup = row["speedup"]
    text = f"{speedup['median']:.2f} times the speed of single"
    if speedup["low"] != speedup["high"]:
        text += f" ({speedup['low']:.2f} to {speedup['high']:.2f})"
    return text


def say_speed(row: dict[str, Any]) -> str:
    """What a strategy bought, what it could have, and where the time of a step goes."""
    if row["strategy"] == "single":
        return f"{name_of(row)} on {devices_of(row)} is what the others are measured against."
    if row["speedup"] is None:
        kinds = [label["kind"] for label in row["labels"] if label["text"] == row["speedup_unavailable"]]
        named = f" ({kinds[0].replace('_', ' ')})" if kinds else ""
        return f"{name_of(row)} has no speed-up{named}: {row['speedup_unavailable']}."
    step = row["slice_step_ms"]
    text = f"{name_of(row)} on {devices_of(row)} ran at {times_single(row)}, in slices that took turns: a step takes "
    text += (
        f"{milliseconds(step['own'])}, on one device {milliseconds(step['single'])}. Without communication a device "
    )
    text += (
        f"needs {milliseconds(step['share'])} for its share, which bounds the speed at {row['bound']['median']:.2f} "
    )
    text += "times"
    lost = step["own"] - step["share"]
    if lost > 0:
        text += f"; {milliseconds(lost)}, {percent(lost / step['own'])} of a step, go to communication and waiting"
    return text + "."


def say_sameness(rows: list[dict[str, Any]]) -> str:
    """Whether runs of one numerics are the same model."""
    verdicts = [(name_of(row), row["verdict"]) for row in rows if row["verdict"]]
    if not verdicts:
        return f"{name_of(rows[0])} alone: there is nothing to compare it with."
    what = f"Same model in {rows[0]['numerics']} numerics"
    name, worst = max(verdicts, key=lambda item: GRADES.index(item[1]["grade"]))
    if worst["grade"] == "bitwise":
        exact = rows[0]["numerics"] == "exact"
        where = ", and so on any host" if exact else ""
        return f"{what}: yes, bit by bit, under every strategy{where}."
    if worst["grade"] == "diverged":
        return f"{what}: NO. {name} against {worst['against']}: {'; '.join(worst['sentences'])}."
    losses = worst["losses"]
    begin = f"{what}: yes, within what rounding explains"
    if losses["grade"] == "bitwise":
        return f"{begin}: {name} differs in {worst['sentences'][1]}."
    weights = worst["weights"]["largest_relative"]
    return (
        f"{begin}: losses differ by {losses['largest_relative']:.2%} at most "
        f"({name}, step {losses['largest_at']}, where {losses['tolerance']:.1%} passes)"
        + (f", weights by {weights:.1%}." if weights else ".")
    )


def say_price(row: dict[str, Any]) -> str:
    """What the same bits everywhere cost."""
    price = row["price"]
    return (
        f"The same bits on any host cost here {price['median']:.1f} times the time of a fast step on one device "
        f"({price['low']:.1f} to {price['high']:.1f})."
    )


def answers(comparison: dict[str, Any]) -> list[str]:
    """The short answers: what is fastest, what each strategy bought, whether it is the same model."""
    rows = comparison["rows"]
    speeds = [say_speed(row) for row in rows if row["strategy"] != "single" and row["numerics"] == rows[0]["numerics"]]
    groups = [[row for row in rows if row["numerics"] == numerics] for numerics in {row["numerics"]: 0 for row in rows}]
    prices = [say_price(row) for row in rows if row["price"]]
    return [say_fastest(comparison), *speeds, *(say_sameness(group) for group in groups), *prices]


def remarks(comparison: dict[str, Any]) -> list[str]:
    """What a reader must know beside the figures: labels, notes, settings that were not applied."""
    return [text for row in comparison["rows"] for text in row_remarks(row)]


def row_remarks(row: dict[str, Any]) -> list[str]:
    """The remarks on one run."""
    name = name_of(row)
    labels = [label for label in row["labels"] if label["text"] != row["speedup_unavailable"]]  # the answers say that
    found = [f"{name}: {label['kind'].replace('_', ' ')}: {label['text']}" for label in labels]
    found += [f"{name}: {note}" for note in row["notes"]]
    return found + [f"{name}: {key} was not applied: {why}" for key, why in row["not_applied"].items()]


def describe_row(row: dict[str, Any]) -> str:
    """A run's description in Markdown."""
    floor = "" if row["above_floor"] is None else f", {100 * row['above_floor']:+.1f}% from the floor"
    lines = [say_speed(row), f"Test loss {row['eval_loss']:.4f}{floor}."]
    if row["verdict"]:
        lines += [f"Against {row['verdict']['against']}: **{row['verdict']['grade']}**."]
        lines += [f"- {sentence}" for sentence in row["verdict"]["sentences"]]
    return "\n\n".join(lines) + "\n\n" + "\n".join(f"- {remark}" for remark in row_remarks(row))
