"""One process of `octopipe emulate`; process 0 writes the measured timelines into a folder."""

import sys
from pathlib import Path

import jax

from octojax.cli.child import run_child
from octojax.cli.read import read_plan, read_profile
from octojax.emulate import emulate
from octojax.processes import barrier, initialize, timeout_s
from octojax.report.data import save_timeline


def main(file: str, profile: str, folder: str, scale: str, steps: str) -> None:
    initialize()
    outcome = emulate(
        read_plan(file, profile),
        read_profile(profile),
        scale=float(scale),
        steps=int(steps),
        timeout=timeout_s(),
    )
    if jax.process_index() == 0:
        for number, timeline in enumerate(outcome.timelines):
            save_timeline(timeline, Path(folder) / f"step{number:04d}.json")
    barrier("written")


if __name__ == "__main__":
    run_child(main, sys.argv[1:])
