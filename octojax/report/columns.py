"""Rows with more actions than there are pixels: narrow ones together, so that busy stays busy.

bars      |F|B|F|B|   F     |     each narrower than a column
columns   [F 3/8 B 1/2][F 1/4][    ]
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from octojax.report.panel import Bar


@dataclass(frozen=True, slots=True)
class Column:
    """A short piece of a rank's time, and how much of it went to each kind of action.

    `busy_s` maps the kinds to seconds, which come to at most `end_s - start_s`.
    """

    rank: int
    start_s: float
    end_s: float
    busy_s: dict[str, float]
    actions: int


def condensed(row: Sequence[Bar], least_s: float) -> Iterator[Bar | Column]:
    """Yields the bars of one rank in order, neighbours shorter than `least_s` as columns.

    Columns lie on the grid of multiples of `least_s`, cut to the neighbours they stand for, so
    that none reaches into another bar. A short bar with as much idle time around it stays
    itself. Bars that take no time are left out.
    """
    close: list[Bar] = []
    for bar in sorted(row, key=lambda b: (b.start_s, b.end_s)):
        length = bar.end_s - bar.start_s
        if length <= 0:
            continue
        if close and (length >= least_s or bar.start_s - close[-1].end_s >= least_s):
            yield from _columns(close, least_s)
            close = []
        if length >= least_s:
            yield bar
        else:
            close.append(bar)
    if close:
        yield from _columns(close, least_s)


def _columns(close: list[Bar], least_s: float) -> Iterator[Bar | Column]:
    if len(close) == 1:
        yield close[0]
        return
    first_s, last_s = close[0].start_s, max(bar.end_s for bar in close)
    busy: dict[int, dict[str, float]] = {}
    counts: dict[int, int] = {}
    for bar in close:
        for at in range(int(bar.start_s // least_s), int(bar.end_s // least_s) + 1):
            start, end = max(bar.start_s, at * least_s), min(bar.end_s, (at + 1) * least_s)
            if end <= start:
                continue
            kinds = busy.setdefault(at, {})
            kind = bar.action.kind.value
            kinds[kind] = kinds.get(kind, 0.0) + end - start
            counts[at] = counts.get(at, 0) + 1
    for at, kinds in sorted(busy.items()):
        start, end = max(first_s, at * least_s), min(last_s, (at + 1) * least_s)
        yield Column(close[0].rank, start, end, kinds, counts[at])


def thinned(points: Sequence[tuple[float, float]], least_s: float) -> Iterator[tuple[float, float]]:
    """Yields `(time_s, value)` of a step line: of each column the largest value and the last."""
    at, most, last = -1, (0.0, 0.0), (0.0, 0.0)
    for point in points:
        column = int(point[0] // least_s)
        if column != at:
            if at >= 0:
                yield from _ends(most, last)
            at, most = column, point
        most, last = max(most, point, key=lambda p: p[1]), point
    if at >= 0:
        yield from _ends(most, last)


def _ends(most: tuple[float, float], last: tuple[float, float]) -> tuple[tuple[float, float], ...]:
    return (most,) if most == last else (most, last)
