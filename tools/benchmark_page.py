"""Write docs/reference/benchmarks.md and its plots from benchmarks/results: ``python tools/benchmark_page.py``.

Tables that other pages quote are written between markers there. A test compares all of them with the results.
"""

from __future__ import annotations

import json
import subprocess
from functools import partial
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from pages import between, picture, row, table

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from matplotlib.axes import Axes

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
TARGET = ROOT / "docs" / "reference" / "benchmarks.md"
QUOTING = ROOT / "docs" / "concepts" / "exact.md"
QUOTED_HOST = "amd-epyc-2-cores"
IMAGES = TARGET.parent / "images"
Result = dict[str, Any]

HEAD = """# Benchmarks

Measured by `make bench` and made from `benchmarks/results/<host>/*.json` by `python tools/benchmark_page.py`. A ratio
is the kit's figure over the other's within one round, in which all take turns: below 1 the kit needs less. It is given
as the median over the rounds with a 95% interval of that median; where the interval holds 1, no difference is shown.
Other figures are medians with their range. Each section names the commit that was measured, and which of the files that
it measures have changed since.
"""


def ratio(entry: dict[str, Any]) -> str:
    """A ratio with its interval and its verdict."""
    return f"{interval(entry['ratio'])}, {entry['verdict']}"


def interval(values: dict[str, Any]) -> str:
    """A ratio with its interval."""
    low, high = values["interval"]
    return f"{values['median']:.3f} ({low:.3f} to {high:.3f})"


def middle(values: dict[str, Any], digits: int = 2) -> str:
    """A median with its range."""
    least, most = values["range"]
    return f"{values['median']:.{digits}f} ({least:.{digits}f} to {most:.{digits}f})"


def loops(result: Result) -> Iterator[str]:
    """Ratios to each loop, and the step time of every loop."""
    cases = result["cases"]
    peers = list(next(iter(cases.values()))["over"])
    yield from table("case", *(f"over {peer}" for peer in peers))
    for name, case in cases.items():
        yield row(name, *(ratio(case["over"][peer]) for peer in peers))
    yield ""
    yield from table("milliseconds of a step", *next(iter(cases.values()))["ms_per_step"])
    for name, case in cases.items():
        yield row(name, *(f"{value:.3f}" for value in case["ms_per_step"].values()))
    missing = [name for name, version in result.get("packages", {}).items() if version.startswith("unavailable")]
    if missing:
        yield f"\nNot installed there: {', '.join(missing)}."


def tracking(result: Result) -> Iterator[str]:
    """Ratios to a training without tracking."""
    yield from table("what", "off, seconds", "SQLite over off", "local server over off", "rounds")
    for length, record in result["lengths"].items():
        for kind in ("training", "command", "command_cpu"):
            part = record[kind]
            over = (ratio(part["over_off"][way]) for way in ("sqlite", "server"))
            off = part["seconds"]["off"]
            yield row(f"{length}: {kind.replace('_cpu', ', CPU')}", middle(off, 1), *over, str(off["rounds"]))
    cost = result["own_cost"]
    yield f"\nThe training itself spends {middle(cost['ms_per_second'])} ms of each second on its local log."


def sender(result: Result) -> Iterator[str]:
    """Ratios of steps with and without the sender beside them."""
    yield from table("store", "a step, over one without the sender", "CPU time of its start", "pairs of turns")
    for way, entry in result["stores"].items():
        count = entry["ratio"]["rounds"]
        yield row(way, ratio(entry), f"{entry['start_cpu_seconds']:.1f} s", str(count))


def rounding(result: Result) -> Iterator[str]:
    """Verdicts, and the largest used share of the tolerance."""
    names = list(next(iter(result["cases"].values())))
    yield from table("case", *names)
    for name, verdicts in result["cases"].items():
        cells = []
        for verdict in (verdicts[name] for name in names):
            beyond = f" at step {verdict['first_beyond']}" if verdict["first_beyond"] else ""
            cells.append(f"{verdict['grade']}{beyond} ({verdict['tolerance_used']:.2g})")
        yield row(name, *cells)


