"""TABLE IV: throughput of Nemotron-H (Small) at sequence lengths of 2k to 16k."""

from tuner_common import load

from paper_pieces.cells import SPEEDUP, Cell
from paper_pieces.comparison import compare, speedup_cells, tgs_cells
from paper_pieces.pictures import bars
from paper_pieces.piece import BASELINES_S, Piece
from paper_pieces.study import Settings, Study

PROFILES = {
    "2k": "nemotron-h-s-seq2k",
    "4k": "nemotron-h-s",
    "8k": "nemotron-h-s-seq8k",
    "16k": "nemotron-h-s-seq16k",
}
PAPER_TGS = {
    "1F1B": ("925", "1656", "2687", "3755"),
    "Interleaved": ("965", "1740", "2818", "3960"),
    "Tessel": ("981", "1738", "2735", "3821"),
    "Mist": ("1000", "1822", "2982", "4281"),
    "OctoPipe": ("1135", "2087", "3450", "4971"),
}
PAPER = {
    "1F1B": ("1.00", "1.00", "1.00", "1.00"),
    "Interleaved": ("1.04", "1.05", "1.05", "1.05"),
    "Tessel": ("1.06", "1.05", "1.02", "1.02"),
    "Mist": ("1.08", "1.10", "1.11", "1.14"),
    "OctoPipe": ("1.23", "1.26", "1.28", "1.32"),
}


def run(study: Study) -> list[Cell]:
    cells = []
    for at, (length, name) in enumerate(PROFILES.items()):
        if study.settings.quick and length not in ("2k", "4k"):
            continue
        found = compare(study, load(name), "s")
        case = f"sequence {length}"
        cells += tgs_cells(case, found, {m: v[at] for m, v in PAPER_TGS.items()})
        cells += speedup_cells(case, found, {m: v[at] for m, v in PAPER.items()})
    return cells


def estimate_s(settings: Settings) -> float:
    return len(PROFILES) * (settings.search_s("s") + BASELINES_S["s"])


PIECE = Piece(
    "table4",
    "TABLE IV: sequence lengths, Nemotron-H (Small)",
    """
4 ranks of 8 devices, 8 microbatches of one sequence. The profiles' six constants were fitted to
this table (and Fig. 10): that the tokens per second of 1F1B are the paper's is so by
construction. Not fitted are the differences between methods.
""",
    run,
    estimate_s,
    draw=bars("Nemotron-H (Small), simulated (as TABLE IV)", SPEEDUP),
)
