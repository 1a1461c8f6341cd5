"""1F1B in its two forms: one backward for each forward after a short warm-up."""

from octojax.ir.schedule import Schedule
from octojax.schedules.family import Family
from octojax.schedules.row_shapes import backward, forward, schedule, warm_steady_cool


def one_f_one_b(ranks: int, microbatches: int, chunks: int) -> Schedule:
    """Returns rank r's p-1-r forwards (at most m), then forward-backward pairs, then backwards.

    rank 0   F0 F1 .. .. B0 F2 B1 .. B2
    rank 1   .. F0 B0 F1 B1 F2 B2
    """
    return _rows(ranks, microbatches, [ranks - 1 - r for r in range(ranks)])


def overlap_friendly(ranks: int, microbatches: int, chunks: int) -> Schedule:
    """Returns 1F1B with twice the warm-up, 2(p-1-r), so that a hop has a whole action to hide."""
    return _rows(ranks, microbatches, [2 * (ranks - 1 - r) for r in range(ranks)])


def _rows(ranks: int, microbatches: int, warmups: list[int]) -> Schedule:
    return schedule(
        warm_steady_cool(
            [forward(s, i) for i in range(microbatches)],
            [backward(s, i) for i in range(microbatches)],
            warmups[s],
        )
        for s in range(ranks)
    )


FAMILIES = (
    Family(
        name="1f1b",
        summary="one forward, one backward: GPipe's bubble in p microbatches of memory",
        source="Narayanan et al., PipeDream-Flush, ICML 2021, arXiv:2006.09503; "
        "DAPPLE, PPoPP 2021, arXiv:2007.01045",
        layout=one_f_one_b,
        constraints="any number of microbatches (warm-up is clamped for m < p)",
        bubble="(p-1)(F+B)",
        peak="min(p-r, m)",
        aliases=("pipedream-flush", "dapple"),
    ),
    Family(
        name="1f1b-overlap",
        summary="1F1B with twice the warm-up, so that transfers hide behind computation",
        source="Zhuang et al., MLSys 2023, arXiv:2211.05322 (Alpa's overlap-friendly 1F1B); "
        "DAPPLE's policy B",
        layout=overlap_friendly,
        bubble="(p-1)(F+B)",
        peak="min(2(p-r)-1, m)",
    ),
)
