"""Between partitions that a partitioner cannot tell apart, the quicker one.

    5 equal layers, 4 stages, 8 microbatches, 1F1B    2 1 1 1: 51    1 2 1 1: 53    1 1 1 2: 57

Every objective here counts the slowest stage, not where it stands; a schedule does.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache

import numpy as np

from octojax.ir.action import Action, Kind
from octojax.ir.partition import Partition
from octojax.partitioners.chain import Chain
from octojax.schedules import generate

MOST_ACTIONS = 10_000
"""Actions that one search may weigh: some milliseconds. Wide pipelines are left as they are."""


def quickest(
    partition: Partition, chain: Chain, microbatches: int, equal: Callable[[Partition], bool]
) -> Partition:
    """Returns the partition that 1F1B runs quickest among `partition` and its equals nearby.

    `equal(other)` says whether the partitioner's objective is the same. Steps move one layer from
    a stage to another (what lies between shifts along), as long as the makespan falls. Twice as
    many microbatches as stages are simulated at most: more only repeat the steady state.
    """
    stages = partition.num_stages
    order = _one_f_one_b(stages, min(microbatches, 2 * stages))
    left = MOST_ACTIONS // len(order)
    costs = np.array([chain.forward_s, chain.backward_s]).T
    best, least = partition, _makespan(partition, costs, order)
    better = True
    while better and left > 0:
        better = False
        for other in _neighbours(best):
            if left <= 0 or not equal(other):
                continue
            left -= 1
            makespan = _makespan(other, costs, order)
            if makespan < least * (1 - 1e-9):
                best, least, better = other, makespan, True
    return best


def _neighbours(partition: Partition) -> Iterator[Partition]:
    sizes = partition.sizes
    for source, size in enumerate(sizes):
        for target in range(len(sizes)):
            if source != target and size > 1:
                moved = list(sizes)
                moved[source] -= 1
                moved[target] += 1
                yield Partition(tuple(moved))


@cache
def _one_f_one_b(stages: int, microbatches: int) -> tuple[tuple[int, int, int, int], ...]:
    """Every action of 1F1B behind those that it follows: its stage, 0 for F and 1 for B, and the
    numbers of the action before on its rank and of that which makes its input (-1: none)."""
    rows = generate("1f1b", stages, microbatches).ranks
    number: dict[Action, int] = {}
    order: list[tuple[int, int, int, int]] = []
    position, last = [0] * stages, [-1] * stages
    while len(order) < sum(map(len, rows)):
        for rank, row in enumerate(rows):
            while position[rank] < len(row):
                action = row[position[rank]]
                assert isinstance(action, Action)
                source = _source(action, stages)
                if source is not None and source not in number:
                    break
                backward = int(action.kind is Kind.BACKWARD)
                before = -1 if source is None else number[source]
                order.append((action.stage, backward, last[rank], before))
                number[action] = last[rank] = len(order) - 1
                position[rank] += 1
    return tuple(order)


def _source(action: Action, stages: int) -> Action | None:
    """The action that makes what this one reads from another stage, or from its own forward."""
    if action.kind is Kind.FORWARD:
        return replace(action, stage=action.stage - 1) if action.stage else None
    if action.stage == stages - 1:
        return replace(action, kind=Kind.FORWARD)
    return replace(action, stage=action.stage + 1)


def _makespan(
    partition: Partition, costs: np.ndarray, order: Sequence[tuple[int, int, int, int]]
) -> float:
    """The makespan of 1F1B without transfers: the longest path, as `octojax.simulate` has it."""
    seconds = np.add.reduceat(costs, partition.bounds[:-1], axis=0).tolist()
    ends: list[float] = []
    for stage, kind, before, source in order:
        start = 0.0 if before < 0 else ends[before]
        if source >= 0:
            start = max(start, ends[source])
        ends.append(start + seconds[stage][kind])
    return max(ends)
