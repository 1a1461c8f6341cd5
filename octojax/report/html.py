"""Timelines as one HTML file without any other: zoom, hover, follow a microbatch."""

from html import escape

from octojax.report import svg
from octojax.report.panel import Panel, account

_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{title}</title>
<meta name="viewport" content="width=device-width"><meta name="color-scheme" content="light dark">
<style>
:root {{ --paper: #ffffff; --ink: #1f2328; --soft: #656d76; --line: #d0d7de; }}
@media (prefers-color-scheme: dark) {{
:root {{ --paper: #0d1117; --ink: #e6edf3; --soft: #9198a1; --line: #30363d; }} }}
body {{ margin: 24px; background: var(--paper); color: var(--ink);
  font: 14px ui-sans-serif, system-ui, 'DejaVu Sans', sans-serif; }}
h1 {{ font-size: 18px; }} h2 {{ font-size: 14px; margin: 28px 0 6px; }}
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
<p><label>Zoom <input id="zoom" type="range" min="0" max="5" step="0.05" value="0"></label>
<span style="color:var(--soft)">&ensp;Point at an action to read it and to follow its
microbatch.</span></p>
<div id="picture">{picture}</div>
{tables}
<div id="tip"></div>
<script>
const LEFT = {left}, PLOT = {plot}, RIGHT = {right}, END = {end}, CHARACTER = {character};
const UNIT = '{unit}';
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
function draw(zoom) {
  const scale = PLOT * zoom / END, width = LEFT + PLOT * zoom + RIGHT;
  svg.setAttribute('width', width);
  svg.setAttribute('viewBox', `0 0 ${width} ${height}`);
  for (const g of spans) {
    const x = LEFT + g.dataset.s * scale, w = (g.dataset.e - g.dataset.s) * scale;
    const r = g.tagName === 'rect' ? g : g.querySelector('rect');
    r.setAttribute('x', x); r.setAttribute('width', w);
    if (!g.dataset.a) continue;
    let t = g.querySelector('text');
    const name = [g.dataset.a, g.dataset.m].find(n => n.length * CHARACTER + 3 <= w) || '';
    if (!t && name) {
      t = document.createElementNS('http://www.w3.org/2000/svg', 'text');
      t.setAttribute('text-anchor', 'middle');
      t.setAttribute('y', +r.getAttribute('y') + r.getAttribute('height') / 2 + 4);
      g.append(t);
    }
    if (t) { t.textContent = name; t.setAttribute('x', x + w / 2); }
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
    layout = svg.Layout()
    return _PAGE.format(
        title=escape(title),
        picture=svg.render(panels, layout),
        tables="\n".join(map(_table, panels)),
        left=layout.left,
        plot=layout.plot,
        right=layout.right,
        end=svg.extent_s(panels) or 1.0,
        character=layout.character,
        unit=panels[0].timeline.unit if panels else "s",
        script=_SCRIPT,
    )


def _table(panel: Panel) -> str:
    heads = ("rank", "busy", "bubble", "share", "at ends", "between", "peak microbatches", "peak")
    head = "".join(f"<th>{h}</th>" for h in heads)
    body = "".join(
        "<tr>" + "".join(f"<td>{c}</td>" for c in row) + "</tr>" for row in account(panel)
    )
    note = f"<p>{escape(panel.note)}</p>" if panel.note else ""
    return f"<h2>{escape(panel.heading)}</h2>{note}<table><tr>{head}</tr>{body}</table>"
