"""`octopipe show`: plans, schedules or recorded timelines as one picture."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from octojax.cli.panels import panel_of, recorded, write_pictures
from octojax.cli.read import AnyProfile, expect_writable, read_profile, read_timeline
from octojax.cli.sources import (
    NAMED,
    CostsOption,
    HtmlOption,
    MicrobatchesOption,
    RanksOption,
    SvgOption,
    read_sources,
    schedule_names,
)


def command(
    files: Annotated[
        list[str],
        typer.Argument(
            help=f"Plans (JSON), schedules (CSV), timelines (JSON), or names of schedules. {NAMED}",
            autocompletion=schedule_names,
        ),
    ],
    profile: CostsOption = None,
    any_profile: AnyProfile = False,
    ranks: RanksOption = None,
    microbatches: MicrobatchesOption = None,
    measured: Annotated[
        str | None,
        typer.Option(help="A recorded timeline (JSON) to draw underneath; default: none."),
    ] = None,
    bound: Annotated[
        float | None,
        typer.Option(help="A lower bound to mark and compare with; default: the plan's own."),
    ] = None,
    width: Annotated[
        int | None,
        typer.Option(help="Columns of the text; default: the terminal's.", min=40, max=10_000),
    ] = None,
    html: HtmlOption = None,
    svg: SvgOption = None,
    trace: Annotated[Path | None, typer.Option(help="Write a trace for ui.perfetto.dev.")] = None,
    csv: Annotated[Path | None, typer.Option(help="Write every action with its times.")] = None,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Write the timeline as JSON.")
    ] = None,
) -> None:
    """Draw plans, schedules or timelines: in the terminal when no file is named.

    Several are drawn one above the other on one clock.
    """
    from octojax.report.text import render

    if bound is not None and not 0 < bound < math.inf:
        raise ValueError(f"--bound {bound}: expected a number of seconds > 0")
    expect_writable(html, svg, trace, csv, json_file)
    if json_file is not None and len(files) > 1:
        raise ValueError(f"--json writes one timeline, and {len(files)} are drawn; use --csv")
    panels = _panels(files, profile, any_profile, measured, bound, ranks, microbatches)
    if not write_pictures(panels, html, svg, trace, csv, json_file):
        typer.echo(render(panels, width), nl=False)


def _panels(files, profile, any_profile, measured, bound, ranks, microbatches):
    costs = None if profile is None else read_profile(profile)
    sources = read_sources(files, costs, any_profile, ranks, microbatches)
    panels = [panel_of(source, costs, bound) for source in sources]
    for source, panel in zip(sources, panels, strict=True):
        makespan_s = panel.timeline.makespan_s
        if bound is not None and bound > makespan_s * (1 + 1e-6):
            raise ValueError(
                f"--bound {bound:g}: no lower bound of {source.path}, which takes "
                f"{panel.time(makespan_s)}; give a number of at most {makespan_s:.6g}"
            )
    if measured is not None:
        timeline, first = read_timeline(measured), panels[0]
        same = len(timeline.ranks) == len(first.timeline.ranks)
        layers, capacities = (first.layers, first.capacities_bytes) if same else ((), ())
        panel = recorded("measured", timeline)
        panels.append(replace(panel, layers=layers, capacities_bytes=capacities))
    return panels
