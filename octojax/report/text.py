"""Timelines in a terminal: a row per rank, widths in proportion to time.

       0 s        5 s        10 s
rank 0 0F0f0F1f...................0B0bbbbb0B1bbbbb
rank 1 .....1F0f1B0bbbbb1F1f1B1bbbbb..............
"""

import io
import math
import os
import shutil
import sys

from rich.console import Console, Group, RenderableType
from rich.style import Style
from rich.table import Table
from rich.text import Text

from octojax.report.columns import Column, condensed
from octojax.report.panel import (
    LEGEND,
    LIGHT,
    Bar,
    Panel,
    account,
    bars,
    extent_s,
    kinds,
    mixed,
    readable,
    shaded,
    ticks,
)

BUBBLE = "."
MIN_WIDTH, MAX_RANKS_IN_TABLE = 20, 64


def render(
    panels: list[Panel],
    width: int | None = None,
    colour: bool | None = None,
    accounts: bool = True,
) -> str:
    """Returns the picture and, if `accounts`, those of its panels' ranks as lines of text.

    `width` defaults to the terminal's. `colour` True writes ANSI colours, False marks actions
    by letters alone; None colours a terminal and leaves a file plain.
    """
    colours = _coloured_terminal() if colour is None else colour
    width = width or max(60, shutil.get_terminal_size((120, 24)).columns)
    out = io.StringIO()
    console = Console(
        file=out,
        width=width,
        force_terminal=colours,
        color_system="truecolor" if colours else None,
        no_color=not colours,
        highlight=False,
    )
    console.print(picture(panels, width, colours, accounts))
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines()) + "\n"


def _coloured_terminal() -> bool:
    """Whether standard output shows colours, and NO_COLOR does not turn them off."""
    plain = os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb"
    return sys.stdout.isatty() and not plain


def picture(
    panels: list[Panel], width: int, colour: bool = True, accounts: bool = True
) -> RenderableType:
    """Returns what `render` prints, for use inside other rich output."""
    end_s = extent_s(panels)
    parts: list[RenderableType] = []
    for panel in panels:
        parts += [Text(panel.heading, style="bold"), *([Text(panel.note)] if panel.note else ())]
        parts += [*_rows(panel, end_s, width, colour), Text()]
    dense = any(
        0 < span.end_s - span.start_s < end_s / width for p in panels for span in p.timeline.actions
    )
    parts.append(_legend(kinds(panels), colour, dense))
    if accounts:
        parts += [Text(), *(_account(panel) for panel in panels)]
    return Group(*parts)


def _rows(panel: Panel, end_s: float, width: int, colour: bool) -> list[Text]:
    ranks = len(panel.timeline.ranks)
    margin = len(f"rank {max(0, ranks - 1)} ")
    columns = whole(panel, end_s, max(MIN_WIDTH, width - margin))
    bars_by_rank: list[list[Bar]] = [[] for _ in range(ranks)]
    for bar in bars(panel.timeline):
        bars_by_rank[bar.rank].append(bar)
    lines = [
        Text(" " * margin + axis(end_s, columns, panel.timeline.unit), style="dim", no_wrap=True)
    ]
    for rank, row in enumerate(bars_by_rank):
        line = Text(f"rank {rank}".ljust(margin), no_wrap=True)
        lines.append(line + _row(row, end_s, columns, colour))
    return lines


def whole(panel: Panel, end_s: float, columns: int) -> int:
    """Returns the columns to use: whole ones per unit of time where all times have a unit.

    Unit costs then come out exactly as wide as they are long; otherwise all columns are used.
    """
    spans = panel.timeline.actions
    unit = min((s.end_s - s.start_s for s in spans if s.end_s > s.start_s), default=0.0)
    if not unit or end_s / unit > columns:
        return columns
    times = [end_s, *(s.end_s for s in spans)]
    if any(abs(t / unit - round(t / unit)) > 1e-6 for t in times):
        return columns
    units = round(end_s / unit)
    return columns // units * units


