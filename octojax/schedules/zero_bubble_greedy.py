"""The greedy weight-gradient filler of tutorials: 1F1B's limit, W wherever a rank would wait."""

from octojax.ir.placement import Placement
from octojax.ir.schedule import Schedule
from octojax.schedules.family import Family
from octojax.schedules.list_scheduler import ChainCosts, Policy, list_schedule
from octojax.schedules.row_shapes import schedule


def zb_greedy(ranks: int, microbatches: int, chunks: int) -> Schedule:
    """Returns list scheduling at F=I=W: I before F before W among what can start first.

    At most p-r forwards are in flight, counted until I: weight gradients may pile up, so what
    is really held until W can reach m.
    """
    ones = (1.0,) * ranks
    costs = ChainCosts(
        Placement.sequential(ranks), microbatches, ones, ones, ones, 0.0, (ranks,) * ranks
    )
    policy = Policy(tuple(range(ranks, 0, -1)), "IFW", patient=False, held_until_input_grad=True)
    layout = list_schedule(costs, policy)
    assert layout is not None, "a limit of p-r in flight never stops the last rank"
    return schedule(layout.rows)


FAMILIES = (
    Family(
        name="zb-greedy",
        summary="the simplest zero-bubble variant: W fills whatever gap there is",
        source="common tutorial form of zero bubble (ZB1P with a greedy fill); no paper",
        layout=zb_greedy,
        bubble="between (p-1)(F+I-W) and 1F1B's",
        peak="p-r freed at I, up to m freed at W",
        splits_backward=True,
    ),
)
