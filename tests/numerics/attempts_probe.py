"""Try every attempt in two processes that differ in all that the promise allows to differ, and say what came of it.

python tests/numerics/attempts_probe.py [NAME or KIND ...]     (a line of JSON for each; the table goes to stderr)
python tests/numerics/attempts_probe.py --write                (the table in docs/concepts/exact.md is made anew)

An attempt is refused, or gives the same bits whole, in parts, in parts in the other order, and in both processes; else
it differs. A process that an attempt has spoiled for others, or that hangs, is left, and a new one goes on.
"""

import collections
import contextlib
import gc
import json
import os
import signal
import subprocess
import sys
import warnings
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent), str(HERE.parents[1] / "tools")]

from patience import patient  # noqa: E402 - as the path has it

DOCS = HERE.parents[1] / "docs/concepts/exact.md"
BEGIN, END = "<!-- attempts -->", "<!-- end of attempts -->"
SPOILED, SHARDS, SAMPLES = 17, 4, 16
SECONDS = int(patient(300))  # an attempt takes some, and who hangs is left
KINDS = {
    "a": "settings of layers and of other parts, changed in forward",
    "b": "writes to buffers, weights, hooks and modules, some of them for some data only",
    "c": "draws that are made once and kept",
    "d": "threads",
    "e": "the order of sets, and hashes",
    "f": "ranks, threads and the machine, asked for in forward",
    "g": "state elsewhere: globals, closures, classes, generators",
    "h": "time, processes, addresses, memory that nobody wrote",
    "i": "tiny numbers flushed to zero",
    "j": "switches of PyTorch's, and private functions",
    "k": "honest models, which should pass",
}
OUTCOMES = ("refused", "same", "differs", "crash")
ENVIRONMENTS = [
    {"PYTHONHASHSEED": "0", "PROBE_THREADS": "1"},
    {"PYTHONHASHSEED": "0", "PROBE_THREADS": "2", "PYTHONMALLOC": "malloc", "ATEN_CPU_CAPABILITY": "default"}
    | {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"},
]


def worker(names):
    """Print the name of each attempt with what it gave here: "refused", "crash", or digests."""
    import torch

    import attempts
    import exact_probe
    from samebits.errors import UserError, caused_by
    from samebits.numerics.exact.numerics import ExactNumerics
    from samebits.numerics.initialization import portable_initialization
    from samebits.numerics.interface import MicroBatch
    from samebits.numerics.kernels import choose_kernels
    from samebits.params import parse_params
    from samebits.portable.random import Stream
    from samebits.training.diagnosis import require_alike, require_same_again

    settings = parse_params({"train": {"optimizer": {"name": "adamw", "lr": 0.003}}}).train
    inputs = torch.from_numpy(Stream(3, "x").normal(SAMPLES * 3 * 64)).float().view(SAMPLES, 3, 8, 8)
    targets = torch.from_numpy(Stream(3, "y").below(20, SAMPLES))
    threads = int(os.environ["PROBE_THREADS"])
    factories = {name: factory for _, name, factory in attempts.ATTEMPTS}

    def restore():
        while torch._C._len_torch_dispatch_stack():
            torch._C._pop_torch_dispatch_stack(None)
        torch.set_num_threads(threads)
        torch.set_flush_denormal(False)
        torch.set_deterministic_debug_mode("default")
        torch.compiler.set_stance("default")
        torch.set_grad_enabled(True)
        torch.set_default_dtype(torch.float32)
        torch.set_float32_matmul_precision("highest")
        torch._C._set_mkldnn_enabled(True)
        torch.set_autocast_enabled("cpu", False)
        choose_kernels(fused=True)
        sys.setprofile(None)
        gc.callbacks.clear()
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        torch.nn.modules.module._global_forward_hooks.clear()

    def numerics():
        split = {"shards": SHARDS, "samples": SAMPLES}
        return ExactNumerics(settings, torch.device("cpu"), "cross_entropy", (), seed=0, **split)

    def look(factory):
        """As ``Setup.try_step`` does before a training."""
        found, seen = [], set()
        for _ in range(2):
            one = numerics()
            one.configure()
            with one.construction(), portable_initialization(0):
                model = factory()
            model.train()
            if seen & {id(p) for p in model.parameters()}:
                return
            one.prepare(model)
            seen |= {id(p) for p in model.parameters()}
            module, batch = one.module(model), MicroBatch(inputs, targets, 0, range(SHARDS))
            found.append((model, require_same_again(one, module, batch)))
            one.forward(module, batch)
        require_alike(found[0][1], found[1][1], "the model is built a second time")

    def train(factory, splits, *, backwards=False):
        run = partial(exact_probe.run, shards=SHARDS, splits=splits, steps=3, backwards=backwards)
        return run(numerics(), factory, inputs, targets)[0]

    def outcome(factory):
        signal.alarm(SECONDS)
        try:
            look(factory)
            return [train(factory, 1), train(factory, SHARDS), train(factory, SHARDS, backwards=True)]
        except Exception as error:  # noqa: BLE001 - whatever an attempt raises
            if refusal := caused_by(error, UserError):
                return f"refused: {refusal}"
            return f"crash: {type(error).__name__}: {error}".splitlines()[0]
        finally:
            signal.alarm(0)
            restore()

    def out_of_time(*_):
        raise TimeoutError(f"more than {SECONDS} s")

    signal.signal(signal.SIGALRM, out_of_time)
    warnings.simplefilter("ignore")
    restore()
    with contextlib.redirect_stdout(sys.stderr):
        plain = train(factories["plain"], 1)
    for name in names:
        with contextlib.redirect_stdout(sys.stderr):
            found = outcome(factories[name])
        print(json.dumps([name, found]), flush=True)
        with contextlib.redirect_stdout(sys.stderr), contextlib.suppress(Exception):
            if train(factories["plain"], 1) == plain:
                continue
        os._exit(SPOILED)
    os._exit(0)


def in_environment(environ, names):
    """What each attempt gave, from as few processes as there need be."""
    found, left = {}, list(names)
    while left:
        command = [sys.executable, __file__, "--worker", *left]
        done = subprocess.run(command, env={**os.environ, **environ}, capture_output=True, text=True, check=False)
        lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("[")]
        found |= dict(lines)
        left = left[len(lines) :]
        if left and done.returncode not in (0, SPOILED):
            found[left.pop(0)] = f"crash: exit code {done.returncode}: {done.stderr[-300:]}"
    return found


