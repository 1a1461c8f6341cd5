"""A named schedule on a placement that is not its own: the same rows, or the same rule.

1f1b on [1 0]               the published rows, on the ranks in the other order
1f1b on [0 1 1 0 2 3 3 2]   no table is published: laid out by readiness, with the schedule's
                            own limits of what is in flight, backwards before forwards
"""

import itertools
from collections.abc import Callable
from typing import Any

from octojax.ir.placement import Placement
from octojax.ir.schedule import Schedule
from octojax.schedules.family import Family
from octojax.schedules.list_scheduler import ChainCosts, Policy, list_schedule
from octojax.schedules.row_shapes import schedule


def on_placement(
    family: Family,
    placement: Placement,
    ranks: int,
    microbatches: int,
    chunks: int | None = None,
    **options: Any,
) -> Schedule:
    """Returns a table of `family`'s kind that holds stage s on `placement`'s rank of s.

    Where the placement is the family's own with its ranks renamed, the published rows, renamed.
    Else rows by readiness at F=I=W=1 and B=2: of several limits of what is in flight the least
    makespan, then the least memory. Every placement has such rows, and they cannot deadlock.
    Raises `ValueError` for sizes that do not fit, and for what only published rows can have
    (two ranks per stage, options).
    """
    placement = _over(placement, ranks, family.name)
    own = family.place(ranks, chunks or _chunks(family, placement))
    renamed = _renaming(own, placement)
    if renamed is not None:
        rows = family.generate(ranks, microbatches, chunks or _chunks(family, placement), **options)
        return Schedule(tuple(rows.ranks[renamed[rank]] for rank in range(ranks)))
    if chunks is not None and chunks * ranks != placement.num_stages:
        raise ValueError(
            f"{family.name}: chunks={chunks} on {ranks} ranks are {chunks * ranks} stages, but "
            f"placement [{placement}] has {placement.num_stages}. Leave chunks out"
        )
    double = [s for s, holders in enumerate(placement.stages) if len(holders) != 1]
    if double or family.bidirectional:
        raise ValueError(
            f"{family.name}: placement [{placement}] is none of its own ([{own}], or that with "
            f"its ranks renamed), and other orders exist only for stages held by one rank each. "
            f"Place each stage once with '1f1b' or 'zb-h1', or give a schedule table"
        )
    if options:
        raise ValueError(
            f"{family.name}: option {', '.join(options)} belongs to the published rows on "
            f"[{own}]; on placement [{placement}] rows are laid out by readiness. Leave it out, "
            f"or take 'dynapipe', which has options for any placement"
        )
    return _by_readiness(family, placement, microbatches)


def _over(placement: Placement, ranks: int, name: str) -> Placement:
    if placement.num_ranks > ranks:
        raise ValueError(
            f"{name}: placement [{placement}] names rank {placement.num_ranks - 1}, but there are "
            f"{ranks} ranks (0 to {ranks - 1})"
        )
    return Placement(placement.stages, ranks)


def _chunks(family: Family, placement: Placement) -> int:
    """Stages per rank, if the family allows them; else its default, whose placement differs."""
    chunks, rest = divmod(placement.num_stages, placement.num_ranks)
    least, most = family.chunk_range
    fits = not rest and chunks >= least and (most is None or chunks <= most)
    return chunks if fits and not family.bidirectional else family.chunks


def _renaming(own: Placement, wanted: Placement) -> dict[int, int] | None:
    """Returns which of `own`'s ranks each wanted rank plays; None if no renaming fits."""
    if own.num_stages != wanted.num_stages:
        return None
    if own == wanted:
        return {rank: rank for rank in range(own.num_ranks)}
    if any(len(holders) != 1 for holders in (*own.stages, *wanted.stages)):
        return None
    plays: dict[int, int] = {}
    for (rank,), (role,) in zip(wanted.stages, own.stages, strict=True):
        if plays.setdefault(rank, role) != role:
            return None
    distinct = len(set(plays.values())) == len(plays) == own.num_ranks
    return plays if distinct else None


def _by_readiness(family: Family, placement: Placement, microbatches: int) -> Schedule:
    stages = placement.num_stages
    split = family.splits_backward
    costs = ChainCosts(
        placement,
        microbatches,
        (1.0,) * stages,
        (1.0 if split else 2.0,) * stages,
        (1.0,) * stages if split else None,
        0.0,
        (stages * microbatches,) * placement.num_ranks,
    )
    layouts = []
    limits = {tuple(limit(s) for s in range(stages)) for limit in _limits(family, stages)}
    for limit, deep_first in itertools.product(sorted(limits), (True, False)):
        capped = tuple(min(n, microbatches) for n in limit)
        order = "FIW" if family.name in FORWARDS_FIRST else "IFW"
        layout = list_schedule(costs, Policy(capped, order, deep_first=deep_first))
        if layout is not None:
            layouts.append(layout)
    best = min(layouts, key=lambda x: (round(x.outcome.makespan_s, 9), max(x.outcome.peaks)))
    return schedule(best.rows)


FORWARDS_FIRST = ("gpipe", "looped-bfs")
"""Schedules that run all forwards before any backward."""


def _limits(family: Family, stages: int) -> list[Callable[[int], int]]:
    """What may be in flight per stage: everything, or as 1F1B has it, and half as much more."""
    if family.name in FORWARDS_FIRST:
        return [lambda stage: 1 << 30]
    return [
        lambda stage: stages - stage,
        lambda stage: stages,
        lambda stage: -(-3 * (stages - stage) // 2),
    ]
