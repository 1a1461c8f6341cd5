"""The exact solver under the partitioners: cut a chain into stages, sum plus weighted maximum."""

import math
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Any

import numpy as np

from octojax.errors import PlanError
from octojax.ir.partition import Partition
from octojax.partitioners.chain import Array, spans

TOLERANCE = 1e-12
"""Relative; two values closer than this are a tie."""


@dataclass(frozen=True)
class Division:
    """A partition, and what its partitioner thinks of it.

    `value_s` is its objective. `recompute[i]` says that layer i's residuals are rebuilt in the
    backward (empty: none are). `order[s]` is the rank that should hold stage s (empty: s).
    """

    partition: Partition
    value_s: float
    recompute: tuple[bool, ...] = ()
    order: tuple[int, ...] = ()

    @property
    def stage_recompute(self) -> tuple[bool, ...]:
        """Per stage, whether any of its layers is recomputed: what `Plan.recompute` takes."""
        if not self.recompute:
            return ()
        return tuple(
            any(self.recompute[i] for i in self.partition.layers(stage))
            for stage in range(self.partition.num_stages)
        )


def check_counts(layers: int, stages: int, microbatches: int = 1) -> None:
    """Raises `PlanError` unless `layers` can form `stages` stages, and both counts are >= 1."""
    for what, value in (("stages", stages), ("microbatches", microbatches)):
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise PlanError(f"{what} must be a whole number >= 1, found {value!r}")
    if layers < stages:
        raise PlanError(f"{layers} layers cannot form {stages} stages; use at most {layers} stages")


def cut(
    sums: Array,
    maxima: Array | None,
    stages: int,
    weight: float,
) -> tuple[Partition, float] | None:
    """Returns the partition of least `sum(sums) + weight * max(maxima)` and that value.

    `sums` and `maxima` are `(n+1, n+1)` or, where a stage's cost depends on its place,
    `(stages, n+1, n+1)`: entry `[i, j]` for layers i to j-1, infinite where not allowed.
    `maxima` defaults to `sums`.
    Among equal values the evenest partition wins, then the one with more layers in front.
    Returns None if nothing is allowed.

    Exact, by Alpa's observation (OSDI 2022, section 5.2) turned around: under a limit on the
    maximum, a dynamic program finds the least sum; the limit then drops just below the maximum
    found, until no partition is left or none can be better.
    """
    maxima = sums if maxima is None else maxima
    best: tuple[float, Partition] | None = None
    limit = math.inf
    while candidate := _least_sum(sums, maxima, stages, limit):
        total, highest, partition = candidate
        value = total + weight * highest
        if best is None or value < best[0] * (1 - TOLERANCE):
            best = value, partition
        elif value <= best[0] * (1 + TOLERANCE) and _evenness(sums, partition) < _evenness(
            sums, best[1]
        ):
            best = min(value, best[0]), partition
        if weight == 0:
            break
        limit = highest * (1 - TOLERANCE) if highest > 0 else -1.0
    return None if best is None else (best[1], best[0])


def least_maximum(maxima: Array, sums: Array, stages: int) -> tuple[Partition, float] | None:
    """Returns the partition of least `max(maxima)`, and that value; None if nothing is allowed.

    Among equals the least sum of squares of `sums` wins, then more layers in front.
    """
    n = maxima.shape[-1] - 1
    highest = np.full(n + 1, math.inf)
    highest[0] = 0.0
    for stage in range(stages):
        highest = np.maximum(highest[:, None], _of_stage(maxima, stage)).min(axis=0)
    least = float(highest[n])
    if not math.isfinite(least):
        return None
    squares = np.where(maxima <= least * (1 + TOLERANCE), sums**2, math.inf)
    division = cut(squares, None, stages, 0.0)
    assert division is not None, "the maximum just found has a partition"
    return division[0], least


@lru_cache(maxsize=256)
def balanced_sizes(times: tuple[float, ...], stages: int) -> tuple[int, ...]:
    """Returns layers per stage with the least maximal sum of `times`, then the evenest."""
    table = spans(times)
    least = least_maximum(table, table, stages)
    assert least is not None, "layers are at least as many as stages"
    return least[0].sizes


def _least_sum(
    sums: Array, maxima: Array, stages: int, limit: float
) -> tuple[float, float, Partition] | None:
    """Returns least sum, its maximum and partition, with no stage at or above `limit`."""
    n = sums.shape[-1] - 1
    reach = np.full(n + 1, math.inf)  # least sum of the first s stages ending before layer j
    even = np.zeros(n + 1)  # and the least sum of squares among those
    reach[0] = 0.0
    came: list[Any] = []
    for stage in range(stages):
        cost, height = _of_stage(sums, stage), _of_stage(maxima, stage)
        allowed = np.where(height < limit, cost, math.inf)
        totals = reach[:, None] + allowed
        least = totals.min(axis=0)
        tied = totals <= least * (1 + TOLERANCE)
        squares = np.where(tied & np.isfinite(totals), even[:, None] + allowed**2, math.inf)
        start = n - np.argmin(squares[::-1], axis=0)  # the last of equals: more in front
        came.append(start)
        reach, even = least, np.where(np.isfinite(least), squares[start, np.arange(n + 1)], 0.0)
    if not math.isfinite(reach[n]):
        return None
    ends = [n]
    for start in reversed(came):
        ends.append(int(start[ends[-1]]))
    bounds = ends[::-1]
    partition = Partition(tuple(b - a for a, b in _pairs(bounds)))
    return float(reach[n]), max(_costs(maxima, partition)), partition


def objective(sums: Array, maxima: Array | None, weight: float, partition: Partition) -> float:
    """Returns `sum(sums) + weight * max(maxima)` of a partition, as `cut` counts it."""
    highest = max(_costs(sums if maxima is None else maxima, partition))
    return sum(_costs(sums, partition)) + weight * highest


def _evenness(sums: Array, partition: Partition) -> float:
    return sum(cost**2 for cost in _costs(sums, partition))


def _costs(table: Array, partition: Partition) -> list[float]:
    pairs = _pairs(list(partition.bounds))
    return [float(_of_stage(table, s)[a, b]) for s, (a, b) in enumerate(pairs)]


def _of_stage(table: Array, stage: int) -> Array:
    return table if table.ndim == 2 else table[stage]


def _pairs(bounds: list[int]) -> list[tuple[int, int]]:
    return list(pairwise(bounds))
