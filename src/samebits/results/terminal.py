"""The answers of a comparison for a terminal: at most ``MOST_LINES`` lines, on a terminal as in a file."""

from __future__ import annotations

import re
import textwrap
from typing import TYPE_CHECKING

from rich.console import Console
from rich.text import Text

from samebits.errors import counted, printable
from samebits.here import is_kit
from samebits.results.answers import facts, fastest, helps, how_much_faster, nothing, parallel
from samebits.results.explanation.words import NOTHING
from samebits.results.figures import milliseconds, multiple, signed_ms, wall_time
from samebits.results.lines import WIDTHS, answer, axis, cut, extent, rule, width_of, wrapped
from samebits.results.sameness import is_it_the_same
from samebits.results.table import own_metric
from samebits.results.text import CHANGES, COLOURS, by_numerics, devices_of, exact_first, first_numerics, remarks
from samebits.results.verdict_text import SIGNS
from samebits.results.waterfall import Stage, single_ms, waterfall, why_no_speed_up, why_untold
from samebits.strategies import BASELINE

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from samebits.results.comparison import Comparison, Row

MOST_LINES = 25

_MOST_METRICS = 2

_WORDS, _MS, _SPEED = 31, 12, 12
"""Columns of words, of ms and of speeds. The bars have the rest."""

_LOST, _GAINED, _SPEED_BAR = "░", "▒", "█"


def show(
    comparison: Comparison,
    reports: Path,
    console: Console | None = None,
    *,
    verbose: bool = False,
    seconds: float | None = None,
) -> None:
    """Print the answers, and where the rest is, in ``reports``; if ``verbose``, the notes too.

    ``seconds`` is what it all took, if that is known.
    """
    console = console or Console(highlight=False)
    width = width_of(console)
    said = remarks(comparison)
    for line in answer_lines(comparison, reports, width, notes=len(said), seconds=seconds):
        console.print(line, soft_wrap=True)
    if verbose and said:
        console.print()
        for remark in said:
            console.print(f"- {printable(remark)}", markup=False, soft_wrap=True)


def answer_lines(
    comparison: Comparison, reports: Path, width: int, *, notes: int = 0, seconds: float | None = None
) -> list[Text]:
    """The lines, of at most so many columns. Of stages the largest are shown, as many as there is room for."""
    took = "" if seconds is None else wall_time(seconds)
    head = [rule(width), *map(Text, wrapped(" · ".join(facts(comparison)[:4]), width)), Text()]
    if took and len(head[-2]) + len(took) + 2 <= width:
        head[-2].append(f"{took:>{width - len(head[-2])}}")
    head += [*_answers(comparison, width), Text()]
    gap = [Text()] if width == WIDTHS[1] else []  # a narrow form needs the lines, as its words wrap sooner
    tail = [
        *gap,
        *_hashes(comparison, width),
        *_metrics(comparison, width),
        *gap,
        *_places(comparison, reports, width, notes),
    ]
    room = MOST_LINES - len(head) - len(tail)
    return [*head, *_speeds(comparison, width, room), *tail]


def _answers(comparison: Comparison, width: int) -> Iterator[Text]:
    speed, found, same = how_much_faster(comparison), helps(comparison), is_it_the_same(comparison)
    style = {"faster": "bold green", "slower": "bold red"}.get(speed.state, "bold")
    yield from answer("How much faster?", speed.figure, speed.whole, width, style)
    if found:
        figure = found[0].figure if found[0].finding.gain else "?"
        yield from answer("What holds it back?", figure, found[0].whole, width, "bold")
    else:
        told = nothing(comparison)
        yield from answer("What holds it back?", "nothing" if told.startswith(NOTHING) else "?", told, width, "bold")
    style = {"yes": "bold green", "no": "bold red"}.get(same.state, "bold")
    said = "; ".join(f"{numerics}: {text}" for numerics, text in same.told.items())
    word = {"one run": "–", "not judged": "?"}.get(same.state, same.state)
    yield from answer("Is it the same model?", word, said, width, style)


def _speeds(comparison: Comparison, width: int, room: int) -> list[Text]:
    """A bar for each run of the first numerics, and the stages of the fastest one."""
    rows = first_numerics(comparison)
    best = fastest(rows)
    measured = [*filter(parallel, rows)]
    ends = [end for row in measured if row.speedup for end in (row.devices_used, row.speedup.high, _bound_of(row))]
    limit, columns = 1.06 * max([1.0, *ends]), width - _WORDS - _MS - _SPEED
    most = max([1, *(row.devices_used for row in measured)])
    one, alone = waterfall(best) if best is not None and best.speedup else None, single_ms(rows, best)
    if best is not None and why_untold(best):
        alone = None  # beside a speed-up that it contradicts
    ideal = f"ideal: {one.ideal}× in {milliseconds(alone / one.ideal)}" if one and one.stages and alone else ""
    head = f"{ideal:<{_WORDS}}{axis(most, limit, columns)}{'a step':>{_MS}}{'speed':>{_SPEED}}"
    lines = [Text(head, style="dim")]
    for row in [row for row in rows if row is not best]:
        if row.strategy == BASELINE.name:
            lines.append(_bar(row, "one device", 1.0, alone, limit, columns))
        elif row.speedup:
            ms = row.slice_step_ms.strategy if row.slice_step_ms else None
            lines.append(_bar(row, devices_of(row), row.speedup.median, ms, limit, columns))
        else:
            lines.append(_unmeasured(row, width, said=best is None))
    if one:
        shown, others = _largest(one.stages, room - len(lines) - 1)
        lines += [_stage(stage, limit, columns) for stage in shown]
        if others:
            rest = signed_ms(sum(stage.ms for stage in others))
            lines.append(Text(f"{f'  {len(others)} others':<{_WORDS + columns}}{rest:>{_MS}}"))
        ms = one.step_ms if alone else None
        lines.append(_bar(one.row, devices_of(one.row), one.speedup.median, ms, limit, columns))
        if why_untold(one.row):
            lines.append(Text("  This host was too unsteady to say where the time goes", style="dim"))
    return lines


