"""Fig. 3: two stages of 2T and 4T, two microbatches; each phase alone, and all together."""

from dataclasses import dataclass

from octojax.ir import LayerCost, Machine, Partition, Placement, Plan, Profile
from octojax.schedules import generate
from octojax.simulate import simulate
from octojax.tune import tune
from paper_pieces.ceiling import balanced_load_s
from paper_pieces.cells import Cell, rounded
from paper_pieces.pictures import bars
from paper_pieces.piece import Piece
from paper_pieces.study import Settings, Study

TIME = "time of a step, T"
GIVEN = Partition((2, 4))
"""Six layers of F = I = W = 1T: the paper's S0 of 2T and S1 of 4T."""


@dataclass(frozen=True)
class Outcome:
    """What tuning some phases gives, in T: the paper's, ours, and the bound of such plans."""

    name: str
    paper: str
    ours: float
    bound: float
    note: str = ""


def layers(*costs: int) -> Profile:
    """Returns the profile of layers whose F, I and W take so many T each, on two ranks."""
    return Profile("Fig. 3", tuple(LayerCost("x", c, c, c) for c in costs), Machine(), 2, 2)


def one_f_one_b(sizes: tuple[int, ...]) -> float:
    """Returns the step of 1F1B with a whole backward on these stages."""
    plan = Plan(Partition(sizes), Placement.sequential(2), generate("1f1b", 2, 2))
    return simulate(plan, layers(1, 1, 1, 1, 1, 1)).makespan_s


def outcomes() -> list[Outcome]:
    """Returns the figure's bars, by exact enumeration where a schedule is searched."""
    joint = tune(layers(1, 1, 1, 1, 1, 1), method="exact")
    schedule = tune(layers(2, 4), method="exact")
    placement = tune(
        layers(1, 1, 1, 1, 1, 1),
        iterations=300,
        start=GIVEN,
        phases=("placement",),
        replicated=False,
        baselines=("1f1b",),
    )
    any_partition = min((one_f_one_b((k, 6 - k)), f"{k} + {6 - k} layers") for k in range(1, 6))
    return [
        Outcome("1F1B", "30", one_f_one_b(GIVEN.sizes), joint.lower_bound_s),
        Outcome("partition", "26", any_partition[0], joint.lower_bound_s, any_partition[1]),
        Outcome(
            "placement", "26", placement.makespan_s, joint.lower_bound_s,
            f"stages of {placement.plan.partition} layers on ranks {placement.plan.placement}",
        ),
        Outcome("schedule", "26", schedule.makespan_s, schedule.lower_bound_s, "optimal"),
        Outcome("all three", "20", joint.makespan_s, joint.lower_bound_s, "optimal"),
    ]  # fmt: skip


def run(study: Study) -> list[Cell]:
    with study.job("Fig. 3", estimate_s(study.settings)):
        found = outcomes()
    ideal = 2 * balanced_load_s(layers(1, 1, 1, 1, 1, 1))
    return [
        Cell(
            "S0 of 2T, S1 of 4T", x.name, TIME, "exact", rounded(x.ours), x.paper, ideal,
            rounded(x.bound), "less", note=x.note,
        )
        for x in found
    ]  # fmt: skip


def estimate_s(settings: Settings) -> float:
    return 5.0


PIECE = Piece(
    "fig3",
    "Fig. 3: two stages, two microbatches",
    """
Six layers of F = I = W = 1T on two ranks, cut 2 + 4. 1F1B has whole backwards here, as the
figure's 30T has. The paper prints 30T for 1F1B, "up to 4T" less for a phase alone and 10T less
for all three. *partition* is 1F1B on any partition; *placement* begins from 2 + 4 and may cut
and spread stages while two layers stay on one rank and four on the other (I before F, W after
its I); *schedule* any order on the given stages with the backward split. The bound is that of
all plans, for *schedule* that of plans on the given stages.
""",
    run,
    estimate_s,
    draw=bars("Tuning one phase, and all (as Fig. 3)", TIME, size=(6, 3)),
)
