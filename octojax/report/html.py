"""Timelines as one HTML file without any other: the viewer of `octojax/report/viewer`.

The page holds every action as numbers (`octojax.report.arrays`) and draws what is in view on a
canvas. Without JavaScript it still has the tables.
"""

import json
from html import escape
from importlib.resources import files
from string import Template

from octojax.ir import Timeline
from octojax.report.arrays import panel_data
from octojax.report.panel import DARK, LIGHT, Panel, account, extent_s

MOST_ACTIONS = 1_000_000
"""Of a page that a browser opens and moves around in at once."""

SCRIPTS = (
    "data", "words", "palette", "layout", "raster", "picture", "overlay", "minimap", "search",
    "selection", "details", "address", "input", "commands", "viewer", "main",
)  # fmt: skip
"""The viewer's parts, `viewer/NAME.js`, as they stand one after the other in the page."""

LIGHT_PAGE = {
    **{f"kind-{kind}": colour for kind, colour in LIGHT.items()},
    "paper": "#ffffff", "ink": "#1f2328", "soft": "#59616a", "line": "#d0d7de",
    "bound": "#cf222e", "accent": "#0550ae", "memory": "#c9d4e2",
    "cause-0": "#eff1f3", "cause-1": "#dbe9ff", "cause-2": "#d3f4ea", "cause-3": "#f4ecff",
    "cause-4": "#ffe4e8",
}  # fmt: skip
DARK_PAGE = {
    **{f"kind-{kind}": colour for kind, colour in DARK.items()},
    "paper": "#0d1117", "ink": "#e6edf3", "soft": "#9198a1", "line": "#3d444d",
    "bound": "#ff7b72", "accent": "#79c0ff", "memory": "#2d3b50",
    "cause-0": "#1c2128", "cause-1": "#16304f", "cause-2": "#0f3d33", "cause-3": "#33214d",
    "cause-4": "#4a2028",
}  # fmt: skip


def render(panels: list[Panel], title: str = "OctoPipe timeline") -> str:
    """Returns a self-contained page: the viewer, and a table of every panel's ranks.

    Several panels stand on one clock; the tables tell how the later ones differ from the first,
    rank by rank. Raises `ValueError` for panels in different units.
    """
    extent_s(panels)
    data = json.dumps([panel_data(panel) for panel in panels], separators=(",", ":"))
    return Template(_part("page.html")).substitute(
        title=escape(title),
        style=Template(_part("style.css")).substitute(
            light=_colours(LIGHT_PAGE), dark=_colours(DARK_PAGE)
        ),
        tables="\n".join(_table(panel, panels) for panel in panels),
        data=data.replace("<", "\\u003c"),
        script='"use strict";\n' + "\n".join(_part(f"{name}.js") for name in SCRIPTS),
    )


def is_large(panels: list[Panel]) -> bool:
    """Whether a browser will take its time over the page."""
    return sum(len(panel.timeline.actions) for panel in panels) > MOST_ACTIONS


def _part(name: str) -> str:
    return files("octojax.report").joinpath("viewer", name).read_text(encoding="utf-8")


def _colours(palette: dict[str, str]) -> str:
    return "\n".join(f"  --{name}: {colour};" for name, colour in palette.items())


def _table(panel: Panel, panels: list[Panel]) -> str:
    heads = ["rank", "busy", "bubble", "share", "at ends", "between", "peak microbatches", "peak"]
    rows = [list(row) for row in account(panel)]
    first = panels[0]
    if panel is not first and len(panel.timeline.ranks) == len(first.timeline.ranks):
        heads += ["busy, against the first", "bubble, against the first"]
        for row, own, other in zip(rows, panel.timeline.ranks, first.timeline.ranks, strict=True):
            row.append(_difference(panel, own.busy_s - other.busy_s))
            row.append(_difference(panel, own.bubble_s - other.bubble_s))
    head = "".join(f"<th>{h}</th>" for h in heads)
    body = "".join("<tr>" + "".join(f"<td>{c}</td>" for c in row) + "</tr>" for row in rows)
    notes = [panel.note, _against(panel.timeline, first.timeline) if panel is not first else ""]
    note = "".join(f"<p>{escape(text)}</p>" for text in notes if text)
    return f"<h2>{escape(panel.heading)}</h2>{note}<table><tr>{head}</tr>{body}</table>"


def _difference(panel: Panel, value: float) -> str:
    return ("-" if value < 0 else "+") + panel.time(abs(value))


def _against(timeline: Timeline, first: Timeline) -> str:
    if not first.makespan_s:
        return ""
    more = timeline.makespan_s / first.makespan_s - 1
    return f"{more:+.1%} of the first timeline's step"
