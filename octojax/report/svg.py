"""Timelines as an SVG picture: a row per rank, widths in proportion to time."""

from dataclasses import dataclass
from html import escape

from octojax.report.panel import (
    DARK,
    LEGEND,
    LIGHT,
    Bar,
    Panel,
    bars,
    extent_s,
    kinds,
    nbytes,
    shaded,
    ticks,
)

SHADES = 4


@dataclass(frozen=True)
class Layout:
    """Distances in pixels. `plot` is the width in which the time axis is drawn."""

    plot: float = 1100.0
    left: float = 64.0
    right: float = 24.0
    row: float = 26.0
    gap: float = 6.0
    memory: float = 16.0
    heading: float = 30.0
    axis: float = 22.0
    legend: float = 34.0
    character: float = 6.3  # width of one, to know which labels fit


def style() -> str:
    """Returns the style sheet: colours by kind and shade, for light and for dark."""

    def colours(palette: dict[str, str], towards: str) -> str:
        return "\n".join(
            f".{kind}.s{shade} rect {{ fill: {shaded(kind, shade, palette, towards)} }}"
            for kind in LEGEND
            for shade in range(SHADES)
        )

    return f"""
.octo {{ --ink: #1f2328; --soft: #656d76; --paper: #ffffff; --idle: #eff1f3; --line: #d0d7de;
  font: 11px ui-sans-serif, system-ui, 'DejaVu Sans', sans-serif; }}
.octo text {{ fill: var(--ink); }} .octo .soft {{ fill: var(--soft); }}
.octo .heading {{ font-size: 13px; font-weight: 600; }}
.octo .paper {{ fill: var(--paper); }} .octo .idle {{ fill: var(--idle); }}
.octo .grid {{ stroke: var(--line); stroke-width: 1; }}
.octo .bound {{ stroke: #cf222e; stroke-width: 1.5; stroke-dasharray: 5 4; }}
.octo .bar text {{ fill: #ffffff; pointer-events: none; }}
.octo .bar.s2 text, .octo .bar.s3 text {{ fill: #1f2328; }}
.octo .bar rect {{ stroke: var(--paper); stroke-width: 0.8; }}
.octo .memory {{ fill: none; stroke: var(--soft); stroke-width: 1.2; }}
{colours(LIGHT, "#ffffff")}
@media (prefers-color-scheme: dark) {{
.octo {{ --ink: #e6edf3; --soft: #9198a1; --paper: #0d1117; --idle: #1c2128; --line: #30363d; }}
.octo .bar text, .octo .bar.s2 text, .octo .bar.s3 text {{ fill: #0d1117; }}
{colours(DARK, "#0d1117")}
}}"""


