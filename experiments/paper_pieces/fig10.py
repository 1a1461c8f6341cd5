"""Fig. 10: each phase alone, in pairs, all together, with and without overlap."""

from itertools import combinations

from tuner_common import load

from octojax.tune import PHASES
from octojax.tune.tuner import without_overlap
from paper_pieces.ceiling import ceiling
from paper_pieces.cells import SPEEDUP, Cell, rounded
from paper_pieces.methods import one_f_one_b, simulated
from paper_pieces.pictures import bars
from paper_pieces.piece import BASELINES_S, Piece
from paper_pieces.study import Settings, Study, load_average

LETTER = {"partition": "P", "placement": "A", "schedule": "S"}
PAPER = {"+A": "1.05", "+S": "1.03", "+P": "1.18", "+ASP": "1.27", "+ASPO": "1.36"}
"""What the text says; the other bars have no numbers."""


def name_of(phases: tuple[str, ...], overlap: bool) -> str:
    """Returns the paper's name of a combination: letters in the order A, S, P, O."""
    letters = {LETTER[p] for p in phases}
    return "+" + "".join(x for x in "ASP" if x in letters) + ("O" if overlap else "")


def run(study: Study) -> list[Cell]:
    quick = study.settings.quick
    size = "s" if quick else "m"
    profile = load(f"nemotron-h-{size}")
    slow = without_overlap(profile)
    (plan,) = one_f_one_b(profile)
    base = simulated("1F1B", plan, slow).makespan_s
    cells = []
    for several in (1, 2, 3):
        for phases in combinations(PHASES, several):
            for overlap in (False,) if quick else (False, True):
                options = {"phases": phases, "overlap": overlap, "replicated": False}
                result = study.tuned(profile, size, **options)
                name = name_of(phases, overlap)
                cells.append(
                    Cell(
                        f"{profile.name}, {profile.ranks} ranks", name, SPEEDUP, "simulated",
                        rounded(base / result.makespan_s),
                        PAPER.get(name, ""),
                        rounded(ceiling(profile, base)),
                        rounded(base / result.lower_bound_s),
                        "more",
                        rounded(result.makespan_s * 1e3, 6),
                        rounded(result.seconds, 3),
                        load_average(),
                    )
                )  # fmt: skip
    return cells


def estimate_s(settings: Settings) -> float:
    count, size = (7, "s") if settings.quick else (14, "m")
    return count * (settings.search_s(size) + BASELINES_S["s"])


PIECE = Piece(
    "fig10",
    "Fig. 10: what each phase is worth, Nemotron-H (Medium)",
    """
P partition, A placement, S schedule; O lets transfers run beside computation. Without O every
transfer occupies both its ranks, in the search, in the figure and in the base. What is not
tuned stays as in 1F1B: uniform partition, a stage per rank, I before F and W after its I.
(Calibrated costs: six constants were fitted to this figure and TABLE IV.)
""",
    run,
    estimate_s,
    draw=bars("Phases alone and together, simulated (as Fig. 10)", SPEEDUP, size=(9, 3.2)),
)