def startup(result: Result) -> Iterator[str]:
    """Seconds of each start."""
    yield from table("what", "seconds", "rounds")
    for name, values in result["seconds"].items():
        yield row(name, middle(values), str(values["rounds"]))


def memory(result: Result) -> Iterator[str]:
    """Peaks, and the ratio of the kit's peak while it trains to the script's."""
    kinds = list(next(iter(result["cases"].values()))["mib"])
    yield from table("case", *(f"{kind}, MiB" for kind in kinds), "kit, training, over bare")
    for name, case in result["cases"].items():
        yield row(name, *(f"{case['mib'][kind]['median']:.0f}" for kind in kinds), interval(case["ratio"]))


def memory_forecast(result: Result) -> Iterator[str]:
    """Numbers of samples, and the error of the forecast."""
    yield from table("case", "forecast", "fits, freed at once", "fits, as usual", "forecast over the first")
    for name, case in result["cases"].items():
        counts = (f"{case[kind]:,}" for kind in ("forecast", "at once", "as usual"))
        yield row(name, *counts, f"{case['error, at once']:+.1%}")


def repro(result: Result) -> Iterator[str]:
    """Seconds of each part."""
    yield from table("part", "seconds", "rounds")
    for part in result["parts"]:
        yield row(part["what"], middle(part["seconds"], 1), str(part["seconds"]["rounds"]))


def own_repository(result: Result) -> Iterator[str]:
    """Seconds of each command, by the place where stages run."""
    places = result["seconds"]
    yield from table("seconds", *places)
    for what in next(iter(places.values())):
        yield row(what if what == "total" else f"`{what}`", *(middle(found[what], 1) for found in places.values()))


def many_logs(result: Result) -> Iterator[str]:
    """Seconds of each thing, by the number of logs."""
    yield from table("logs", *next(iter(result["seconds"].values())))
    for count, found in result["seconds"].items():
        yield row(count, *map(middle, found.values()))


def bits(result: Result) -> Iterator[str]:
    """Number of different results of each computation."""
    yield from table("computation", "fast", "exact")
    for name, count in result["different_results"].items():
        yield row(name, str(count["fast"]), str(count["exact"]))
    yield f"\nOf {len(result['environments'])} environments."


def trainings(result: Result) -> Iterator[str]:
    """The verdict of each training in fast, and the hashes of its weights in exact."""
    found = result["trainings"]
    yield from table("training", "lines", "ddp against single in fast", "weights in exact")
    for name, one in found.items():
        ways = "; ".join(_hashes(gave, among) for gave, among in one["exact"].items()) or "–"
        yield row(f"`{name}`", str(one["lines"]), _shortened(one["fast"]), ways)
    every = dict.fromkeys(way for one in found.values() for among in one["exact"].values() for way in among)
    yield f"\n{len(found)} trainings of {result['steps']} steps. The ways in exact: {', '.join(every)}."


def coverage(result: Result) -> Iterator[str]:
    """What became of the families, by library, and why exact refused those that it did."""
    found, summary = result["families"], result["summary"]
    outcomes = ("trains", "refused", "two hashes", "failed")
    yield from table("library", "families", *outcomes, "median price")
    for library in dict.fromkeys(one["library"] for one in found.values()):
        ours = [one for one in found.values() if one["library"] == library and one["outcome"] != "not in fast"]
        prices = [one["price"] for one in ours if "price" in one]
        counts = (str(sum(one["outcome"] == outcome for one in ours)) for outcome in outcomes)
        yield row(library, str(len(ours)), *counts, f"{median(prices):.1f}" if prices else "–")
    share = summary.get("trains", 0) / summary["families"]
    whole = summary["whole"] / summary["families"]
    yield f"\n{share:.0%} of {summary['families']} families train in exact, {whole:.0%} with all shards in one pass."
    yield "Python binds their small steps."
    if again := summary.get("again"):
        unlike = f"{summary['differ']} had other weights" if summary["differ"] else "the weights were the same"
        yield f"{again} of them trained again with {'; with '.join(result['environments'])}: {unlike}."
    yield ""
    yield from table("family", "outcome", "why")
    for name, one in found.items():
        if one["outcome"] != "trains":
            yield row(name, one["outcome"], one.get("why", "–").replace("|", "\\|"))
        elif one["apart"]:
            yield row(name, "trains, its shards one by one", one["apart"].replace("|", "\\|"))


