"""Fig. 9: traces of 1F1B and OctoPipe on Nemotron-H (Small)."""

from collections.abc import Sequence
from pathlib import Path

from octojax.ir import Timeline
from octojax.report import Panel
from octojax.report.data import load_timeline, save_timeline
from octojax.report.svg import render
from paper_pieces.cells import Cell, rounded
from paper_pieces.piece import Piece
from paper_pieces.races import emulated
from paper_pieces.study import Study
from paper_pieces.table3 import estimate_s

SHOWN = ("1F1B", "OctoPipe")


def run(study: Study) -> list[Cell]:
    race = emulated(study)
    study.settings.out.mkdir(parents=True, exist_ok=True)
    cells = []
    for name in SHOWN:
        timeline = race.timelines[name]
        save_timeline(timeline, study.settings.out / f"fig9.{name}.json")
        for quantity, seconds in shares(timeline).items():
            cells.append(
                Cell(
                    "4 ranks, 8 microbatches", name, quantity, "emulated", rounded(seconds, 4),
                    load_average=race.load_average,
                )
            )  # fmt: skip
    return cells


def shares(timeline: Timeline) -> dict[str, float]:
    """Returns what part of all ranks' time is idle, in percent, by where in the step it is."""
    whole = timeline.makespan_s * len(timeline.ranks) / 100
    return {
        "bubbles, %": sum(r.bubble_s for r in timeline.ranks) / whole,
        "at the ends, %": sum(r.boundary_bubble_s for r in timeline.ranks) / whole,
        "between, %": sum(r.residual_bubble_s for r in timeline.ranks) / whole,
        "of the worst rank, %": max(r.bubble_s for r in timeline.ranks) / timeline.makespan_s * 100,
    }


def draw(cells: Sequence[Cell], path: Path) -> None:
    """Draws the stored timelines, on one axis of time."""
    panels = [
        Panel(f"{name}, emulated", load_timeline(path.with_name(f"fig9.{name}.json")))
        for name in SHOWN
    ]
    path.write_text(render(panels), encoding="utf-8")


PIECE = Piece(
    "fig9",
    "Fig. 9: traces, Nemotron-H (Small)",
    """
The paper shows `torch.profiler`'s traces and no numbers. These are the executor's own
recordings of the steps of TABLE III: four processes, real transfers, every action a sleep of
its profiled time, times 12.
""",
    run,
    estimate_s,
    across="quantity",
    draw=draw,
)
