"""`octopipe launch`: one script as several processes of this machine."""

import sys
from pathlib import Path
from typing import Annotated

import typer

SETTINGS = {"allow_extra_args": True, "ignore_unknown_options": True}


def command(
    context: typer.Context,
    script: Annotated[str, typer.Argument(help="The training script (a .py file).")],
    processes: Annotated[
        int, typer.Option("-n", "--processes", help="How many to start.", min=1)
    ] = 2,
    devices: Annotated[
        int, typer.Option(help="CPU devices in each process (ranks it can hold).", min=1)
    ] = 1,
    port: Annotated[
        int | None,
        typer.Option(help="Port of the coordinator; default: a free one.", min=1, max=65535),
    ] = None,
    timeout: Annotated[
        float, typer.Option(help="Seconds the others have to end once one has failed.", min=0)
    ] = 60.0,
    grace: Annotated[
        float,
        typer.Option(help="Seconds they have to end after Ctrl-C, SIGTERM or SIGHUP.", min=0),
    ] = 10.0,
    pin: Annotated[bool, typer.Option(help="Bind each process to one core.")] = False,
) -> None:
    """Start SCRIPT as N processes that find each other; what follows SCRIPT is passed to it."""
    from octojax.launch import exit_code, launch

    if not script.startswith("-") and not Path(script).is_file():  # -m MODULE: Python's own option
        what = "is a folder" if Path(script).is_dir() else "does not exist"
        raise ValueError(f"{script} {what}; expected a Python script")
    exits = launch(
        [script, *context.args],
        processes,
        devices_per_process=devices,
        port=port,
        timeout_s=timeout,
        grace_s=grace,
        pin=pin,
    )
    for each in exits:
        if each.code != 0:
            print(f"octopipe launch: {each}", file=sys.stderr)
    if code := exit_code(exits):
        raise typer.Exit(code)