def render(panels: list[Panel], layout: Layout | None = None) -> str:
    """Returns the panels one above the other, on one time axis, as a complete SVG document.

    Every bar carries its action, start and end as a tooltip and as data attributes.
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
        f'aria-label="{escape("; ".join(p.heading for p in panels))}">\n'
        f"<style>{style()}</style>\n"
        f'<rect class="paper" width="100%" height="100%"/>\n' + "\n".join(parts) + "\n</svg>\n"
    )


def _panel(
    panel: Panel, index: int, end_s: float, top: float, layout: Layout
) -> tuple[list[str], float]:
    """Returns the elements of a panel, and where it ends."""
    timeline = panel.timeline
    scale = layout.plot / end_s
    has_memory = any(len(points) > 1 for points in timeline.memory)
    pitch = layout.row + layout.gap + (layout.memory + layout.gap if has_memory else 0.0)
    first = top + layout.heading + layout.axis
    bottom = first + pitch * len(timeline.ranks)
    out = [f'<text class="heading" x="{layout.left}" y="{top + 18}">{escape(panel.heading)}</text>']
    for time_s, label in ticks(end_s, 10, timeline.unit):
        x = layout.left + time_s * scale
        out.append(
            f'<g class="tick" data-t="{time_s!r}"><line class="grid" x1="{x:.2f}" x2="{x:.2f}" '
            f'y1="{first - 6}" y2="{bottom}"/><text class="soft" x="{x:.2f}" y="{first - 10}" '
            f'text-anchor="middle">{label}</text></g>'
        )
    for rank in range(len(timeline.ranks)):
        y = first + rank * pitch
        width = timeline.makespan_s * scale
        out.append(
            f'<text x="{layout.left - 10}" y="{y + layout.row / 2 + 4}" text-anchor="end">'
            f'rank {rank}</text><rect class="idle span" data-s="0" '
            f'data-e="{timeline.makespan_s!r}" x="{layout.left}" y="{y:.2f}" '
            f'width="{width:.2f}" height="{layout.row}"><title>{_account(panel, rank)}</title>'
            f"</rect>"
        )
        if has_memory:
            below = y + layout.row + layout.gap
            out.append(_memory(panel, rank, below, scale, layout))
    for bar in bars(timeline):
        out.append(_bar(bar, panel, index, first + bar.rank * pitch, scale, layout))
    if panel.bound_s:
        x = layout.left + panel.bound_s * scale
        out.append(
            f'<g class="tick" data-t="{panel.bound_s!r}"><line class="bound" x1="{x:.2f}" '
            f'x2="{x:.2f}" y1="{first - 6}" y2="{bottom}"><title>lower bound '
            f"{panel.time(panel.bound_s)}</title></line></g>"
        )
    return out, bottom + 6


def _bar(bar: Bar, panel: Panel, index: int, y: float, scale: float, layout: Layout) -> str:
    x, width = layout.left + bar.start_s * scale, (bar.end_s - bar.start_s) * scale
    time = panel.time
    kind, shade = bar.action.kind.value, min(bar.shade, SHADES - 1)
    names = (bar.label, str(bar.action.microbatch))
    name = next((n for n in names if len(n) * layout.character + 3 <= width), "")
    label = (
        f'<text x="{x + width / 2:.2f}" y="{y + layout.row / 2 + 4:.2f}" '
        f'text-anchor="middle">{name}</text>'
        if name
        else ""
    )
    return (
        f'<g class="bar span {kind} s{shade}" data-a="{bar.label}" data-m="{bar.action.microbatch}"'
        f' data-r="{bar.rank}" data-p="{index}" data-s="{bar.start_s!r}" data-e="{bar.end_s!r}">'
        f'<rect x="{x:.2f}" y="{y:.2f}" width="{width:.2f}" height="{layout.row}"/>{label}'
        f"<title>{bar.label} on rank {bar.rank}: {time(bar.start_s)} to {time(bar.end_s)} "
        f"({time(bar.end_s - bar.start_s)})</title></g>"
    )


def _account(panel: Panel, rank: int) -> str:
    r, time = panel.timeline.ranks[rank], panel.time
    return (
        f"rank {rank}: busy {time(r.busy_s)}, bubble {time(r.bubble_s)} "
        f"({time(r.boundary_bubble_s)} at its ends, {time(r.residual_bubble_s)} between)"
    )


def _memory(panel: Panel, rank: int, y: float, scale: float, layout: Layout) -> str:
    """A step line from nothing to the largest peak of all ranks."""
    points = panel.timeline.memory[rank]
    most = max((b for row in panel.timeline.memory for _, b in row), default=0.0) or 1.0
    corners, last = [], None
    for time_s, size in points:
        height = y + layout.memory * (1 - size / most)
        if last is not None:
            corners.append(f"{time_s * scale:.2f},{last:.2f}")
        corners.append(f"{time_s * scale:.2f},{height:.2f}")
        last = height
    peak = nbytes(max((b for _, b in points), default=0.0))
    return (
        f'<g transform="translate({layout.left},0)"><polyline class="memory" '
        f'vector-effect="non-scaling-stroke" points="{" ".join(corners)}">'
        f"<title>memory of rank {rank}, at most {peak}</title></polyline></g>"
        f'<text class="soft" x="{layout.left - 10}" y="{y + layout.memory - 3}" '
        f'text-anchor="end" font-size="9">{peak}</text>'
    )


def _legend(found: list[str], y: float, layout: Layout) -> str:
    parts, x = [], layout.left
    for kind in found:
        name = f"{kind} {LEGEND[kind]}"
        parts.append(
            f'<g class="bar {kind} s0"><rect x="{x}" y="{y}" width="14" height="14"/></g>'
            f'<text x="{x + 19}" y="{y + 11}">{name}</text>'
        )
        x += 19 + len(name) * layout.character + 18
    parts.append(
        f'<rect class="idle" x="{x}" y="{y}" width="14" height="14"/>'
        f'<text x="{x + 19}" y="{y + 11}">bubble</text>'
        f'<text class="soft" x="{x + 80}" y="{y + 11}">3F7: stage 3, forward, microbatch 7; '
        f"paler: a rank's later stages</text>"
    )
    return "".join(parts)
