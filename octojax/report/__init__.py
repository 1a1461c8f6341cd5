"""Timelines for people and for other programs: text, SVG, HTML, Chrome trace, CSV, JSON.

A picture is a list of `Panel`s, each a titled timeline, drawn one above the other on one
time axis: `render_text([Panel("simulated with profile x", a), Panel("measured", b)])`.
"""

from octojax.report.data import from_json, load_timeline, save_timeline, to_csv, to_json
from octojax.report.html import render as render_html
from octojax.report.panel import Panel
from octojax.report.svg import render as render_svg
from octojax.report.text import render as render_text
from octojax.report.trace import to_trace

__all__ = [
    "Panel",
    "from_json",
    "load_timeline",
    "render_html",
    "render_svg",
    "render_text",
    "save_timeline",
    "to_csv",
    "to_json",
    "to_trace",
]