def judged(founds):
    """Of what an attempt gave in all processes: refused, same, differs or crash, and a refusal's text."""
    texts = [found for found in founds if isinstance(found, str)]
    digests = {digest for found in founds if not isinstance(found, str) for digest in found}
    if len(digests) > 1:
        return "differs", " ".join([*sorted(one[:8] for one in digests), *texts])
    return (texts[0].partition(":")[0], texts[0]) if texts else ("same", "")


def outcomes(names):
    """Outcome and detail by name."""
    with ThreadPoolExecutor() as pool:
        everywhere = [*pool.map(in_environment, ENVIRONMENTS, [names] * len(ENVIRONMENTS))]
    return {name: judged([found[name] for found in everywhere]) for name in names}


def table(kinds, found):
    """The lines of a table in Markdown: attempts by kind and by what came of them."""
    counts = collections.Counter((kinds[name], outcome) for name, (outcome, _) in found.items())
    yield "| what forward or the factory does | attempts | refused by name | same bits | other bits | PyTorch's error |"
    yield "| --- | --- | --- | --- | --- | --- |"
    for kind in sorted({*kinds.values()}):
        row = [counts[kind, outcome] for outcome in OUTCOMES]
        yield f"| {' | '.join(map(str, [KINDS[kind], sum(row), *row]))} |"


def written(lines):
    """The docs, with the table in its place."""
    before, _, rest = DOCS.read_text().partition(BEGIN)
    return "\n".join([before + BEGIN, *lines, END + rest.partition(END)[2]])


def main():
    import attempts

    asked = {*sys.argv[1:]} - {"--write"}
    chosen = {n: k for k, n, _ in attempts.ATTEMPTS if not asked or {n, k} & asked}
    found = outcomes([*chosen])
    for name, (outcome, detail) in found.items():
        print(json.dumps({"kind": chosen[name], "name": name, "outcome": outcome, "detail": detail}), flush=True)
    lines = [*table(chosen, found)]
    print(*lines, sep="\n", file=sys.stderr)
    if "--write" in sys.argv:
        DOCS.write_text(written(lines))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        worker(sys.argv[2:])
    else:
        main()