def _hashes(gave: str, ways: list[str]) -> str:
    many = f"{len(ways)} ways" if len(ways) > 1 else ways[0]
    return f"`{gave[:12]}`, {many}" if gave.isalnum() else f"{many}: {gave}"


def _shortened(verdict: str) -> str:
    grade, _, why = verdict.partition("; ")
    why = why.removeprefix("not comparable: ").partition(": first difference")[0]
    return f"{grade}: {why}" if why else grade.removeprefix("error: ")


_EXACT_OVER = {
    "fast": "over fast fp32", "float64": "over plain float64", "python": "over exact without compiled kernels"
}  # fmt: skip
"""What a step in exact is compared with, by its key."""


def _exact_over(case: Result) -> Iterator[str]:
    """The ratios of a case; older results, and those of a GPU, have no kernels that are compiled."""
    for reference in _EXACT_OVER:
        yield interval(case["over"][reference]["ratio"]) if reference in case["over"] else "–"


def exact(result: Result) -> Iterator[str]:
    """Ratios, and the parts of an exact step."""
    cases = result["cases"]
    yield from table("case", "exact, ms", "fast, ms", *_EXACT_OVER.values(), "rounds")
    for name, case in cases.items():
        times = (middle(case["milliseconds"][kind], 1) for kind in ("exact", "fast"))
        yield row(name, *times, *_exact_over(case), str(case["over"]["fast"]["ratio"]["rounds"]))
    yield ""
    yield from table("milliseconds of an exact step", *dict.fromkeys(PARTS.values()))
    for name, case in cases.items():
        yield row(name, *(middle(case["parts_ms"][part]) for part in PARTS if part in case["parts_ms"]))
    if own := {name: case["watched"] for name, case in cases.items() if "watched" in case}:
        yield "\nWhat forward has written is looked for twice in a step, and some shards are fed"
        yield "twice: before the training, after 1, 4, 16 and so on segments of it, and at its end.\n"
        yield from table("besides, ms", "looking for writes, in each step", "of a step", "feeding twice, each time")
        for name, watched in own.items():
            share = watched["share"]
            shares = f"{share['median']:.2%} ({share['range'][0]:.2%} to {share['range'][1]:.2%})"
            yield row(name, middle(watched["kept"]), shares, middle(watched["tried"], 0))


PARTS = {
    "forward": "forward",
    "outputs": "forward",
    "loss": "loss",
    "backward": "backward",
    "accepts_grads": "windows",
    "settled": "windows",
    "step": "optimizer",
}
"""Words for the parts of an exact step, by the method's name. Older results have the former names."""


def quality(result: Result) -> Iterator[str]:
    """Test losses of each model and task."""
    yield from table("model, task", "steps", "test loss in fast", "in exact", "difference", "steps made again")
    for case in result["cases"]:
        losses = (f"{case['eval_loss'][numerics]:.4f}" for numerics in ("fast", "exact"))
        difference, again = f"{case['relative_difference']:+.3%}", str(case["steps_made_again"])
        yield row(f"{case['model']}, {case['task']}", str(case["steps"]), *losses, difference, again)


def container(result: Result) -> Iterator[str]:
    """Seconds of a stage in both places, and the difference."""
    yield from table("stage", "on the host", "in the image", "more", "rounds")
    for name, taken in result["seconds"].items():
        yield row(
            name, *(middle(taken[place]) for place in ("host", "container", "more")), str(taken["more"]["rounds"])
        )


