"""Fig. 8: end-to-end throughput of nine configurations."""

from tuner_common import load

from paper_pieces.cells import SPEEDUP, Cell, rounded
from paper_pieces.comparison import compare, speedup_cells, tgs_cells
from paper_pieces.methods import best_interleaved
from paper_pieces.pictures import bars
from paper_pieces.piece import Piece, searches
from paper_pieces.study import Settings, Study, load_average

NAMES = {"llama": "LLaMA", "jamba": "Jamba", "nemotron-h": "Nemotron-H"}
PAPER = {"llama": "1.14-1.17", "jamba": "1.23-1.33"}
"""OctoPipe over 1F1B; the text gives ranges over the sizes."""
NEMOTRON = {
    "s": {"1F1B": "1.00", "Interleaved": "1.05", "Tessel": "1.05", "Mist": "1.10",
          "OctoPipe": "1.26"},
    "m": {"1F1B": "1.00", "Interleaved": "1.05", "Tessel": "1.03", "Mist": "1.18",
          "OctoPipe": "1.36"},
    "l": {"1F1B": "1.00", "OctoPipe": "1.44"},
}  # fmt: skip
"""From TABLE III, Fig. 10 (+A, +S, +P, +ASPO) and the upper end of the text's range."""


def run(study: Study) -> list[Cell]:
    cells = []
    for model, shown in NAMES.items():
        for size in study.settings.sizes:
            profile = load(f"{model}-{size}")
            found = compare(study, profile, size)
            case = f"{shown} {size.upper()}"
            paper = {"1F1B": "1.00", "OctoPipe": PAPER.get(model, "")}
            if model == "nemotron-h":
                paper = NEMOTRON[size]
            cells += speedup_cells(case, found, paper)
            with study.job(f"interleaved {profile.name}", 1.0):
                best = best_interleaved(profile)
            cells.insert(
                len(cells) - 1,
                Cell(
                    case, "Interleaved, best chunks", SPEEDUP, "simulated",
                    ours=rounded(found.base_s / best.makespan_s),
                    ceiling=cells[-1].ceiling,
                    bound=cells[-1].bound,
                    makespan_ms=rounded(best.makespan_s * 1e3, 7),
                    load_average=load_average(),
                ),
            )  # fmt: skip
            cells += tgs_cells(case, found, {})
    return cells


def estimate_s(settings: Settings) -> float:
    return searches(settings, settings.sizes, 3)


PIECE = Piece(
    "fig8",
    "Fig. 8: end-to-end throughput",
    """
TABLE II's configurations at 4k tokens: 4, 8 and 16 ranks of 8 devices, twice as many
microbatches as ranks. The figure prints no numbers; the paper's are those of its text and
tables: ranges over the sizes for LLaMA and Jamba (judged by their upper end), TABLE III and
Fig. 10 for Nemotron-H. *Interleaved* has one inner layer in a stage, as in TABLE III; *best
chunks* is the quickest of all chunk counts that divide the layers. *Tessel* runs on a V of two
stages a rank, its best of three repetends. Tokens per second are those of the profiles, not of
H800 GPUs.
""",
    run,
    estimate_s,
    draw=bars("Nine configurations, simulated (as Fig. 8)", SPEEDUP, size=(11, 3.6)),
)
