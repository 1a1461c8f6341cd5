"""Metis: layers in proportion to the speed of unequal ranks, and which rank comes where."""

import math
from collections.abc import Iterator, Sequence

import numpy as np

from octojax.errors import PlanError
from octojax.partitioners.chain import Chain
from octojax.partitioners.cut import Division, cut
from octojax.partitioners.family import Partitioner

MOST_ORDERS = 5000
"""Arrangements of unequal ranks that are tried one by one; beyond, only three are."""


def metis(
    chain: Chain,
    stages: int,
    microbatches: int,
    speeds: Sequence[float] = (),
    arrange: bool = True,
) -> Division:
    """Returns the least `(m-1) max(t) + sum(t)` where rank r runs `speeds[r]` times as fast.

    `arrange` also chooses the order of the ranks (`Division.order[s]` is the rank of stage s):
    every distinct one where there are few, as Metis enumerates device groups, else as given,
    fastest first and fastest last.
    """
    speeds = tuple(float(s) for s in speeds) or (1.0,) * stages
    if len(speeds) != stages or not all(0 < s < math.inf for s in speeds):
        raise PlanError(
            f"metis: speeds must be {stages} finite numbers > 0, one per rank, found {list(speeds)}"
        )
    total = chain.compute_s()
    best: Division | None = None
    for order in _orders(speeds) if arrange else (tuple(range(stages)),):
        times = np.stack([total / speeds[rank] for rank in order])
        division = cut(times, None, stages, microbatches - 1)
        assert division is not None, "layers are at least as many as stages"
        if best is None or division[1] < best.value_s * (1 - 1e-12):
            best = Division(*division, order=order)
    assert best is not None
    return best


def _orders(speeds: tuple[float, ...]) -> Iterator[tuple[int, ...]]:
    """Yields arrangements of the ranks, one of each that differs in speeds, as given first."""
    natural = tuple(range(len(speeds)))
    yield natural
    distinct = math.factorial(len(speeds))
    for speed in set(speeds):
        distinct //= math.factorial(speeds.count(speed))
    if distinct > MOST_ORDERS:
        fastest = sorted(natural, key=lambda rank: -speeds[rank])
        yield tuple(fastest)
        yield tuple(reversed(fastest))
        return
    yield from _distinct(speeds, natural, ())


def _distinct(
    speeds: tuple[float, ...], left: tuple[int, ...], chosen: tuple[int, ...]
) -> Iterator[tuple[int, ...]]:
    if not left:
        yield chosen
    seen: set[float] = set()
    for rank in left:
        if speeds[rank] not in seen:
            seen.add(speeds[rank])
            yield from _distinct(speeds, tuple(r for r in left if r != rank), (*chosen, rank))


FAMILIES = (
    Partitioner(
        "metis",
        "(m-1) max(t) + sum(t) on ranks of unequal speed, and their order",
        "Um et al., Metis, USENIX ATC 2024 (one rank per stage)",
        metis,
        (("speeds", ()), ("arrange", True)),
    ),
)
