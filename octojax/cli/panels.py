"""Pictures of what a command was given: titled timelines, and the files they go to."""

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from octojax.cli.sources import Source
from octojax.ir import Machine, Plan, Prediction, Profile, Schedule, Timeline

if TYPE_CHECKING:
    from octojax.report import Panel

UNITS = "F = I = W = 1, B = 2"


def panel_of(source: Source, costs: Profile | None, bound_s: float | None = None) -> "Panel":
    """Returns the panel of a file or named schedule, its title naming the source of its times.

    Without costs every stage takes units. `bound_s` None is the plan's own bound.
    """
    from octojax.report import Panel
    from octojax.report.panel import stage_layers
    from octojax.simulate import StageCosts, simulate

    content, note = source.content, source.note
    if isinstance(content, Timeline):
        return recorded(source.name, content, bound_s)
    _announce(source.name, content if isinstance(content, Schedule) else content.schedule)
    prediction = content.prediction if isinstance(content, Plan) else None
    if costs is None:
        units = StageCosts.unit(content.num_stages, 1, 1, 1, 2)
        timeline = replace(simulate(content, units, Machine()), unit="units")
        note = "" if prediction is None else f"{expected(prediction)}; draw that with --profile"
        return Panel(f"{source.name}, {UNITS}", timeline, bound_s, note, stage_layers(content))
    timeline = simulate(content, costs)
    if prediction is not None and not note:
        bound_s = prediction.lower_bound_s if bound_s is None else bound_s
        if not math.isclose(timeline.makespan_s, prediction.makespan_s, rel_tol=1e-3):
            note = expected(prediction)  # the file was edited, or another simulator wrote it
    elif prediction is not None:
        note = f"{note}: {expected(prediction)}"
    title = f"{source.name}, simulated with profile {costs.name}"
    capacities = tuple(map(costs.machine.capacity, range(content.num_ranks)))
    return Panel(title, timeline, bound_s, note, stage_layers(content, costs), capacities)


def _announce(name: str, table: Schedule) -> None:
    """Says on standard error that a very large table is being simulated, which is silent else."""
    from octojax.report.html import MOST_ACTIONS

    count = sum(map(len, table.ranks))
    if count > MOST_ACTIONS:
        typer.echo(f"{name}: simulating {count:,} actions, which takes a while", err=True)


def recorded(name: str, timeline: Timeline, bound_s: float | None = None) -> "Panel":
    """Returns the panel of a timeline as it is, with a note where its clocks disagree."""
    from octojax.diagnosis.skew import clock_skew
    from octojax.report import Panel

    return Panel(name, timeline, bound_s, str(clock_skew(timeline) or ""))


def expected(prediction: Prediction) -> str:
    """Returns what a plan's file says of its step."""
    from octojax.report.panel import seconds

    text = f"under profile {prediction.profile} it takes {seconds(prediction.makespan_s)}"
    if not prediction.lower_bound_s:
        return text
    gap = prediction.makespan_s / prediction.lower_bound_s - 1
    return f"{text}, within {gap:.1%} of the lower bound {seconds(prediction.lower_bound_s)}"


def write_pictures(
    panels: "list[Panel]",
    html: Path | None = None,
    svg: Path | None = None,
    trace: Path | None = None,
    csv: Path | None = None,
    json_file: Path | None = None,
) -> bool:
    """Writes the files that are named, says so on standard error, and returns whether any was."""
    from octojax import report
    from octojax.report.html import is_large

    first = panels[0]
    title = first.title if len(panels) == 1 else " and ".join(p.title for p in panels)
    writers: list[tuple[Path | None, Callable[[], str]]] = [
        (html, lambda: report.render_html(panels, title)),
        (svg, lambda: report.render_svg(panels)),
        (trace, lambda: json.dumps(report.to_trace(panels)) + "\n"),
        (csv, lambda: report.to_csv(panels)),
        (json_file, lambda: json.dumps(report.to_json(first.timeline), indent=1) + "\n"),
    ]
    named = [(path, text) for path, text in writers if path is not None]
    if len({path for path, _ in named}) < len(named):
        raise ValueError("two of the files to write have the same name; name each apart")
    for path, text in named:
        path.write_text(text(), encoding="utf-8")
        if path == html and is_large(panels):
            typer.echo(
                f"{path}: {path.stat().st_size / 1e6:.1f} MB with "
                f"{sum(len(p.timeline.actions) for p in panels):,} actions, over which a browser "
                f"takes its time; draw fewer microbatches for a quicker one",
                err=True,
            )
        typer.echo(f"wrote {path}", err=True)
    return bool(named)
