"""Hanayo: a wave of 2W passes over the ranks, with no second copy of any weight."""

from octojax.ir.placement import Placement
from octojax.ir.schedule import Schedule
from octojax.schedules.family import Family, Option
from octojax.schedules.list_scheduler import ChainCosts, Policy, list_schedule
from octojax.schedules.options import whole
from octojax.schedules.row_shapes import schedule


def hanayo(ranks: int, microbatches: int, chunks: int, *, waves: int | None) -> Schedule:
    """Returns the wave pipeline at B = 2F: by readiness, backwards first, deeper waves first.

    There is no public code, and readiness leaves ties open: several limits of what is in
    flight and both tie rules are laid out, and the least makespan wins, then the least memory.

    W = 1, rank 0 of 4   F0 F1 F2 F3 .. .. .. 7F0 7B0 7F1 7B1 ..
    """
    if waves and chunks not in (2, 2 * waves):  # 2 is also the default
        raise ValueError(
            f"hanayo: waves={waves} means {2 * waves} chunks per rank, and chunks={chunks} was "
            f"asked for; give one of the two"
        )
    stages = 2 * ranks * (waves or chunks // 2)
    costs = ChainCosts(
        Placement.wave(ranks, stages // (2 * ranks)),
        microbatches,
        (1.0,) * stages,
        (2.0,) * stages,
        None,
        0.0,
        (stages * microbatches,) * ranks,
    )
    layouts = []
    for limit in sorted({min(n, microbatches) for n in (ranks, 2 * ranks - 1, microbatches)}):
        for deep_first in (True, False):
            layout = list_schedule(costs, Policy((limit,) * stages, "IFW", deep_first=deep_first))
            if layout is not None:
                layouts.append(layout)
    best = min(layouts, key=lambda x: (x.outcome.makespan_s, max(x.outcome.peaks)))
    return schedule(best.rows)


FAMILIES = (
    Family(
        name="hanayo",
        summary="waves: the V placement repeated W times, scheduled by readiness",
        source="Liu et al., Hanayo, SC 2023, arXiv:2308.15762 (no public code: own readiness rule)",
        layout=hanayo,
        constraints="chunks = 2 x waves, so even; any number of microbatches",
        bubble="about (2p-2)/(3pW+p-1) of the step for m = p, B = 2F",
        peak="up to m (2Wm chunks)",
        chunks=2,
        chunk_range=(2, None),
        placement="wave",
        options=(Option("waves", None, "waves W; chunks are 2W", whole()),),
        allows=lambda ranks, microbatches, chunks, waves: chunks % 2 == 0,
    ),
)