def _largest(stages: Sequence[Stage], room: int) -> tuple[list[Stage], list[Stage]]:
    """The stages for which there is room, in order, and the others, which take one line."""
    if len(stages) <= room:
        return list(stages), []
    if room < 2:
        return [], []
    largest = sorted(stages[1:], key=lambda stage: -abs(stage.ms))[: max(0, room - 2)]
    shown = [stage for stage in stages if stage is stages[0] or stage in largest]
    return shown, [stage for stage in stages if stage not in shown]


def _unmeasured(row: Row, width: int, *, said: bool) -> Text:
    """A run without a speed-up, with the reason unless an answer has ``said`` it."""
    why = "" if said else why_no_speed_up(row).partition(",")[0]
    words = ["not parallel here"] if row.devices_used == 1 else [devices_of(row)]
    told = f"{row.strategy:<8}" + ": ".join([*words, *([why] if why else [])])
    return Text(printable(cut(told, width)))


def _bound_of(row: Row) -> float:
    return row.bound.median if row.bound else 0.0


def _bar(row: Row, on: str, speed: float, ms: float | None, limit: float, columns: int) -> Text:
    _, length = extent(0, speed, limit, columns)
    words = textwrap.shorten(f"{row.strategy:<8}{on}", _WORDS - 1, placeholder="…") if len(on) > 22 else None
    return Text.assemble(
        f"{words or f'{row.strategy:<8}{on}':<{_WORDS}}",
        (f"{_SPEED_BAR * length:<{columns}}", COLOURS[row.strategy]),
        f"{milliseconds(ms) if ms else '':>{_MS}}{multiple(speed):>{_SPEED}}",
    )


def _stage(stage: Stage, limit: float, columns: int) -> Text:
    start, length = extent(stage.start, stage.end, limit, columns)
    mark, colour = (_LOST, CHANGES["lost"][0]) if stage.lost else (_GAINED, CHANGES["gain"][0])
    speed = f"{'bound ' if stage.name == 'fixed' else ''}{multiple(stage.end)}"
    return Text.assemble(
        f"{'  ' + stage.words:<{_WORDS}}", " " * start, (f"{mark * length:<{columns - start}}", colour),
        f"{signed_ms(stage.ms):>{_MS}}{speed:>{_SPEED}}",
    )  # fmt: skip


def _hashes(comparison: Comparison, width: int) -> Iterator[Text]:
    groups = by_numerics(comparison.rows)
    for numerics in exact_first(groups):
        rows = groups[numerics]
        chain = f"{rows[0].strategy} {rows[0].weights_sha256[:8]}"
        for row in rows[1:]:
            sign = SIGNS[row.verdict.grade] if row.verdict else " "
            chain += f" {sign} {row.strategy} {row.weights_sha256[:8]}"
        yield from map(Text, wrapped(f"  weights, {numerics:<13}{chain}", width, " " * 24))


def _metrics(comparison: Comparison, width: int) -> Iterator[Text]:
    """The user's own metrics of the first numerics, a line for each of the first ones."""
    rows = first_numerics(comparison)
    names = list(dict.fromkeys(name for row in rows for name in row.metrics))
    for name in names[:_MOST_METRICS]:
        values = "   ".join(f"{row.strategy} {own_metric(name, row)}" for row in rows)
        words = f"{cut(printable(name), 13)}, {rows[0].numerics}"
        yield from map(Text, wrapped(f"  {words:<22}{values}", width, " " * 24))


def _places(comparison: Comparison, reports: Path, width: int, notes: int) -> list[Text]:
    """What to try, and where everything else is."""
    found = helps(comparison)
    lines = {}
    if found and (command := found[0].command.replace("\n", ", ")):
        lines["try it"] = _broken(command if comparison.pipeline else f"set {command}", width - 13)
    lines["the page"] = str(reports / "index.html")
    said = f" with {counted(notes, 'note')}" if notes else ""
    lines["the rest"] = f"{reports / 'comparison.md'}{said}; MLflow: {'make ui' if is_kit() else 'samebits ui'}"
    shown = []
    for name, text in lines.items():
        first, *more = text.split("\n")
        shown += [Text.assemble((f"  {name:<11}", "dim"), printable(first)), *(Text(printable(line)) for line in more)]
    return shown


def _broken(command: str, width: int) -> str:
    """A command in lines of at most so many columns, as a shell takes them; one long word stays whole."""
    lines = [""]
    for number, part in enumerate(re.split(r" (?=-S )", command)):
        if number and len(lines[-1]) + 1 + len(part) + 2 > width:
            lines[-1] += " \\"
            lines.append(" " * 13 + part)
        else:
            lines[-1] += f" {part}" if number else part
    return "\n".join(lines)
