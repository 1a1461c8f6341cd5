"""`octopipe explain`: where a plan's step goes, what binds it, and what would make it shorter."""

import json
from typing import Annotated

import typer

from octojax.cli.read import AnyProfile, read_profile
from octojax.cli.sources import NAMED, CostsOption, read_sources, schedule_names
from octojax.errors import FormatError


def command(
    file: Annotated[
        str,
        typer.Argument(
            help=f"A plan (JSON), a schedule (CSV) or its name. {NAMED}",
            autocompletion=schedule_names,
        ),
    ],
    profile: CostsOption = None,
    any_profile: AnyProfile = False,
    ranks: Annotated[
        int | None, typer.Option(help="Ranks of a named schedule; default: the profile's.", min=1)
    ] = None,
    microbatches: Annotated[
        int | None,
        typer.Option(help="Microbatches of a named schedule; default: the profile's.", min=1),
    ] = None,
    seconds: Annotated[
        float,
        typer.Option(
            help="Search so long each for another plan, for one with memory without limit, and for "
            "one with one more rank.",
            min=0,
        ),
    ] = 0.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Explain a step: where its time goes, what binds it, what the best changes would save.

    Every saving is the difference of two simulations.
    """
    from octojax.diagnosis import explain
    from octojax.ir import LoweredPlan, Plan, Timeline

    costs = None if profile is None else read_profile(profile)
    (source,) = read_sources([file], costs, any_profile, ranks, microbatches)
    content = source.content
    if isinstance(content, Timeline | LoweredPlan):
        kind = "a timeline" if isinstance(content, Timeline) else "a lowered plan"
        raise FormatError(f"{file} is {kind}; expected the plan or schedule that it was made of")
    explanation = explain(content, costs, seconds=seconds, name=source.name)
    if as_json:
        typer.echo(json.dumps(explanation.to_json(), indent=1))
        return
    typer.echo(str(explanation))
    if costs is None and isinstance(content, Plan) and content.prediction is not None:
        typer.echo(f"These are units: give --profile ({content.prediction.profile})", err=True)
