"""Timelines as an SVG picture: a row per rank, widths in proportion to time.

Every colour is an attribute of the element that has it, since few programs other than browsers
read style sheets; the classes are there for a page's own (`octojax.report.html`).
"""

from dataclasses import dataclass
from html import escape

from octojax.report.columns import Column, condensed, thinned
from octojax.report.panel import (
    LEGEND,
    LIGHT,
    Bar,
    Panel,
    bars,
    extent_s,
    filled,
    kinds,
    nbytes,
    readable,
    ticks,
)

SHADES = 4
PAPER, IDLE, LINE, INK, SOFT, BOUND = (
    "#ffffff", "#eff1f3", "#d0d7de", "#1f2328", "#5b636c", "#cf222e",
)  # fmt: skip
FONTS = "'DejaVu Sans', Helvetica, Arial, sans-serif"
FONT_SIZES = (11, 9, 7)
"""In which a bar's label is tried, until one fits."""


@dataclass(frozen=True)
class Layout:
    """Distances in pixels. `plot` is the width in which the time axis is drawn.

    Neighbouring actions narrower than `least` are drawn together.
    """

    plot: float = 1100.0
    left: float = 64.0
    right: float = 24.0
    row: float = 26.0
    gap: float = 6.0
    memory: float = 16.0
    heading: float = 30.0
    note: float = 18.0
    axis: float = 22.0
    legend: float = 34.0
    character: float = 6.6  # width of one in the largest font, to know which labels fit
    least: float = 1.0


def render(panels: list[Panel], layout: Layout | None = None) -> str:
    """Returns the panels one above the other, on one time axis, as a complete SVG document.

    Every bar carries its action, start and end as a tooltip and as data attributes. Busy time is
    never drawn as idle: neighbours too narrow to be seen become columns that are filled with
    each kind's share of their time.
    """
    layout = layout or Layout()
    end_s = extent_s(panels) or 1.0
    parts, top = [], 8.0
    for index, panel in enumerate(panels):
        drawn, top = _panel(panel, index, end_s, top, layout)
        parts += drawn
    parts.append(_legend(kinds(panels), top + 8, layout))
    width, height = layout.left + layout.plot + layout.right, top + layout.legend
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" class="octo" width="{width:.0f}" '
        f'height="{height:.0f}" viewBox="0 0 {width:.0f} {height:.0f}" role="img" '
        f'font-family="{FONTS}" font-size="{FONT_SIZES[0]}" '
        f'aria-label="{escape("; ".join(p.heading for p in panels))}">\n'
        f'<rect class="paper" width="{width:.0f}" height="{height:.0f}" fill="{PAPER}"/>\n'
        + "\n".join(parts)
        + "\n</svg>\n"
    )


def _text(x: float, y: float, text: str, look: str = "", soft: bool = False) -> str:
    colour = f'class="soft" fill="{SOFT}"' if soft else f'class="ink" fill="{INK}"'
    return f'<text {colour} x="{x:.2f}" y="{y:.2f}"{" " * bool(look)}{look}>{escape(text)}</text>'


