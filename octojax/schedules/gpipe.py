"""GPipe: all forwards, then all backwards."""

from octojax.ir.schedule import Schedule
from octojax.schedules.family import Family, Option
from octojax.schedules.options import choice
from octojax.schedules.row_shapes import backward, forward, schedule


def gpipe(ranks: int, microbatches: int, chunks: int, *, backward_order: str) -> Schedule:
    """Returns all F in order, then all B, oldest first (`fifo`) or newest first (`lifo`).

    rank 0   F0 F1 F2 .. .. .. .. B0 B1 B2
    rank 1   .. F0 F1 F2 B0 B1 B2 .. .. ..
    """
    order = range(microbatches)
    back = order if backward_order == "fifo" else order[::-1]
    return schedule(
        [*(forward(s, i) for i in order), *(backward(s, i) for i in back)] for s in range(ranks)
    )


FAMILIES = (
    Family(
        name="gpipe",
        summary="all forwards, then all backwards",
        source="Huang et al., GPipe, NeurIPS 2019, arXiv:1811.06965",
        layout=gpipe,
        bubble="(p-1)(F+B)",
        peak="m",
        options=(
            Option(
                "backward_order",
                "fifo",
                "fifo as PyTorch and Alpa run it, lifo as the paper draws it",
                choice("fifo", "lifo"),
            ),
        ),
    ),
)
