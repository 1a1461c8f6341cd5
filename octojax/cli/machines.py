"""`octopipe machines`: the machines that come with the package, for the cost model."""

import json
from dataclasses import asdict
from typing import Annotated

import typer

from octojax.machines import describe, load, names


def command(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """List the machines that `octopipe profile --machine` knows by name."""
    if as_json:
        machines = [{"key": name, **asdict(load(name))} for name in names()]
        typer.echo(json.dumps(machines, indent=1))
        return
    for name in names():
        typer.echo(describe(name, load(name)))