def _panel(
    panel: Panel, index: int, end_s: float, top: float, layout: Layout
) -> tuple[list[str], float]:
    """Returns the elements of a panel, and where it ends."""
    timeline = panel.timeline
    scale = layout.plot / end_s
    has_memory = any(len(points) > 1 for points in timeline.memory)
    pitch = layout.row + layout.gap + (layout.memory + layout.gap if has_memory else 0.0)
    out = [_text(layout.left, top + 18, panel.heading, 'font-size="13" font-weight="600"')]
    if panel.note:
        out.append(_text(layout.left, top + 18 + layout.note, panel.note, soft=True))
        top += layout.note
    first = top + layout.heading + layout.axis
    bottom = first + pitch * len(timeline.ranks)
    for time_s, label in ticks(end_s, 10, timeline.unit):
        x = layout.left + time_s * scale
        name = _text(x, first - 10, label, 'text-anchor="middle"', soft=True)
        out.append(
            f'<g class="tick" data-t="{time_s!r}"><line class="grid" stroke="{LINE}" x1="{x:.2f}" '
            f'x2="{x:.2f}" y1="{first - 6}" y2="{bottom}"/>'
            f"{name}</g>"
        )
    rows: list[list[Bar]] = [[] for _ in timeline.ranks]
    for bar in bars(timeline):
        rows[bar.rank].append(bar)
    for rank, row in enumerate(rows):
        y = first + rank * pitch
        width = timeline.makespan_s * scale
        name = _text(layout.left - 10, y + layout.row / 2 + 4, f"rank {rank}", 'text-anchor="end"')
        out.append(
            f'{name}<rect class="idle span" fill="{IDLE}" data-s="0" '
            f'data-e="{timeline.makespan_s!r}" x="{layout.left}" y="{y:.2f}" '
            f'width="{width:.2f}" height="{layout.row}"><title>{_account(panel, rank)}</title>'
            f"</rect>"
        )
        if has_memory:
            out.append(_memory(panel, rank, y + layout.row + layout.gap, scale, layout))
        for place, piece in enumerate(condensed(row, layout.least / scale)):
            if isinstance(piece, Column):
                out.append(_column(piece, panel, y, scale, layout))
            else:
                out.append(_bar(piece, place, panel, index, y, scale, layout))
    if panel.bound_s:
        x = layout.left + panel.bound_s * scale
        out.append(
            f'<g class="tick" data-t="{panel.bound_s!r}"><line class="bound" stroke="{BOUND}" '
            f'stroke-width="1.5" stroke-dasharray="5 4" x1="{x:.2f}" x2="{x:.2f}" '
            f'y1="{first - 6}" y2="{bottom}"><title>lower bound '
            f"{panel.time(panel.bound_s)}</title></line></g>"
        )
    return out, bottom + 6


def _bar(
    bar: Bar, place: int, panel: Panel, index: int, y: float, scale: float, layout: Layout
) -> str:
    """Returns a rectangle without a border, which would hide others; every other one is darker.

    Edges are not smoothed where bars touch, or the paper would shine through between them.
    """
    x, width = layout.left + bar.start_s * scale, (bar.end_s - bar.start_s) * scale
    kind, shade, odd = bar.action.kind.value, min(bar.shade, SHADES - 1), place % 2 > 0
    colour = filled(kind, shade, odd, LIGHT, PAPER)
    edges = ' shape-rendering="crispEdges"' if width >= 1 else ""
    time, label = panel.time, ""
    if named := fitting(bar, width, layout):
        name, size, turned = named
        middle = x + width / 2, y + layout.row / 2
        looks = f' font-size="{size}"' if size != FONT_SIZES[0] else ""
        if turned:
            looks += f' transform="rotate(-90 {middle[0]:.2f} {middle[1]:.2f})"'
        label = (
            f'<text fill="{readable(colour)}" x="{middle[0]:.2f}" '
            f'y="{middle[1] + 0.36 * size:.2f}" text-anchor="middle"{looks}>{name}</text>'
        )
    return (
        f'<g class="bar span {kind} s{shade}{" o" * odd}" data-a="{bar.label}" '
        f'data-m="{bar.action.microbatch}" data-r="{bar.rank}" data-p="{index}" '
        f'data-s="{bar.start_s!r}" data-e="{bar.end_s!r}"><rect fill="{colour}"{edges} '
        f'x="{x:.3f}" y="{y:.2f}" width="{width:.3f}" height="{layout.row}"/>{label}'
        f"<title>{bar.label} on rank {bar.rank}: {time(bar.start_s)} to {time(bar.end_s)} "
        f"({time(bar.end_s - bar.start_s)})</title></g>"
    )


