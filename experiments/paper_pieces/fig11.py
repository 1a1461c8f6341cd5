"""Fig. 11: how well the simulator predicts time and peak memory."""

import json
import statistics
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from paper_pieces.cells import Cell, rounded
from paper_pieces.pictures import bars
from paper_pieces.piece import Piece
from paper_pieces.races import emulated, started
from paper_pieces.study import Settings, Study, load_average
from paper_pieces.table3 import estimate_s as race_s

TIME, MEMORY = "error of the step's time, %", "error of the peak memory, %"
MEAN = "mean of absolute errors"
REAL_S = 120.0
REAL = ("--layers", "7", "--tune-seconds", "5", "--rounds", "5")


def run(study: Study) -> list[Cell]:
    race = emulated(study)
    cells = list(_times("Nemotron-H S, 4 ranks", "emulated", race.rows, race.load_average))
    if not study.settings.quick:
        with study.job("two processes on two cores", REAL_S):
            rows = _real()
        load_now = load_average()
        case = "hybrid of 9 layers, 2 ranks"
        cells += _times(case, "real", rows, load_now)
        cells += _memory(case, rows, load_now)
    return cells


def _real() -> list[Mapping[str, Any]]:
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "rows.json"
        started("fidelity_real.py", 3 * REAL_S, *REAL, "--output", str(output))
        return json.loads(output.read_text(encoding="utf-8"))


def _times(
    case: str, kind: str, rows: Sequence[Mapping[str, Any]], load_now: float
) -> Iterator[Cell]:
    errors = {row["plan"]: 100 * row["error"] for row in rows}
    yield from _errors(case, kind, TIME, errors, "5.06", load_now)


def _memory(case: str, rows: Sequence[Mapping[str, Any]], load_now: float) -> Iterator[Cell]:
    errors = {
        row["plan"]: 100 * (max(row["simulated_peak_bytes"]) / max(row["peak_bytes"]) - 1)
        for row in rows
    }
    yield from _errors(case, "real", MEMORY, errors, "5.29", load_now)


def _errors(
    case: str, kind: str, quantity: str, errors: Mapping[str, float], paper: str, load_now: float
) -> Iterator[Cell]:
    for plan, error in errors.items():
        yield Cell(case, plan, quantity, kind, rounded(error, 3), load_average=load_now)
    mean = statistics.mean(map(abs, errors.values()))
    yield Cell(
        case, MEAN, quantity, kind, rounded(mean, 3), paper, aim="less", load_average=load_now
    )


def estimate_s(settings: Settings) -> float:
    return race_s(settings) + (0.0 if settings.quick else REAL_S)


PIECE = Piece(
    "fig11",
    "Fig. 11: fidelity of the simulator",
    """
*emulated*: TABLE III's race; its link's latency and bandwidth are measured between the
processes just before. *real*: `fidelity_real.py`, two processes bound to two cores train a
small hybrid; the prediction is made from layers timed in the same round. An error above zero
says that the simulator takes too long. More cases, and what is behind the errors:
[fidelity](fidelity.md).
""",
    run,
    estimate_s,
    draw=bars("Errors of prediction (as Fig. 11)", TIME, size=(9, 3)),
)
