"""`octopipe compare`: plans, tables and named schedules side by side."""

import json
from typing import Annotated

import typer

from octojax.cli.panels import write_pictures
from octojax.cli.read import AnyProfile, expect_writable, read_profile
from octojax.cli.sources import (
    NAMED,
    HtmlOption,
    MicrobatchesOption,
    RanksOption,
    Source,
    SvgOption,
    read_sources,
    schedule_names,
)
from octojax.errors import FormatError
from octojax.ir import Plan, Schedule


def command(
    files: Annotated[
        list[str],
        typer.Argument(
            help=f"Plans (JSON), schedules (CSV) or names of schedules. {NAMED}",
            autocompletion=schedule_names,
        ),
    ],
    profile: Annotated[
        str | None,
        typer.Option(
            help="Layer costs (JSON); default: units, in which the stages of a rank together take "
            "F = I = W = 1 and B = 2."
        ),
    ] = None,
    any_profile: AnyProfile = False,
    ranks: RanksOption = None,
    microbatches: MicrobatchesOption = None,
    width: Annotated[
        int | None,
        typer.Option(help="Columns of the picture; default: the terminal's.", min=40, max=10_000),
    ] = None,
    picture: Annotated[
        bool, typer.Option("--picture/--no-picture", help="Draw them below the table.")
    ] = True,
    html: HtmlOption = None,
    svg: SvgOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Compare plans and schedules under one profile: a table, and a picture on one clock.

    Speeds are in microbatches a second, the first being the measure.
    """
    from octojax.diagnosis import compare
    from octojax.report.text import render

    expect_writable(html, svg)
    costs = None if profile is None else read_profile(profile)
    sources = read_sources(files, costs, any_profile, ranks, microbatches)
    comparison = compare({s.name: _plan(s) for s in sources}, costs)
    written = write_pictures(comparison.panels(), html, svg)
    if as_json:
        typer.echo(json.dumps(comparison.to_json(), indent=1))
        return
    typer.echo(str(comparison))
    if picture and not written:
        typer.echo("\n" + render(comparison.panels(), width, accounts=False), nl=False)


def _plan(source: Source) -> Plan | Schedule:
    if isinstance(source.content, Plan | Schedule):
        return source.content
    raise FormatError(
        f"{source.path} is a lowered plan or a timeline; expected plans and schedules. "
        f"`octopipe show` draws timelines beside them"
    )
