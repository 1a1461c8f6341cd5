"""Ranks that compute more slowly than expected, by a profile or a rehearsal."""

import statistics
from collections import defaultdict
from dataclasses import dataclass

from octojax.errors import PlanError
from octojax.ir import Item, Timeline


@dataclass(frozen=True)
class Straggler:
    """A rank whose actions take `factor` times what was expected, and its worst action."""

    rank: int
    factor: float
    worst: Item
    worst_s: float
    expected_s: float

    def __str__(self) -> str:
        return (
            f"rank {self.rank} computes {self.factor:.2f} times as long as expected; "
            f"worst is {self.worst}: {self.worst_s * 1e3:.4g} ms instead of "
            f"{self.expected_s * 1e3:.4g} ms"
        )


def stragglers(
    measured: Timeline, expected: Timeline, factor: float = 1.2
) -> tuple[Straggler, ...]:
    """Returns the ranks slower than expected by more than `factor`, the slowest first.

    `expected` is the simulation of the same plan with its profile. A rank's factor is that of
    its actions' total time, transfers and waiting left out. Raises `PlanError` if the two
    timelines are of different plans, `ValueError` for a factor below 1.
    """
    if not factor >= 1:
        raise ValueError(f"factor {factor} would name ranks that are not slow; use 1 or more")
    times = [
        {(s.rank, s.item): s.end_s - s.start_s for s in t.actions} for t in (measured, expected)
    ]
    if times[0].keys() != times[1].keys():
        odd = sorted(f"{i} on rank {r}" for r, i in times[0].keys() ^ times[1].keys())
        raise PlanError(
            f"the measured and the expected timeline are of different plans: {len(odd)} actions "
            f"are in one of them alone, such as {', '.join(odd[:3])}"
        )
    by_rank: dict[int, list[Item]] = defaultdict(list)
    for rank, item in times[1]:
        by_rank[rank].append(item)
    slow = []
    for rank, items in by_rank.items():
        took = [times[0][rank, i] for i in items]
        expected_s = [times[1][rank, i] for i in items]
        ratio = sum(took) / sum(expected_s) if sum(expected_s) else 1.0
        if ratio <= factor:
            continue
        usual = statistics.median(expected_s)
        at = max(
            range(len(items)),
            key=lambda k: took[k] - expected_s[k] if expected_s[k] >= usual else 0,
        )
        slow.append(Straggler(rank, ratio, items[at], took[at], expected_s[at]))
    return tuple(sorted(slow, key=lambda s: -s.factor))