def nodes(result: Result) -> Iterator[str]:
    """Ratio of step times and the seconds besides; then each link, then a lost machine."""
    yield from table("what", "two machines", "one machine", "two over one, or more", "rounds")
    steps, other = result["step_ms"], result["other_seconds"]
    rounds = str(result["step_ratio"]["rounds"])
    yield row(
        "a step, ms", *(middle(steps[which], 1) for which in ("two", "one")), interval(result["step_ratio"]), rounds
    )
    yield row(
        "all but the steps, s", *(middle(other[which]) for which in ("two", "one")), middle(other["difference"]), rounds
    )
    yield ""
    yield from table("link", "step, ms", "without network, ms", "the link alone, ms", "speed-up", "bound")
    for rate, figures in result["links"].items():
        times = (f"{figures[name]:.1f}" for name in ("step_ms", "without_network_ms", "link_ms"))
        yield row(rate, *times, *(f"{figures[name]:.2f}x" for name in ("speedup", "bound")))
    if lost := result.get("seconds_to_end"):
        yield ""
        yield from table("the second machine is", "seconds until the first one ends", "its limit", "rounds")
        for name in sorted(lost.keys() - {"timeout_s"}):
            yield row(name, middle(lost[name]), f"{lost['timeout_s']} + 10", str(lost[name]["rounds"]))


def scale(result: Result) -> Iterator[str]:
    """Predicted and measured steps of each case."""
    yield from table("case", "scaling", "predicted, ms", "measured, ms", "error")
    for name, case in result["cases"].items():
        for kind in ("strong", "weak"):
            figures = case[kind]
            said = f"{figures['predicted_ms']:.1f} ({figures['low_ms']:.1f} to {figures['high_ms']:.1f})"
            yield row(name, kind, said, f"{figures['measured_ms']:.1f}", f"{figures['error']:+.1%}")
    yield f"\nThe largest error is {result['largest_error']:.1%}."


def explain(result: Result) -> Iterator[str]:
    """Plantings with their named causes and gains, the confusion matrix, sound trainings, and sums of parts."""
    yield from table("planted", "severity", "named first", "share of a step", "gain predicted", "gain obtained")
    for one in sorted(result["results"], key=lambda one: (one["planting"], one["severity"])):
        named = one["named"] or "nothing"
        right = named if one["named"] == one["cause"] else f"**{named}**"
        share = f"{one['share']:.0%}" if one.get("share") else "–"
        gains = ("–", "–")
        if "obtained" in one:
            low, high = one["range"]
            gains = (f"{one['predicted']:.2f} ({low:.2f} to {high:.2f})", f"{one['obtained']:.2f}")
        yield row(one["planting"], str(one["severity"]), right, share, *gains)
    right = sum(one["named"] == one["cause"] for one in result["results"])
    errors = [one["error"] for one in result["results"] if "error" in one]
    yield f"\nNamed right: {right} of {len(result['results'])}. Gain predicted against obtained: median error"
    yield f"{median(errors):.1%} of {len(errors)}. All of it took {result['seconds'] / 60:.0f} minutes.\n"
    columns = sorted({named for _, named, _ in result["confusion"]})
    yield from table("planted, below; named, right", *columns)
    counts = {(cause, named): count for cause, named, count in result["confusion"]}
    for cause in sorted({cause for cause, _, _ in result["confusion"]}):
        yield row(cause, *(str(counts.get((cause, named), "")) for named in columns))
    yield ""
    yield from table("sound training", "named")
    for one in result["sound"]:
        yield row(one["training"], ", ".join(one["named"]) or "nothing")
    yield ""
    yield from table("model", "strategy", "a step, ms", "sum of its parts, over that")
    for one in result["parts"]:
        yield row(one["model"], one["strategy"], f"{one['step_ms']:.2f}", f"{one['parts_over_plain']:.3f}")


