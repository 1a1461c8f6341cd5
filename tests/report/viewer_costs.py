"""What the viewer costs: processor time of the page's main thread, by the browser's own clock."""

import statistics
from pathlib import Path

from tests.report.browser import Page

GESTURES = {
    "moving, the whole step in view": "v.pan(n % 2 ? 3 : -3)",
    "zooming": "v.zoom(n < 30 ? 0.9 : 1 / 0.9, 600)",
    "moving, a tenth in view": "if (n === 1) v.show(0.5 * v.extent, 0.6 * v.extent); v.pan(5)",
    "pointing": "octopipe.hover(200 + 10 * n, 150, 0, 0)",
    "moving, critical path marked": (
        "if (n === 1) { octopipe.fit(); octopipe.toggle('critical'); } v.pan(n % 2 ? 3 : -3)"
    ),
}
FRAMES = 60
_GESTURE = """
const done = arguments[arguments.length - 1];
const v = octopipe.state.view;
let n = 0;
octopipe.frames.length = 0;
(function next() {
  if (n++ === %d) return done(octopipe.frames.length);
  %s;
  if (!octopipe.wanted.over) octopipe.moved();
  requestAnimationFrame(() => requestAnimationFrame(next));
})();
"""


def costs_of(page: Page, path: Path) -> dict[str, float]:
    """Returns milliseconds of the main thread: to the first picture, and of a frame per gesture."""
    page.send("Performance.enable", timeDomain="threadTicks")
    page.open(path)
    costs = {"first picture": 1e3 * _busy_s(page)}
    for name, code in GESTURES.items():
        rounds = []
        for _ in range(3):
            before = _busy_s(page)
            frames = page.driver.execute_async_script(_GESTURE % (FRAMES, code))
            rounds.append(1e3 * (_busy_s(page) - before) / frames)
        costs[name] = statistics.median(rounds)
    return costs


def _busy_s(page: Page) -> float:
    metrics = page.send("Performance.getMetrics")["metrics"]
    return next(m["value"] for m in metrics if m["name"] == "TaskDuration")
