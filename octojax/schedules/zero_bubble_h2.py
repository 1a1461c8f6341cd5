"""ZB-H2: twice the warm-up of ZB-H1, so that no rank idles between its first and last action."""

from octojax.ir.schedule import Schedule
from octojax.schedules.family import Family
from octojax.schedules.row_shapes import (
    backward,
    forward,
    schedule,
    warm_steady_cool,
    with_deferred_weights,
)


def zero_bubble_h2(ranks: int, microbatches: int, chunks: int) -> Schedule:
    """Returns min(2(p-r)-1, m) forwards before the first I, and W as late as memory allows.

    A rank holds k = min(2p-1, m) microbatches until W, whatever its place: W(j) comes after
    I(j+2r) (for m >= 2p-1), and the weight gradients that late ranks put off fill their drain.
    """
    capacity = min(2 * ranks - 1, microbatches)
    order = range(microbatches)
    rows = []
    for r in range(ranks):
        warmup = min(2 * (ranks - 1 - r), capacity - 1)
        forwards, backwards = [forward(r, i) for i in order], [backward(r, i) for i in order]
        row = warm_steady_cool(forwards, backwards, warmup)
        rows.append(with_deferred_weights(row, delay=capacity - 1 - warmup))
    return schedule(rows)


FAMILIES = (
    Family(
        name="zb-h2",
        summary="zero bubble inside every rank's span, for twice the memory of 1F1B",
        source="Qi et al., Zero Bubble Pipeline Parallelism, ICLR 2024, arXiv:2401.10241",
        layout=zero_bubble_h2,
        bubble="(p-1)(F+I-2W) inside; T = 3m+p-1 for m >= 2p-1 at F=I=W=1",
        peak="min(2(p-r)-1, m) freed at I, min(2p-1, m) freed at W",
        splits_backward=True,
    ),
)