# name of the result -> title, method, tables
SECTIONS: dict[str, tuple[str, str, Callable[[Result], Iterator[str]]]] = {
    "loop": (
        "The loop against others",
        "The same model, optimizer and batches in the same order, one CPU thread, by CPU time. `bare` indexes whole\n"
        "batches; `dataloader` is the tutorials' loop over a `TensorDataset`; Lightning and Accelerate are fed by the\n"
        "same loader. What a loop needs once is not counted. All end with the same losses, which is checked.",
        loops,
    ),
    "loading": (
        "A dataset against a plain loop",
        "The same images, cropped and mirrored at random, the same model and order, beside PyTorch's plain loop over\n"
        "a `DataLoader` with as many processes, by wall time. The clocks begin when the first batch is there.",
        loops,
    ),
    "ddp": (
        "ddp against a bare script",
        "Two processes on two cores, by wall time of the slowest rank, in turns within one process group.",
        loops,
    ),
    "tracking": (
        "Tracking",
        "A training of `mlp` as a user's command, with tracking off, into SQLite, and to a server on the same host,\n"
        "by wall time: `training` is what `timing.json` says, `command` the whole of `pipeline/train.py`. CPU time is\n"
        "the command's without the sender and the server.",
        tracking,
    ),
    "sender": (
        "The sender beside a training",
        "Within one training of `mlp`, some 600 steps a second, the sender is stopped and goes on in turns of ten\n"
        "seconds, which are compared. Its start, mostly the import of MLflow, is given in seconds of a core.",
        sender,
    ),
    "many_logs": (
        "The sender among very many logs",
        "Wall seconds in a repository whose logs MLflow has. They are kept for a month. After each look the sender\n"
        "waits 20 times as long, so that it takes no more than a twentieth of a core.",
        many_logs,
    ),
    "rounding": (
        "Verdicts on rounding and on small mistakes",
        "What `samebits compare` says of trainings against `single`: ddp with 2 and 4 workers differs by rounding\n"
        "alone, the others are wrong in one small thing. In brackets the largest difference of a loss over what was\n"
        "allowed there. [Verdicts](../concepts/verdicts.md) says where the tolerance comes from.",
        rounding,
    ),
    "bits": (
        "How many results one computation has",
        "The same float32 numbers in several processes of one host, whose environment lets PyTorch and MKL choose\n"
        "other kernels (instruction sets, threads), as another host would. Two results are different if one bit is.\n"
        "[Exact numerics](../concepts/exact.md) says why.",
        bits,
    ),
    "model_coverage": (
        "Families of models in exact",
        "Small models with random weights, which nobody wrote for the kit, some steps on one thread. In exact the\n"
        "batch is fed as 1, 2 and 4 parts, as ranks have it, and the weights have to have one hash.",
        coverage,
    ),
    "trainings": (
        "Trainings as people have them",
        "Each is one file of `benchmarks/experiments`, whose lines are counted without blank ones. In fast, `ddp` on\n"
        "two devices is compared with `single`. In exact, the same training is made in several ways: numbers of\n"
        "devices and of loading processes, kernels for other instruction sets, and a stop after which it goes on.",
        trainings,
    ),
    "exact": (
        "What the same bits cost",
        "A step on one device, the whole batch, one CPU thread, by CPU time, in turns within one process. Plain\n"
        "float64 is the model and its loss in PyTorch's own float64: what matrix products in float64 cost at least.",
        exact,
    ),
    "quality": (
        "Does exact learn what fast learns?",
        "One training of each model and task under `single`, in each of the numerics: the default `params.yaml`, but\n"
        "with 65,536 samples, batch 256 and a learning rate of 0.1.",
        quality,
    ),
    "startup": ("Start-up", "Wall seconds with files in the page cache; the launch is from a warm parent.", startup),
    "memory": (
        "Memory",
        "Peak resident memory of a worker and of a bare script, which is a fresh interpreter. A worker is a fork: it\n"
        "has touched fewer of the libraries' pages, and its launcher waits beside it with its own, partly the same.",
        memory,
    ),
    "memory_forecast": (
        "The largest batch, forecast and tried",
        "Global batches of one CPU device with so much memory beside the process itself. The C library gives freed\n"
        "memory back at once, or keeps it as it usually does: see [What fits](../guides/memory.md).",
        memory_forecast,
    ),
    "repro": (
        "Where the time of `make repro` goes",
        "A new clone, a warm package cache, the default `params.yaml`. A stage lasts until DVC announces the next.",
        repro,
    ),
    "own_repository": (
        "From an empty repository to the answers",
        "A new repository with samebits installed, the experiment of `samebits init`; where an image is named, the\n"
        "stages run in it.",
        own_repository,
    ),
    "nodes": (
        "What a second machine costs",
        "The default model with one worker on each of two machines, beside two workers on one, on the same two cores,\n"
        "in turns. The machines are network namespaces of one host, joined by a bridge in its memory. Then their link\n"
        "is slowed down. Alone, it needs the bytes of all gradients over its rate. At last the second machine is lost.",
        nodes,
    ),
    "explain": (
        "Explanations of planted causes",
        "Each cause is planted at three severities, in shuffled order; what `samebits explain` names first is beside\n"
        "it, in bold where it is another. The advice for the planted one is followed, and the gain in samples per\n"
        "second is measured in trainings that take turns.\n"
        "[How a step is explained](../concepts/explanations.md) says how.",
        explain,
    ),
    "scale": (
        "Projections from 1 and 2 devices against 4",
        "The [cost model](../concepts/dp-and-ddp.md#fitted-to-a-host) fitted to steps of 1 and 2 simulated devices,\n"
        "and what it says of 4, with its range. A device computes by sleeping, so that 4 of them fit on fewer cores;\n"
        "the time is the least of several turns. In the first cases a link's bandwidth and latency are waited for. In\n"
        "those with a link, gloo reduces real gradients between network namespaces whose links are slowed down.\n"
        "All-reduces of three sizes between 2 devices were measured too.",
        scale,
    ),
    "container": (
        "What a container costs",
        "Wall seconds of a stage's command, in turns; one epoch of the default model. The image has its own Python\n"
        "and its packages' bytecode. A host that keeps none (`PYTHONDONTWRITEBYTECODE`, and packages installed\n"
        "without it) compiles torch again in each process; there, what is mostly imports is faster inside.",
        container,
    ),
}


