"""Chimera: two 1F1B pipelines in opposite directions, interlocked tick by tick."""

from octojax.ir.action import Action
from octojax.ir.schedule import Schedule
from octojax.schedules.family import Family
from octojax.schedules.row_shapes import backward, forward, schedule


def chimera(ranks: int, microbatches: int, chunks: int) -> Schedule:
    """Returns units of p microbatches: the first half runs down, the second half runs up.

    In ticks of F = B, stage s runs F of a unit's i-th microbatch at s + 2i and its B at
    2p - 1 - s + 2i; the two directions then never meet on a rank, and a unit starts every 2p.

    rank 0   0F0 0F1 3F2 3B2 3F3 3B3 0B0 0B1      p = 4, m = 4
    rank 1   1F0 2F2 1F1 2F3 2B2 1B0 2B3 1B1
    """
    ticks: list[list[tuple[int, Action]]] = [[] for _ in range(ranks)]
    for start in range(0, microbatches, ranks):
        unit = range(start, min(start + ranks, microbatches))
        down = (len(unit) + 1) // 2
        for microbatch in unit:
            place = microbatch - start
            turn = place if place < down else place - down
            for stage in range(ranks):
                rank = stage if place < down else ranks - 1 - stage
                begin = 2 * (start + turn)
                ticks[rank].append((begin + stage, forward(stage, microbatch)))
                ticks[rank].append((begin + 2 * ranks - 1 - stage, backward(stage, microbatch)))
    return schedule((action for _, action in sorted(row)) for row in ticks)


FAMILIES = (
    Family(
        name="chimera",
        summary="two 1F1B pipelines in opposite directions fill each other's bubbles",
        source="Li and Hoefler, Chimera, SC 2021, arXiv:2107.06925 (units concatenated directly)",
        layout=chimera,
        constraints="p even, m a multiple of p/2; weights are held twice",
        bubble="p-2 ticks of F = B for m = p",
        peak="p/2+1 .. p",
        chunks=2,
        chunk_range=(2, 2),
        placement="bidirectional",
        allows=lambda ranks, microbatches, chunks: 2 * microbatches % ranks == 0,
        allows_ranks=lambda ranks: ranks % 2 == 0,
    ),
)
