"""TABLE V and Fig. 12: how searches proceed on Nemotron-H (Large), from the same runs."""

import csv
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tuner_common import load

from octojax.ir import Profile
from octojax.tune import PHASES, TuneResult, tune
from paper_pieces.cells import Cell, rounded
from paper_pieces.pictures import drawn
from paper_pieces.piece import BASELINES_S, Piece
from paper_pieces.study import Settings, Study, load_average

METHODS = {"octopipe": "OctoPipe (Algorithm 1)", "random": "Random", "best": "default search"}
PAPER_SHARES = {"octopipe": ("51.7", "34.8", "13.5"), "random": ("35.6", "31.6", "32.8")}
PAPER_TOTAL = {"octopipe": "319", "random": "326"}
CURVES = "fig12.curves.csv"


def size_of(settings: Settings) -> str:
    """Returns the size that is searched on."""
    return "s" if settings.quick else "l"


def profile_of(settings: Settings) -> Profile:
    return load(f"nemotron-h-{size_of(settings)}")


def searched(study: Study) -> dict[str, TuneResult]:
    """Returns the result of every method after the same seconds; iterations are not limited, so
    Algorithm 1 goes on after it stalls.
    """
    settings = study.settings
    options = {"iterations": 10**9, "replicated": False}
    return {
        method: study.tuned(profile_of(settings), size_of(settings), method=method, **options)
        for method in METHODS
    }


def run_table5(study: Study) -> list[Cell]:
    case = f"{study.settings.search_s(size_of(study.settings)):g} seconds"
    return [
        cell for method, result in searched(study).items() for cell in _counts(case, method, result)
    ]


def _counts(case: str, method: str, result: TuneResult) -> list[Cell]:
    total = max(1, sum(result.iterations.values()))
    shares = PAPER_SHARES.get(method, ("", "", ""))
    figures = [("iterations", float(total), PAPER_TOTAL.get(method, ""))]
    for phase, share in zip(PHASES, shares, strict=True):
        figures.append((f"{phase}, %", 100 * result.iterations[phase] / total, share))
    figures += [
        ("makespan, ms", 1e3 * result.makespan_s, ""),
        ("gap to the bound, %", 100 * result.gap, ""),
        ("evaluations", float(result.evaluations), ""),
    ]
    load_now = load_average()
    return [
        Cell(
            f"{result.profile_name}, {case}", METHODS[method], quantity, "simulated", rounded(ours),
            paper, search_s=rounded(result.seconds, 3), load_average=load_now,
        )
        for quantity, ours, paper in figures
    ]  # fmt: skip


def run_fig12(study: Study) -> list[Cell]:
    results = searched(study)
    seconds = study.settings.search_s(size_of(study.settings))
    cells = []
    for method, result in results.items():
        base = result.baselines["1f1b-split"]
        for share in (0.1, 0.3, 1.0):
            till = [m for s, *_, m in result.history if s <= share * seconds]
            best = min(till or [m for *_, m in result.history])
            cells.append(
                Cell(
                    result.profile_name, METHODS[method], _after(share * seconds), "simulated",
                    rounded(base / best),
                    bound=rounded(base / result.lower_bound_s),
                    makespan_ms=rounded(best * 1e3, 6),
                    search_s=rounded(result.seconds, 3),
                    load_average=load_average(),
                )
            )  # fmt: skip
    cells.append(_exact(study.settings, seconds))
    _write_curves(study.settings.out / CURVES, results)
    return cells


def _after(seconds: float) -> str:
    return f"speedup over 1F1B after {seconds:.3g} s"


def _write_curves(path: Path, results: dict[str, TuneResult]) -> None:
    """Writes every improvement of every search, a line each."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(("method", "seconds", "iteration", "phase", "makespan_ms"))
        for method, result in results.items():
            for at_s, iteration, phase, makespan_s in result.history:
                ms = rounded(makespan_s * 1e3, 6)
                writer.writerow((METHODS[method], round(at_s, 3), iteration, phase, ms))


def _exact(settings: Settings, seconds: float) -> Cell:
    """What the enumeration says to a case of this size."""
    profile = profile_of(settings)
    try:
        tune(profile, method="exact", seconds=seconds)
        note = "ended"
    except ValueError as error:
        note = str(error).replace("\n", " ")
    return Cell(profile.name, "exact", _after(seconds), "simulated", None, note=note)


def draw_fig12(cells: Sequence[Cell], path: Path) -> None:
    """Draws the stored curves."""
    with path.with_name(CURVES).open(encoding="utf-8") as file:
        curves = list(csv.DictReader(file))
    end = max(float(cell.quantity.split()[-2]) for cell in cells)

    def fill(axes: Any) -> None:
        for method in dict.fromkeys(c["method"] for c in curves):
            own = [c for c in curves if c["method"] == method]
            x = [*(float(c["seconds"]) for c in own), end]
            y = [float(c["makespan_ms"]) for c in own]
            axes.step(x, [*y, y[-1]], where="post", label=method)
        axes.set(xlabel="seconds of search", ylabel="makespan, ms (simulated)", xscale="log")
        axes.set_title(f"Search on {cells[0].case} (as Fig. 12)")
        axes.legend()

    drawn(path, (7, 3.4), fill)


def estimate_s(settings: Settings) -> float:
    return 3 * (settings.search_s(size_of(settings)) + BASELINES_S["s"])


TABLE5 = Piece(
    "table5",
    "TABLE V: tuning iterations by phase, Nemotron-H (Large)",
    """
*OctoPipe* is the paper's Algorithm 1 here, *Random* the same moves with the phase drawn by
chance; both are of this project's making. *default search* is what `octopipe tune` does: an
iteration of it is a round of annealing, and its phases are those of single moves. The paper
prints no makespans.
""",
    run_table5,
    estimate_s,
    across="quantity",
)
FIG12 = Piece(
    "fig12",
    "Fig. 12: search processes, Nemotron-H (Large)",
    """
The searches of TABLE V. The paper's figure prints no numbers; its solver-based search finds no
plan at all within the budget, and our enumeration refuses a case of this size.
""",
    run_fig12,
    estimate_s,
    draw=draw_fig12,
)
