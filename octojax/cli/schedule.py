"""`octopipe schedule NAME`: the table of a named schedule as CSV."""

from pathlib import Path
from typing import Annotated

import typer

from octojax.cli.read import expect_writable
from octojax.cli.sources import schedule_names
from octojax.schedules import generate


def command(
    name: Annotated[
        str,
        typer.Argument(
            help="A name that `octopipe schedules` lists.", autocompletion=schedule_names
        ),
    ],
    ranks: Annotated[int, typer.Option(help="Ranks of the pipeline.", min=1)],
    microbatches: Annotated[int, typer.Option(help="Microbatches of a step.", min=1)],
    chunks: Annotated[
        int | None, typer.Option(help="Stages per rank; default: the schedule's own.", min=1)
    ] = None,
    option: Annotated[
        list[str] | None,
        typer.Option(help="key=value, repeatable; default: those that `octopipe schedules` lists."),
    ] = None,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="Write here, not to standard output.")
    ] = None,
) -> None:
    """Print the table of a named schedule: CSV, one row per rank, PyTorch's action names."""
    expect_writable(output)
    table = generate(name, ranks, microbatches, chunks, **_options(option or [])).to_csv()
    if output is None:
        typer.echo(table, nl=False)
    else:
        output.write_text(table, encoding="utf-8")


def _options(words: list[str]) -> dict[str, str]:
    broken = [text for text in words if "=" not in text]
    if broken:
        raise ValueError(f"--option {broken[0]!r}: expected key=value, such as group_size=8")
    return {
        key.strip().replace("-", "_"): value for key, _, value in (t.partition("=") for t in words)
    }
