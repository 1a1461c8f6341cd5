"""Timelines as one HTML file without any other: zoom, hover, follow a microbatch."""

import math
from html import escape

from octojax.report import svg
from octojax.report.panel import DARK, LIGHT, Panel, account, filled, readable

ZOOM = 32
MOST_BARS = 30_000
"""Of a page that has every action as an element; it then has about 8 MB."""

_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{title}</title>
<meta name="viewport" content="width=device-width"><meta name="color-scheme" content="light dark">
<style>
:root {{ --paper: #ffffff; --ink: #1f2328; --soft: #5b636c; --line: #d0d7de; --idle: #eff1f3; }}
{light}
@media (prefers-color-scheme: dark) {{
:root {{ --paper: #0d1117; --ink: #e6edf3; --soft: #9198a1; --line: #30363d; --idle: #1c2128; }}
{dark}
}}
body {{ margin: 24px; background: var(--paper); color: var(--ink);
  font: 14px ui-sans-serif, system-ui, 'DejaVu Sans', sans-serif; }}
h1 {{ font-size: 18px; }} h2 {{ font-size: 14px; margin: 28px 0 6px; }}
.octo .paper {{ fill: var(--paper); }} .octo .idle {{ fill: var(--idle); }}
.octo .ink {{ fill: var(--ink); }} .octo .soft {{ fill: var(--soft); }}
.octo .grid {{ stroke: var(--line); }} .octo .memory {{ stroke: var(--soft); }}
.octo text {{ pointer-events: none; }}
#picture {{ overflow-x: auto; border: 1px solid var(--line); border-radius: 6px; }}
#picture svg {{ display: block; }}
.bar.off rect {{ opacity: 0.18; }} .bar.off text {{ opacity: 0.35; }}
table {{ border-collapse: collapse; font-variant-numeric: tabular-nums; }}
th, td {{ padding: 3px 14px 3px 0; text-align: right; border-bottom: 1px solid var(--line); }}
th {{ color: var(--soft); font-weight: 500; }}
#tip {{ position: fixed; display: none; pointer-events: none; padding: 6px 9px; font-size: 12px;
  background: var(--ink); color: var(--paper); border-radius: 5px; white-space: pre; }}
label {{ color: var(--soft); }} input {{ vertical-align: middle; width: 220px; }}
</style></head><body>
<h1>{title}</h1>
<p><label>Zoom <input id="zoom" type="range" min="0" max="{zoom:g}" step="0.05" value="0"></label>
<span style="color:var(--soft)">&ensp;Point at an action to read it and to follow its
microbatch.</span></p>
<div id="picture">{picture}</div>
{tables}
<div id="tip"></div>
<script>
const LEFT = {left}, PLOT = {plot}, RIGHT = {right}, END = {end}, CHARACTER = {character};
const UNIT = '{unit}', SIZES = {sizes}, ROW = {row};
{script}
</script></body></html>
"""

_SCRIPT = """
const svg = document.querySelector('#picture svg'), tip = document.getElementById('tip');
const bars = [...svg.querySelectorAll('.bar[data-a]')], spans = [...svg.querySelectorAll('.span')];
const ticks = [...svg.querySelectorAll('.tick')], lines = [...svg.querySelectorAll('.memory')];
svg.querySelectorAll('.bar title').forEach(t => t.remove());
const height = svg.getAttribute('height');
function time(s) {
  if (UNIT !== 's') return +s.toPrecision(4) + ' ' + UNIT;
  for (const [f, u] of [[1, 's'], [1e-3, 'ms'], [1e-6, 'us']])
    if (s >= f) return (s / f).toPrecision(4) + ' ' + u;
  return s === 0 ? '0 s' : (s / 1e-9).toPrecision(4) + ' ns';
}
function label(action, microbatch, width) {
  const length = (n, s) => n.length * CHARACTER * s / SIZES[0] + 2;
  for (const n of [action, microbatch])
    for (const s of SIZES) if (length(n, s) <= width) return [n, s, false];
  for (const s of SIZES)
    if (s <= width && length(microbatch, s) <= ROW) return [microbatch, s, true];
  return ['', SIZES[0], false];
}
function draw(zoom) {
  const scale = PLOT * zoom / END, width = LEFT + PLOT * zoom + RIGHT;
  svg.setAttribute('width', width);
  svg.setAttribute('viewBox', `0 0 ${width} ${height}`);
  for (const g of spans) {
    const x = LEFT + g.dataset.s * scale, w = (g.dataset.e - g.dataset.s) * scale;
    const rects = g.tagName === 'rect' ? [g] : g.querySelectorAll('rect'), r = rects[0];
    for (const each of rects) { each.setAttribute('x', x); each.setAttribute('width', w); }
    if (!g.dataset.a) continue;
    if (w >= 1) r.setAttribute('shape-rendering', 'crispEdges');
    let t = g.querySelector('text');
    const [name, size, turned] = label(g.dataset.a, g.dataset.m, w);
    if (!t && name) {
      t = document.createElementNS('http://www.w3.org/2000/svg', 'text');
      t.setAttribute('text-anchor', 'middle');
      g.append(t);
    }
    if (t) {
      t.textContent = name; t.setAttribute('x', x + w / 2);
      const middle = +r.getAttribute('y') + ROW / 2;
      t.setAttribute('y', middle + 0.36 * size); t.setAttribute('font-size', size);
      t.setAttribute('transform', turned ? `rotate(-90 ${x + w / 2} ${middle})` : '');
    }
  }
  for (const g of ticks) {
    const x = LEFT + g.dataset.t * scale, l = g.querySelector('line');
    const t = g.querySelector('text');
    l.setAttribute('x1', x); l.setAttribute('x2', x); if (t) t.setAttribute('x', x);
  }
  for (const m of lines) m.setAttribute('transform', `scale(${zoom},1)`);
}
document.getElementById('zoom').addEventListener('input', e => draw(2 ** e.target.value));
svg.addEventListener('mousemove', e => {
  const g = e.target.closest('.bar[data-a]');
  tip.style.display = g ? 'block' : 'none';
  if (!g) return;
  const d = g.dataset;
  tip.textContent = `${d.a}   rank ${d.r}\\nstart ${time(+d.s)}\\nend   ${time(+d.e)}` +
    `\\ntakes ${time(d.e - d.s)}`;
  tip.style.left = Math.min(e.clientX + 14, innerWidth - 190) + 'px';
  tip.style.top = e.clientY + 16 + 'px';
});
svg.addEventListener('mouseover', e => {
  const g = e.target.closest('.bar[data-a]');
  for (const b of bars) b.classList.toggle('off', !!g && b.dataset.m !== g.dataset.m);
});
svg.addEventListener('mouseleave', () => {
  tip.style.display = 'none'; bars.forEach(b => b.classList.remove('off'));
});
"""


def render(panels: list[Panel], title: str = "OctoPipe timeline") -> str:
    """Returns a self-contained page: the picture, and a table of every panel's ranks.

    Without JavaScript it still shows both, with the browser's own tooltips.
    """
    layout = svg.Layout(least=1 / ZOOM if drawn_apart(panels) else 1.0)
    return _PAGE.format(
        title=escape(title),
        picture=svg.render(panels, layout),
        tables="\n".join(map(_table, panels)),
        left=layout.left,
        plot=layout.plot,
        right=layout.right,
        end=svg.extent_s(panels) or 1.0,
        character=layout.character,
        sizes=list(svg.FONT_SIZES),
        row=layout.row,
        light=_colours(LIGHT, "#ffffff"),
        dark=_colours(DARK, "#0d1117"),
        zoom=math.log2(ZOOM),
        unit=panels[0].timeline.unit if panels else "s",
        script=_SCRIPT,
    )


def drawn_apart(panels: list[Panel]) -> bool:
    """Whether the page holds every action by itself, to be seen when zoomed in.

    Where there are too many for a browser, those narrower than a pixel are drawn together.
    """
    return sum(len(panel.timeline.actions) for panel in panels) <= MOST_BARS


def _colours(palette: dict[str, str], towards: str) -> str:
    """The style sheet of the bars, which the picture's own colours give way to."""
    rules = [f".octo rect.{kind} {{ fill: {colour}; }}" for kind, colour in palette.items()]
    for kind in palette:
        for shade in range(svg.SHADES):
            for odd in (False, True):
                name = f".octo .{kind}.s{shade}" + ".o" * odd
                fill = filled(kind, shade, odd, palette, towards)
                rules.append(f"{name} rect {{ fill: {fill}; }}")
                rules.append(f"{name} text {{ fill: {readable(fill)}; }}")
    return "\n".join(rules)


def _table(panel: Panel) -> str:
    heads = ("rank", "busy", "bubble", "share", "at ends", "between", "peak microbatches", "peak")
    head = "".join(f"<th>{h}</th>" for h in heads)
    body = "".join(
        "<tr>" + "".join(f"<td>{c}</td>" for c in row) + "</tr>" for row in account(panel)
    )
    note = f"<p>{escape(panel.note)}</p>" if panel.note else ""
    return f"<h2>{escape(panel.heading)}</h2>{note}<table><tr>{head}</tr>{body}</table>"
