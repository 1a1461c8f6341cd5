"""Between partitions that a partitioner cannot tell apart, the quicker one.

    5 equal layers, 4 stages, 8 microbatches, 1F1B    2 1 1 1: 51    1 2 1 1: 53    1 1 1 2: 57

Every objective here counts the slowest stage, not where it stands; a schedule does.
"""

from collections.abc import Callable, Iterator
from functools import cache

import numpy as np

from octojax.ir.partition import Partition
from octojax.ir.schedule import Schedule
from octojax.partitioners.chain import Chain
from octojax.schedules import generate
from octojax.simulate import StageCosts, simulate

MOST_ACTIONS = 10_000
"""Simulated actions that one search may take: about 0.1 s. Wide pipelines are left as they are."""


def quickest(
    partition: Partition, chain: Chain, microbatches: int, equal: Callable[[Partition], bool]
) -> Partition:
    """Returns the partition that 1F1B runs quickest among `partition` and its equals nearby.

    `equal(other)` says whether the partitioner's objective is the same. Steps move one layer from
    a stage to another (what lies between shifts along), as long as the makespan falls. Twice as
    many microbatches as stages are simulated at most: more only repeat the steady state.
    """
    stages = partition.num_stages
    table = _one_f_one_b(stages, min(microbatches, 2 * stages))
    actions = 2 * stages * min(microbatches, 2 * stages)
    left = MOST_ACTIONS // max(1, actions)
    costs = np.array([chain.forward_s, chain.backward_s]).T
    best, least = partition, _makespan(partition, costs, table)
    better = True
    while better and left > 0:
        better = False
        for other in _neighbours(best):
            if left <= 0 or not equal(other):
                continue
            left -= 1
            makespan = _makespan(other, costs, table)
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
def _one_f_one_b(stages: int, microbatches: int) -> Schedule:
    return generate("1f1b", stages, microbatches)


def _makespan(partition: Partition, costs: np.ndarray, table: Schedule) -> float:
    forward, backward = np.add.reduceat(costs, partition.bounds[:-1], axis=0).T
    seconds = np.stack([forward, backward, backward / 2, backward / 2, forward], axis=1)
    stages = len(forward)
    costed = StageCosts(seconds, np.zeros((stages, 5)), np.zeros(stages, dtype=np.bool_))
    return simulate(table, costed, compiled=False).makespan_s
