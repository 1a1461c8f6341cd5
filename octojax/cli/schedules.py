"""`octopipe schedules`: every named schedule, its source, its constraints; or a comparison."""

import json
from typing import Annotated, Any

import typer

from octojax.schedules import SCHEDULES
from octojax.schedules.family import Family


def command(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    compare: Annotated[
        bool, typer.Option("--compare", help="Bubble and peak of each instead (F=I=W=1, B=2).")
    ] = False,
    ranks: Annotated[
        int | None, typer.Option(help="With --compare: the number of ranks; default: 8.", min=1)
    ] = None,
    microbatches: Annotated[
        str | None,
        typer.Option(help="With --compare: numbers of microbatches; default: 8,16,32,64."),
    ] = None,
    names: Annotated[
        str | None,
        typer.Option(help="With --compare: only these, such as gpipe,1f1b; default: all."),
    ] = None,
) -> None:
    """List every named schedule, or compare their bubbles and peaks by simulation."""
    options = {"--ranks": ranks, "--microbatches": microbatches, "--names": names}
    unused = [name for name, value in options.items() if value is not None and not compare]
    if unused:
        raise ValueError(f"{', '.join(unused)}: only for a comparison; add --compare")
    if compare:
        _compare(ranks or 8, microbatches or "8,16,32,64", names, as_json)
    elif as_json:
        typer.echo(json.dumps([describe(family) for family in SCHEDULES.values()], indent=1))
    else:
        for family in SCHEDULES.values():
            typer.echo("\n".join(_lines(family)))


def describe(family: Family) -> dict[str, Any]:
    """Returns the record of one schedule as JSON data."""
    return {
        "name": family.name,
        "summary": family.summary,
        "source": family.source,
        "constraints": family.constraints,
        "bubble": family.bubble,
        "peak": family.peak,
        "chunks": family.chunks,
        "placement": family.placement,
        "splits_backward": family.splits_backward,
        "bidirectional": family.bidirectional,
        "options": {
            option.name: {"default": option.default, "help": option.help}
            for option in family.options
        },
    }


def _lines(family: Family) -> list[str]:
    chunks = "1 chunk" if family.chunks == 1 else f"{family.chunks} chunks"
    backward = "split backward" if family.splits_backward else "whole backward"
    lines = [
        f"{family.name:<13} {family.summary}",
        f"{'':13} {family.placement} placement, {chunks} per rank, {backward}",
        f"{'':13} needs {family.constraints}",
        f"{'':13} {family.source}",
    ]
    lines += [f"{'':13} --option {o.name}={o.default}  {o.help}" for o in family.options]
    return lines


def _compare(ranks: int, microbatches: str, names: str | None, as_json: bool) -> None:
    from octojax.schedules.comparison import compare, table

    chosen = tuple(names.split(",")) if names else tuple(SCHEDULES)
    rows = compare(chosen, ranks, numbers(microbatches))
    if as_json:
        typer.echo(json.dumps([row.to_json() for row in rows], indent=1))
    else:
        typer.echo(table(rows))


def numbers(text: str) -> tuple[int, ...]:
    """Returns the whole numbers in `8,16,32`. Raises `ValueError` for anything else."""
    try:
        numbers = tuple(int(word) for word in text.split(","))
    except ValueError:
        numbers = ()
    if not numbers or min(numbers) < 1:
        raise ValueError(f"--microbatches {text!r}: expected whole numbers >= 1, such as 8,16,32")
    return numbers