def axis(end_s: float, columns: int, unit: str = "s") -> str:
    """Returns the marks of the time axis, each beginning in the column of its time."""
    line = [" "] * columns
    free = 0
    for time_s, label in ticks(end_s, columns // 12, unit):
        at = edge(time_s, end_s, columns)
        if at >= free and at + len(label) <= columns:
            line[at : at + len(label)] = label
            free = at + len(label) + 1
    return "".join(line)


def edge(time_s: float, end_s: float, columns: int) -> int:
    """Returns the column in which a time falls."""
    return math.floor(time_s / end_s * columns + 0.5) if end_s > 0 else 0


def _row(row: list[Bar], end_s: float, columns: int, colour: bool) -> Text:
    line, at = Text(no_wrap=True), 0
    for index, (first, last, bar) in enumerate(_cells(row, end_s, columns)):
        line.append(BUBBLE * (first - at), Style(dim=True))
        if isinstance(bar, Bar):
            line.append(cell(bar, last - first, colour), _style(bar, index) if colour else None)
        else:
            look = Style(color=readable(LIGHT[bar]), bgcolor=LIGHT[bar]) if colour else None
            line.append(bar.lower(), look)
        at = last
    line.append(BUBBLE * (columns - at), Style(dim=True))
    return line


Cell = tuple[int, int, "Bar | str"]


def _cells(row: list[Bar], end_s: float, columns: int) -> list[Cell]:
    """Returns what is drawn from column to column: a bar, or a kind where bars are narrower.

    A row of actions narrower than a column shows their kinds as often as is their share of the
    time: each column takes the kind that lacks most of what it should have had so far.
    """
    if not end_s > 0:
        return []
    cells: list[Cell] = []
    shares: dict[int, dict[str, float]] = {}
    for piece in condensed(row, end_s / columns):
        first, last = (min(edge(t, end_s, columns), columns) for t in (piece.start_s, piece.end_s))
        if isinstance(piece, Column):
            at = min(int((piece.start_s + piece.end_s) / 2 / end_s * columns), columns - 1)
            for kind, busy in piece.busy_s.items():
                share = shares.setdefault(at, {})
                share[kind] = share.get(kind, 0.0) + busy / end_s * columns
        else:
            first = min(first, columns - 1)
            cells.append((first, max(last, first + 1), piece))
    free: list[Cell] = []
    at = 0
    for first, last, bar in cells:
        if last > max(first, at):
            free.append((max(first, at), last, bar))
            at = last
    full = {column for first, last, _ in free for column in range(first, last)}
    lack: dict[str, float] = {}
    for column in range(columns):
        share = shares.get(column, {})
        if column in full or not (share or lack):
            continue
        for kind, part in (*share.items(), (BUBBLE, max(0.0, 1 - sum(share.values())))):
            lack[kind] = lack.get(kind, 0.0) + part
        kind = max(lack, key=lambda k: lack[k])
        lack[kind] -= 1
        if kind != BUBBLE:
            free.append((column, column + 1, kind))
        elif not share:
            lack = {}  # what follows idle time begins anew
    return sorted(free, key=lambda c: c[0])


def cell(bar: Bar, width: int, colour: bool) -> str:
    """Returns the text of a bar: as much of its action's name as fits, then filling.

    A stroke or, in colour, a blank stands between a name and the next bar. Where not even the
    microbatch fits, the kind stands alone.
    """
    action = bar.action
    kind, microbatch = action.kind.value, str(action.microbatch)
    end = " " if colour else "|"
    end = "" if width < 2 else end
    filling = " " if colour else kind.lower()
    names = (bar.label, kind + microbatch, *((microbatch,) if colour else ()), kind)
    name = next((n for n in names if len(n) <= width - len(end)), "")
    return name + filling * (width - len(name) - len(end)) + end


def _style(bar: Bar, index: int) -> Style:
    """White on the kind's colour; neighbours differ a little, so that borders show."""
    background = shaded(bar.action.kind.value, bar.shade, LIGHT, "#ffffff")
    if index % 2:
        background = mixed(background, "#000000", 0.18)
    return Style(color=readable(background), bgcolor=background)


def _legend(letters: list[str], colour: bool, dense: bool) -> Text:
    line = Text()
    for kind in letters:
        line.append(
            f" {kind} ", Style(color=readable(LIGHT[kind]), bgcolor=LIGHT[kind]) if colour else None
        )
        line.append(f" {LEGEND[kind]}   ")
    line.append(BUBBLE * 3, Style(dim=True))
    line.append(" bubble   3F7: stage 3, forward, microbatch 7")
    if dense:
        line.append("; small letters: several actions in a column, by their shares of its time")
    return line


def _account(panel: Panel) -> Table:
    """Returns the table under the picture: where each rank's time went, what it held."""
    title = Text(panel.title)  # names may look like markup
    table = Table(title=title, title_justify="left", title_style="bold", box=None)
    for name in ("rank", "busy", "bubble", "", "at ends", "between", "peak microbatches", "peak"):
        table.add_column(name, justify="right")
    rows = account(panel)
    for row in rows[:MAX_RANKS_IN_TABLE]:
        table.add_row(*row)
    rest = len(rows) - MAX_RANKS_IN_TABLE
    if rest > 0:
        table.add_row(f"and {rest} more")
    return table