def fitting(bar: Bar, width: float, layout: Layout) -> tuple[str, int, bool] | None:
    """Returns the best label that a bar has room for, its font size, and whether it is turned.

    The action rather than its microbatch alone, and large rather than small; upright in narrow
    bars. None if nothing fits.
    """
    microbatch = str(bar.action.microbatch)
    for name in (bar.label, microbatch):
        for size in FONT_SIZES:
            if len(name) * layout.character * size / FONT_SIZES[0] + 2 <= width:
                return name, size, False
    for size in FONT_SIZES:
        long = len(microbatch) * layout.character * size / FONT_SIZES[0] + 2
        if size <= width and long <= layout.row:
            return microbatch, size, True
    return None


def _column(column: Column, panel: Panel, y: float, scale: float, layout: Layout) -> str:
    """One above the other, each kind as high as its share of the column's time."""
    length = column.end_s - column.start_s
    x, width = layout.left + column.start_s * scale, length * scale
    height = layout.row / max(length, sum(column.busy_s.values()))
    parts, shares, bottom = [], [], y + layout.row
    for kind in LEGEND:
        if busy := column.busy_s.get(kind, 0.0):
            bottom -= busy * height
            shares.append(f"{kind} {busy / length:.0%}")
            parts.append(
                f'<rect class="{kind}" fill="{LIGHT[kind]}" x="{x:.3f}" y="{bottom:.3f}" '
                f'width="{width:.3f}" height="{busy * height:.3f}"/>'
            )
    time = panel.time
    return (
        f'<g class="column span" data-r="{column.rank}" data-s="{column.start_s!r}" '
        f'data-e="{column.end_s!r}">{"".join(parts)}<title>{column.actions} actions on rank '
        f"{column.rank}: {', '.join(shares)} of {time(column.start_s)} to {time(column.end_s)}"
        f"</title></g>"
    )


def _account(panel: Panel, rank: int) -> str:
    r, time = panel.timeline.ranks[rank], panel.time
    return (
        f"rank {rank}: busy {time(r.busy_s)}, bubble {time(r.bubble_s)} "
        f"({time(r.boundary_bubble_s)} at its ends, {time(r.residual_bubble_s)} between)"
    )


def _memory(panel: Panel, rank: int, y: float, scale: float, layout: Layout) -> str:
    """Returns a step line from nothing to the largest peak of all ranks."""
    points = panel.timeline.memory[rank]
    most = max((b for row in panel.timeline.memory for _, b in row), default=0.0) or 1.0
    corners, last = [], None
    for time_s, size in thinned(points, 0.5 / scale):
        height = y + layout.memory * (1 - size / most)
        if last is not None:
            corners.append(f"{time_s * scale:.2f},{last:.2f}")
        corners.append(f"{time_s * scale:.2f},{height:.2f}")
        last = height
    peak = nbytes(max((b for _, b in points), default=0.0))
    name = _text(
        layout.left - 10, y + layout.memory - 3, peak, 'text-anchor="end" font-size="9"', soft=True
    )
    return (
        f'<g transform="translate({layout.left},0)"><polyline class="memory" fill="none" '
        f'stroke="{SOFT}" stroke-width="1.2" '
        f'vector-effect="non-scaling-stroke" points="{" ".join(corners)}">'
        f"<title>memory of rank {rank}, at most {peak}</title></polyline></g>{name}"
    )


def _legend(letters: list[str], y: float, layout: Layout) -> str:
    parts, x = [], layout.left
    for kind in letters:
        name = f"{kind} {LEGEND[kind]}"
        parts.append(
            f'<rect class="{kind}" fill="{LIGHT[kind]}" x="{x:.1f}" y="{y}" width="14" '
            f'height="14"/>{_text(x + 19, y + 11, name)}'
        )
        x += 19 + len(name) * layout.character + 18
    parts.append(
        f'<rect class="idle" fill="{IDLE}" x="{x:.1f}" y="{y}" width="14" height="14"/>'
        f"{_text(x + 19, y + 11, 'bubble')}"
    )
    says = "3F7: stage 3, forward, microbatch 7; paler: a rank's later stages"
    return "".join(parts) + _text(x + 80, y + 11, says, soft=True)
