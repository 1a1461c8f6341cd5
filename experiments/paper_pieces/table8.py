"""TABLE VIII: everything recomputed, by the baselines and by us."""

from dataclasses import replace

from tuner_common import load

from octojax.ir import Profile
from paper_pieces.cells import SPEEDUP, Cell, rounded
from paper_pieces.comparison import compare, speedup_cells
from paper_pieces.methods import METHODS
from paper_pieces.pictures import bars
from paper_pieces.piece import BASELINES_S, Piece
from paper_pieces.study import Settings, Study, load_average

PAPER = {
    "llama": ("LLaMA", ("1.00", "1.11", "1.18", "1.12", "1.27")),
    "jamba": ("Jamba", ("1.00", "1.07", "1.05", "1.15", "1.33")),
    "nemotron-h": ("Nemotron-H", ("1.00", "1.04", "1.08", "1.24", "1.48")),
}


def recomputed(profile: Profile) -> Profile:
    """Returns the profile of layers whose I pays for their forward once more.

    A plan costs on it what it costs on the profile with every stage recomputed.
    """
    layers = tuple(
        replace(layer, input_grad_s=layer.input_grad_s + layer.forward_s)
        for layer in profile.layers
    )
    return replace(profile, name=f"{profile.name}, recomputed", layers=layers)


def run(study: Study) -> list[Cell]:
    size = study.settings.sizes[-1]
    cells = []
    for model, (shown, figures) in PAPER.items():
        kept = load(f"{model}-{size}")
        found = compare(study, recomputed(kept), size)
        case = f"{shown} {size.upper()}"
        paper = dict(zip(METHODS, figures, strict=True)) if size == "l" else {}
        cells += speedup_cells(case, found, paper)
        free = study.tuned(kept, size, replicated=False)
        cells.append(
            Cell(
                case, "OctoPipe, free to keep", SPEEDUP, "simulated",
                ours=rounded(found.base_s / free.makespan_s),
                makespan_ms=rounded(free.makespan_s * 1e3, 7),
                search_s=rounded(free.seconds, 3),
                load_average=load_average(),
            )
        )  # fmt: skip
    return cells


def estimate_s(settings: Settings) -> float:
    size = settings.sizes[-1]
    return 3 * (2 * settings.search_s(size) + BASELINES_S[size])


PIECE = Piece(
    "table8",
    "TABLE VIII: recomputation",
    """
Every stage of every plan computes its forward again before its input gradient, those of the
baselines and ours. *free to keep* is our plan where recomputing is a choice: at 80 GB and 4k
tokens memory does not bind in these configurations, so it recomputes nothing (and ceiling and
bound, those of recomputed plans, do not hold for it).
""",
    run,
    estimate_s,
    draw=bars("Everything recomputed, simulated (as TABLE VIII)", SPEEDUP),
)
