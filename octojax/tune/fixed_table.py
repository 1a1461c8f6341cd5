"""The partition of a plan whose table stays as it is, action for action.

Borders between stages move by a layer, or a run of borders together, as long as that shortens the
step in the simulator; then from where chance has moved some of them, for the rest of the budget.
"""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from octojax.ir.partition import Partition, uniform_partition
from octojax.ir.plan import Plan
from octojax.simulate.costs import LayerCosts
from octojax.simulate.evaluation import Evaluation, evaluate
from octojax.simulate.links import Links
from octojax.simulate.table import Table
from octojax.tune.measure import fits
from octojax.tune.search import Search

KICKS = 4
"""Borders that chance moves before the next descent, at most."""
STALL = 20
"""Stop after so many descents without improvement, where neither seconds nor iterations are set."""

Sizes = tuple[int, ...]


def search_partition(search: Search, plan: Plan, seed: int) -> None:
    """Improves `search` by other partitions of `plan` until a limit is reached. An iteration is one
    descent; the same seed and iterations give the same plan.
    """
    problem, rng = search.problem, np.random.default_rng(seed)
    table, links = Table.of(plan), Links.of(problem.profile.machine, problem.ranks)
    layers = LayerCosts(problem.profile)

    def measured(sizes: Sizes) -> Evaluation:
        search.evaluations += 1
        return evaluate(table, layers.cut(sizes, plan.recompute), links)

    stages, stalled = plan.num_stages, 0
    starts = [
        plan.partition.sizes,
        uniform_partition(problem.profile.kinds, stages).sizes,
        problem.balanced_sizes(stages),
    ]
    best: tuple[float, Sizes] = (np.inf, plan.partition.sizes)
    while not search.finished():
        sizes = starts.pop(0) if starts else _kicked(best[1], rng)
        evaluation = measured(sizes)
        value = _value(evaluation, search)
        better = True
        while better and not search.finished():
            better = False
            for other in _neighbours(sizes):
                outcome = measured(other)
                if _value(outcome, search) < value * (1 - 1e-12):
                    sizes, evaluation, value, better = other, outcome, _value(outcome, search), True
                    break
        search.iteration += 1
        search.counts["partition"] += 1
        stalled += 1
        if value < best[0] or best[0] == np.inf:
            best, stalled = (value, sizes), 0
        if value < np.inf:
            tuned = replace(plan, partition=Partition(sizes), prediction=None)
            search.offer(tuned, "partition", evaluation)
        search.report("partition")
        limits = search.limits
        if not starts and (stages == 1 or (limits.iterations is None and stalled >= STALL)):
            search.stop = search.stop or "no improvement"


def _value(evaluation: Evaluation, search: Search) -> float:
    return evaluation.makespan_s if fits(evaluation, search.problem) else np.inf


def _neighbours(sizes: Sizes) -> Iterator[Sizes]:
    """Yields the partitions in which one stage has a layer less and another a layer more."""
    for source, size in enumerate(sizes):
        if size == 1:
            continue
        for target in range(len(sizes)):
            if source != target:
                moved = list(sizes)
                moved[source] -= 1
                moved[target] += 1
                yield tuple(moved)


def _kicked(sizes: Sizes, rng: np.random.Generator) -> Sizes:
    moved = list(sizes)
    for _ in range(int(rng.integers(1, KICKS + 1))):
        source, target = rng.integers(len(sizes), size=2)
        if moved[source] > 1:
            moved[source] -= 1
            moved[target] += 1
    return tuple(moved)