# name of the result -> measured files under src/samebits; by default all of src and the pipeline
MEASURES: dict[str, tuple[str, ...]] = {
    "loop": ("numerics/fast.py", "training"),
    "loading": ("numerics/fast.py", "training"),
    "ddp": ("numerics/fast.py", "training"),
    "tracking": ("records/log.py", "tracking", "training/loop.py"),
    "sender": ("records/log.py", "tracking", "training/loop.py"),
    "many_logs": ("records/log.py", "tracking/delivery.py", "tracking/sender.py"),
    "rounding": ("numerics", "training", "results/verdict.py"),
    "bits": ("numerics",),
    "exact": ("numerics", "training"),
    "model_coverage": ("numerics",),
    "trainings": ("models", "numerics", "training"),
    "quality": ("data", "numerics", "training"),
    "memory": ("numerics/fast.py", "training", "workers"),
    "memory_forecast": ("doctor", "numerics/fast.py", "training"),
    "nodes": ("training", "workers"),
    "explain": ("results/explanation", "training", "workers"),
    "scale": ("results/scaling",),
    "container": ("engines",),
}


def commit_of(result: Result) -> str:
    """The measured commit, and which of the measured files have changed since."""
    commit, name = result["git"]["commit"], result["benchmark"]
    at = f"Measured at `{commit[:9]}`" + (", with changes on top" if result["git"]["dirty"] else "")
    if _git("merge-base", "--is-ancestor", commit, "HEAD"):
        return f"{at}, which this repository no longer has."
    paths = [f"src/samebits/{path}" for path in MEASURES.get(name, ())] or ["src", "pipeline"]
    changed = [f"`{path}`" for path in paths if _git("diff", "--quiet", commit, "--", path)]
    return (
        f"{at}; changed since: {', '.join(changed)}." if changed else f"{at}; what it measures has not changed since."
    )


def _git(*command: str) -> int:
    return subprocess.run(["git", *command], cwd=ROOT, capture_output=True, check=False).returncode


