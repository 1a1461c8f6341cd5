"""TABLE III: transfers of Nemotron-H (Small), and how many are overlapped."""

from tuner_common import load

from octojax.simulate import simulate
from paper_pieces.ceiling import ceiling
from paper_pieces.cells import SPEEDUP, Cell, rounded
from paper_pieces.methods import tokens_per_gpu_s
from paper_pieces.piece import BASELINES_S, Piece
from paper_pieces.races import FINE, emulated, emulation_s, plans
from paper_pieces.study import Settings, Study

PAPER = {
    "1F1B": ("4", "48", "50.0", "1.00", "1656"),
    "Mist": ("4", "48", "50.0", "1.10", "1822"),
    "Tessel": ("8", "96", "66.7", "1.05", "1740"),
    "Interleaved": ("56", "880", "75.6", "1.05", "1738"),
    FINE: ("56", "880", "91.3", "1.26", "2087"),
}
NONE = ("",) * 5


def run(study: Study) -> list[Cell]:
    profile = load("nemotron-h-s")
    chosen = plans(study)
    race = emulated(study)
    simulated = {name: simulate(plan, profile) for name, plan in chosen.items()}
    base_s = simulated["1F1B"].makespan_s
    measured = {row["plan"]: row for row in race.rows}
    base = measured["1F1B"]["measured_s"]
    top = ceiling(profile, base_s)
    case = "4 ranks, 8 microbatches"
    cells = []
    for name, plan in chosen.items():
        row, timeline = measured[name], simulated[name]
        stages, count, rate, speedup, tgs = PAPER.get(name, NONE)
        ours = name.startswith("OctoPipe")
        for quantity, kind, value, paper, aim in (
            ("stages", "exact", float(plan.num_stages), stages, "equal"),
            ("transfers", "emulated", float(row["comm"]), count, "equal"),
            ("overlapped", "emulated", float(row["overlap"]), "", "none"),
            ("overlapped, %", "emulated", 100 * row["rate"], rate, "more" if ours else "none"),
            ("overlapped, % (simulated)", "simulated",
             100 * timeline.sender_overlapped / len(timeline.transfers), "", "none"),
            (SPEEDUP, "emulated", base / row["measured_s"], speedup, "more"),
            ("tokens per GPU and second (simulated)", "simulated",
             tokens_per_gpu_s(profile, timeline.makespan_s), tgs, "more" if ours else "none"),
        ):  # fmt: skip
            cells.append(
                Cell(
                    case, name, quantity, kind, rounded(value, 4), paper,
                    rounded(top) if quantity == SPEEDUP else None,
                    aim=aim, load_average=race.load_average,
                )
            )  # fmt: skip
    return cells


def estimate_s(settings: Settings) -> float:
    return emulation_s(settings) + 2 * (settings.search_s("s") + BASELINES_S["s"])


PIECE = Piece(
    "table3",
    "TABLE III: communication, Nemotron-H (Small)",
    """
The executor itself, four processes with real transfers of real size; every action sleeps for
its profiled time, times 12. *overlapped* counts transfers whose sender goes on computing
meanwhile, the nearest to the paper's "can overlap with subsequent computation" ([how it
counted](../simulator.md#overlap-and-table-iii) is not known). *OctoPipe, 56 stages* has the
paper's number of stages, dealt to the ranks in turn: partition and schedule are tuned.
*OctoPipe* is the best plan found; it needs fewer stages, and so fewer transfers. Both are tuned
for a latency of 0.1 ms, about what a message of these processes takes by that factor.
""",
    run,
    estimate_s,
    across="quantity",
)
