"""`octopipe show`: a plan, schedule or recorded timeline as a picture."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from octojax.cli.read import (
    AnyProfile,
    expect_profile_of,
    expect_writable,
    read_profile,
    read_table,
    read_timeline,
)
from octojax.errors import FormatError
from octojax.ir.files import read_json


def command(
    file: Annotated[
        str, typer.Argument(help="A plan (JSON), a schedule (CSV) or a timeline (JSON).")
    ],
    profile: Annotated[
        str | None,
        typer.Option(
            help="Layer costs (JSON). Without it, units: F = I = W = 1 and B = 2 per stage."
        ),
    ] = None,
    any_profile: AnyProfile = False,
    measured: Annotated[
        str | None, typer.Option(help="A recorded timeline (JSON) to draw underneath.")
    ] = None,
    bound: Annotated[
        float | None,
        typer.Option(help="A lower bound to mark and compare with; default: the plan's own."),
    ] = None,
    width: Annotated[
        int | None, typer.Option(help="Columns of the text.", min=40, max=10_000)
    ] = None,
    html: Annotated[Path | None, typer.Option(help="Write a page to look around in.")] = None,
    svg: Annotated[Path | None, typer.Option(help="Write a picture.")] = None,
    trace: Annotated[Path | None, typer.Option(help="Write a trace for ui.perfetto.dev.")] = None,
    csv: Annotated[Path | None, typer.Option(help="Write every action with its times.")] = None,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Write the timeline as JSON.")
    ] = None,
) -> None:
    """Draw a plan, schedule or timeline: in the terminal when no file is named."""
    from octojax import report
    from octojax.report.html import MOST_BARS, drawn_apart
    from octojax.report.text import render

    if bound is not None and not 0 < bound < math.inf:
        raise ValueError(f"--bound {bound}: expected a number of seconds > 0")
    expect_writable(html, svg, trace, csv, json_file)
    panels = _panels(file, profile, any_profile, measured, bound)
    first = panels[0]
    contents = {
        html: lambda: report.render_html(panels, first.title),
        svg: lambda: report.render_svg(panels),
        trace: lambda: json.dumps(report.to_trace(panels)) + "\n",
        csv: lambda: report.to_csv(panels),
        json_file: lambda: json.dumps(report.to_json(first.timeline), indent=1) + "\n",
    }
    named = {path: make for path, make in contents.items() if path is not None}
    wanted = sum(path is not None for path in (html, svg, trace, csv, json_file))
    if len(named) < wanted:
        raise ValueError("two of the files to write have the same name; name each apart")
    for path, make in named.items():
        path.write_text(make(), encoding="utf-8")
        if path == html and not drawn_apart(panels):
            typer.echo(
                f"{path}: {sum(len(p.timeline.actions) for p in panels):,} actions are more than a "
                f"page holds one by one ({MOST_BARS:,}); those narrower than a pixel are drawn "
                f"together, and --trace keeps them all",
                err=True,
            )
        typer.echo(f"wrote {path}", err=True)
    if not named:
        typer.echo(render(panels, width), nl=False)


def _panels(file, profile, any_profile, measured, bound):
    from octojax.report import Panel, from_json
    from octojax.report.data import is_timeline

    data = _json(file)
    if is_timeline(data):
        panels = [Panel(Path(file).stem, from_json(data, file), bound)]
    else:
        panels = [_simulated(file, profile, any_profile, bound)]
    makespan_s = panels[0].timeline.makespan_s
    if bound is not None and bound > makespan_s * (1 + 1e-6):
        raise ValueError(
            f"--bound {bound:g}: no lower bound of {file}, which takes "
            f"{panels[0].time(makespan_s)}; give a number of at most {makespan_s:.6g}"
        )
    if measured is not None:
        panels.append(Panel("measured", read_timeline(measured)))
    return panels


def _simulated(file, profile, any_profile, bound):
    """The panel of a plan or table, its title naming the source of its times."""
    from octojax.ir import Machine, Plan, Schedule
    from octojax.report import Panel
    from octojax.simulate import StageCosts, simulate

    found = read_table(file)
    name = found.name if not isinstance(found, Schedule) and found.name else Path(file).stem
    prediction = found.prediction if isinstance(found, Plan) else None
    if profile is None:
        units = StageCosts.unit(found.num_stages, 1, 1, 1, 2)
        timeline = replace(simulate(found, units, Machine()), unit="units")
        note = "" if prediction is None else f"{_expected(prediction)}; draw that with --profile"
        title, layers = f"{name}, F = I = W = 1, B = 2", _layers(found, None)
        return Panel(title, timeline, bound, note, layers)
    costs = read_profile(profile)
    note = expect_profile_of(file, found, costs, any_profile)
    timeline = simulate(found, costs)
    if prediction is not None and not note:
        bound = prediction.lower_bound_s if bound is None else bound
        if not math.isclose(timeline.makespan_s, prediction.makespan_s, rel_tol=1e-3):
            note = _expected(prediction)  # the file was edited, or another simulator wrote it
    elif note:
        note = f"{note}: {_expected(prediction)}"
    title, layers = f"{name}, simulated with profile {costs.name}", _layers(found, costs)
    return Panel(title, timeline, bound, note, layers)


def _layers(found, profile):
    """What is in each stage of a plan: `layers 3-5: mamba, mlp, mamba`."""
    from octojax.ir import Schedule

    if isinstance(found, Schedule):
        return ()
    kinds = profile.kinds if profile is not None and profile.of_partition is None else ()
    names = []
    for stage in range(found.partition.num_stages):
        held = found.partition.layers(stage)
        where = f"layer {held[0]}" if len(held) == 1 else f"layers {held[0]}-{held[-1]}"
        names.append(f"{where}: {', '.join(kinds[i] for i in held)}" if kinds else where)
    return tuple(names)


def _expected(prediction):
    """What the plan's file says of its step."""
    from octojax.report.panel import seconds

    text = f"under profile {prediction.profile} it takes {seconds(prediction.makespan_s)}"
    if not prediction.lower_bound_s:
        return text
    gap = prediction.makespan_s / prediction.lower_bound_s - 1
    return f"{text}, within {gap:.1%} of the lower bound {seconds(prediction.lower_bound_s)}"


def _json(file: str):
    if not file.endswith(".json") or not Path(file).is_file():
        return None
    try:
        return read_json(file)
    except FormatError:
        return None  # `read_table` says what is wrong