def host_of(result: Result) -> str:
    """Host and versions in one line."""
    host, versions = result["host"], result["versions"]
    devices = ", ".join(gpu["name"] for gpu in host["gpus"]) or "no GPU"
    packages = {"torch": versions["torch"], **result.get("packages", {})}
    if "lengths" in result or "parts" in result:
        packages |= {name: versions[name] for name in ("mlflow", "dvc")}
    known = ", ".join(f"{name} {version}" for name, version in packages.items() if "unavailable" not in version)
    return f"{host['cpu']['model']}, {host['cpu']['cores']} cores, {devices}; Python {host['python']}, {known}:"


def results() -> dict[str, dict[str, Result]]:
    """Results by benchmark and folder of the host, in the page's order."""
    return {
        name: {
            file.parent.name: json.loads(file.read_text(encoding="utf-8"))
            for file in sorted(RESULTS.glob(f"*/{name}.json"))
        }
        for name in SECTIONS
    }


def cost(result: Result) -> Iterator[str]:
    """Ratios of an exact step."""
    yield from table("model", *_EXACT_OVER.values())
    for name, case in result["cases"].items():
        yield row(name.replace(" at batch", ", batch"), *_exact_over(case))


QUOTES: dict[str, tuple[str, Callable[[Result], Iterator[str]]]] = {
    "bits": ("bits", bits),
    "cost": ("exact", cost),
    "quality": ("quality", quality),
}
"""Marker in a page -> result and table."""


def quoted(text: str) -> str:
    """A page with current tables between its markers."""
    for marker, (name, tables) in QUOTES.items():
        by_host = results()[name]
        result = by_host.get(QUOTED_HOST) or next(iter(by_host.values()))
        lines = "".join(f"{line}\n" for line in tables(result))
        text = between(f"<!-- {marker} -->\n", f"<!-- /{marker} -->\n", lines, text)
    return text


def page() -> str:
    """The page."""
    parts = [HEAD]
    for name, by_host in results().items():
        if not by_host:
            continue
        title, text, tables = SECTIONS[name]
        parts.append(f"## {title}\n\n{text}\n")
        for host, result in by_host.items():
            parts.append("\n".join([commit_of(result), host_of(result), "", *tables(result), ""]))
            if name in PLOTS:
                parts.append(f"![{title}, {host}](images/{name}-{host}.svg)\n")
    return "\n".join(parts)


def plot_loops(axes: Axes, result: Result) -> None:
    """A point with its interval for each case and loop."""
    names = [(case, peer) for case, record in result["cases"].items() for peer in record["over"]]
    for position, (case, peer) in enumerate(reversed(names)):
        values = result["cases"][case]["over"][peer]["ratio"]
        middle, (low, high) = values["median"], values["interval"]
        axes.errorbar(middle, position, xerr=[[middle - low], [high - middle]], fmt="o", color="#0072B2", capsize=3)
    axes.axvline(1, color="0.35", linestyle=":")
    axes.set_yticks(range(len(names)), [f"{case}: {peer}" for case, peer in reversed(names)])
    axes.set(xlabel="CPU time of the kit's loop over the other's", xlim=(0, None))


def plot_repro(axes: Axes, result: Result) -> None:
    """A bar for each part."""
    parts = [part for part in reversed(result["parts"]) if part["what"] != "total"]
    axes.barh([part["what"] for part in parts], [part["seconds"]["median"] for part in parts], color="#0072B2")
    axes.set(xlabel="seconds")


PLOTS = {"loop": plot_loops, "repro": plot_repro}


def draw() -> None:
    """Write the plots as SVG, the same bytes for the same results."""
    IMAGES.mkdir(exist_ok=True)
    for name, plot in PLOTS.items():
        for host, result in results()[name].items():
            drawn = picture(name, (7, 4), partial(plot, result=result))
            (IMAGES / f"{name}-{host}.svg").write_text(drawn, encoding="utf-8")


if __name__ == "__main__":
    draw()
    TARGET.write_text(page(), encoding="utf-8")
    QUOTING.write_text(quoted(QUOTING.read_text(encoding="utf-8")), encoding="utf-8")
