"""ZB-H2: twice the warm-up of ZB-H1, so that no rank idles between its first and last action."""

from octojax.ir.schedule import Schedule
from octojax.schedules.family import Family
from octojax.schedules.rows import (
    backward,
    forward,
    schedule,
    warm_steady_cool,
    with_deferred_weights,
)


def zero_bubble_h2(ranks: int, microbatches: int, chunks: int) -> Schedule:
    """Returns min(2(p-r)-1, m) forwards before the first I, and W(j) after I(j+2r).

    A rank then holds 2p-1 microbatches until W, whatever its place: the weight gradients that
    late ranks put off are what fills their drain.
    """
    return schedule(
        with_deferred_weights(
            warm_steady_cool(
                [forward(r, i) for i in range(microbatches)],
                [backward(r, i) for i in range(microbatches)],
                2 * (ranks - 1 - r),
            ),
            delay=2 * r,
        )
        for r in range(ranks)
    )


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
