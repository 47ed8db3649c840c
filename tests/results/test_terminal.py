"""The end of a run on a terminal, and in a file."""

import io
import re
from pathlib import Path

import pytest
from rich.console import Console

from page_states import COMMUNICATION, STATES, of_cpus, on_cpus
from samebits.results.terminal import MOST_LINES, answer_lines, show
from samples import ratio

REPORTS = Path("reports")


def lines_of(comparison, width=100, notes=8):
    return [line.plain for line in answer_lines(comparison, REPORTS, width, notes=notes)]


@pytest.mark.parametrize("width", [80, 100])
@pytest.mark.parametrize("name", STATES)
def test_it_fits_and_says_everything_once(name, width):
    lines = lines_of(STATES[name], width)
    assert len(lines) <= MOST_LINES
    assert max(map(len, lines)) <= width
    sentences = [line.strip() for line in lines if len(line.split()) > 3]
    assert len(sentences) == len(set(sentences))
    assert [line[:24].rstrip() for line in lines if line[:24].rstrip().endswith("?")] == [
        "How much faster?", "What holds it back?", "Is it the same model?",
    ]  # fmt: skip


def test_the_whole_of_it():
    assert "\n".join(lines_of(of_cpus(*on_cpus(findings=(COMMUNICATION,))))) == EXPECTED.strip("\n")


EXPECTED = """
────────────────────────────────────────────────────────────────────────────────────────────────────
mlp on vectors · global batch 4,096 · 20 steps · Intel Xeon Processor, 2 cores, no GPU

How much faster?        1.54×   ddp on 2 CPU devices; 95% sure: 1.25 to 1.85
What holds it back?     +14%    gradients are sent for longer than the backward pass can hide, 13.4
                                ms of a step; send gradients once for 4 micro-batches: +1% to +18%
                                predicted
Is it the same model?   yes     exact: every bit, under single and ddp, on any host; fast: losses
                                differ by 0.000018%, as rounding explains

ideal: 2× in 12.9 ms           0×                  1×                   2×        a step       speed
single  one device             ████████████████████                              25.9 ms       1.00×
dp      not parallel here: no CUDA device is visible
  Smaller shares gain                                                   ▒       −0.55 ms bound 2.08×
  Slowing each other down                                          ░░░░░░       +2.05 ms       1.77×
  Sending gradients                                            ░░░░             +1.56 ms       1.58×
  Waiting for the slowest                                     ░                 +0.39 ms       1.54×
ddp     2 CPU devices          ███████████████████████████████                   16.4 ms       1.54×

  weights, exact        single 991f060a = dp 991f060a = ddp 991f060a
  weights, fast         single b9786bbe = dp b9786bbe ≈ ddp 52342d42

  try it     dvc exp run -S train.global_batch_size=16384 -S train.grad_accum_steps=4
  the page   reports/index.html
  the rest   reports/comparison.md with 8 notes; MLflow: make ui
"""


def test_stages_for_which_there_is_no_room_take_one_line():
    slices = {"strategy": 20.4, "single": 25.9, "share": 12.4, "together": 14.45, "devices": 2}
    wide = lines_of(of_cpus(*on_cpus(ratio(1.27, 1.2, 1.3), slices=slices)))
    said = {"alike": STATES["diverged"].rows[2].verdict, "findings": (COMMUNICATION,)}
    narrow = lines_of(of_cpus(*on_cpus(ratio(1.27, 1.2, 1.3), slices=slices, **said)), 80)
    assert sum(line.startswith(("  S", "  W")) for line in wide) == 4
    (others,) = [line for line in narrow if " others " in line]
    assert any("bound 2.08×" in line for line in narrow)
    assert others.split() == ["2", "others", "+3.24", "ms"]


def test_a_host_that_is_too_unsteady_is_told_in_the_place_of_stages_and_causes():
    """Nor are there two steps whose ratio is another than the speed-up beside them."""
    lines = lines_of(of_cpus(*on_cpus(ratio(1.04, 0.6, 1.9), findings=(COMMUNICATION,))))
    (told,) = [line for line in lines if line.startswith("What holds it back?")]
    assert told.split("  ")[-1].strip().startswith("This host was too unsteady to say where")
    assert [line for line in lines if line.startswith(("  S", "  W"))] == []
    assert "  This host was too unsteady to say where the time goes" in lines
    assert not any(" ms " in line for line in lines if line.startswith(("single ", "ddp ")))


def test_own_metrics_are_beside_the_weights():
    own = {"iou": 0.51234567, "a name\x1b of many characters": 0.2, "third": 1.0}
    rows = [row.model_copy(update={"metrics": {} if row.strategy == "dp" else own}) for row in on_cpus()]
    lines = lines_of(of_cpus(*rows), 80)
    first = next(number for number, line in enumerate(lines) if line.startswith("  iou, fast "))
    assert lines[first].split() == ["iou,", "fast", "single", "0.5123", "dp", "–", "ddp", "0.5123"]
    assert lines[first - 1].startswith("  weights, fast ")
    assert lines[first + 1].startswith("  a name\\x1b o…, fast ")
    assert len(lines) <= MOST_LINES


def test_a_bar_is_as_long_as_the_speed_is_large():
    lines = lines_of(of_cpus(*on_cpus(ratio(2.0, 1.9, 2.1))))
    single, ddp = (next(line for line in lines if line.startswith(name)) for name in ("single", "ddp"))
    assert ddp.count("█") == pytest.approx(2 * single.count("█"), abs=1)


def shown(*, terminal, verbose=False, width=100):
    stream = io.StringIO()
    colours = "truecolor" if terminal else None
    console = Console(file=stream, force_terminal=terminal, color_system=colours, width=width, highlight=False)
    show(STATES["noisy"], REPORTS, console, verbose=verbose)
    return stream.getvalue()


def test_a_file_has_the_same_text_without_control_characters():
    piped, terminal = shown(terminal=False), shown(terminal=True)
    assert "\x1b" not in piped
    assert "\x1b" in terminal
    assert re.sub(r"\x1b\[[0-9;]*m", "", terminal) == piped


def test_notes_are_said_if_asked_for():
    assert "samples per second differed by 22%" not in shown(terminal=False)
    assert "ddp-fast: noisy: samples per second differed by 22%" in shown(terminal=False, verbose=True)
    assert "with 2 notes" in shown(terminal=False)


@pytest.mark.parametrize(("width", "used"), [(60, 80), (90, 90), (200, 100)])
def test_the_width_is_that_of_the_terminal_within_bounds(width, used):
    assert len(shown(terminal=True, width=width).splitlines()[0]) == used
