"""The processes behind `octopipe emulate` and `octopipe run`: silent unless one of them fails."""

import sys
from collections.abc import Mapping, Sequence
from typing import Any

import typer


def run_children(arguments: Sequence[str], processes: int, **options: Any) -> None:
    """Runs `python *arguments` as `processes` processes; `options` are those of `launch`.

    If one fails, prints what they said (once, where several said the same) and how they ended
    to standard error, and exits with code 1.
    """
    from octojax.launch import launch

    said: dict[int, list[str]] = {}
    exits = launch(
        arguments,
        processes,
        echo=lambda process, line: said.setdefault(process, []).append(line.rstrip()),
        notice=lambda _: None,
        **options,
    )
    bad = [e for e in exits if e.code != 0]
    if bad:
        print("\n".join([*grouped(said), *map(str, bad)]), file=sys.stderr)
        raise typer.Exit(1)


def grouped(said: Mapping[int, Sequence[str]]) -> list[str]:
    """Returns what the processes said, equal texts together, with their numbers in front."""
    speakers: dict[tuple[str, ...], list[int]] = {}
    for process, lines in sorted(said.items()):
        speakers.setdefault(tuple(lines), []).append(process)
    return [
        f"[{','.join(map(str, processes))}] {line}"
        for lines, processes in speakers.items()
        for line in lines
    ]
