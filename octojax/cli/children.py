"""The processes behind `octopipe emulate` and `octopipe run`: silent unless one of them fails."""

import sys
from collections.abc import Sequence
from typing import Any

import typer


def run_children(arguments: Sequence[str], processes: int, **options: Any) -> None:
    """Runs `python *arguments` as `processes` processes; `options` are those of `launch`.

    If one fails, prints what all of them said and how they ended to standard error, and exits
    with code 1.
    """
    from octojax.launch import launch

    lines: list[str] = []
    exits = launch(
        arguments,
        processes,
        echo=lambda process, line: lines.append(f"[{process}] {line}"),
        **options,
    )
    bad = [e for e in exits if e.code != 0]
    if bad:
        print("\n".join([*lines, *map(str, bad)]), file=sys.stderr)
        raise typer.Exit(1)
