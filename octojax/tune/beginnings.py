"""The candidates that a search from a given start begins with, and what it may not change."""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from octojax.ir.action import Kind
from octojax.ir.lowering import actions_of
from octojax.ir.partition import uniform_partition
from octojax.ir.plan import Plan
from octojax.simulate.costs import StageCosts
from octojax.simulate.evaluation import trace
from octojax.simulate.links import Links
from octojax.simulate.table import Table
from octojax.tune.candidate import LATE_S, Candidate
from octojax.tune.constraints import Constraints
from octojax.tune.initial import Beginning
from octojax.tune.keys import ONE_F_ONE_B, by_formula
from octojax.tune.problem import Problem
from octojax.tune.starts import priorities, published_orders

TURNS = (1, 2, 3, 4, 6, 8)
"""In so many turns each rank's layers are dealt where they may not leave it."""
GROWTHS = (1.0, 1.5, 2.0)
"""By so much the pieces of a turn are larger than those of the turn before."""
COLUMNS = {Kind.FORWARD: 0, Kind.INPUT_GRAD: 1, Kind.BACKWARD: 1, Kind.WEIGHT_GRAD: 2}

Layout = tuple[np.ndarray, np.ndarray]
"""The rank of each layer, and where stages begin though the rank stays."""


def constraints_of(
    start: Beginning | None, problem: Problem, phases: frozenset[str]
) -> Constraints:
    """Returns what a search may not change: the phases of `start` that are not in `phases`, and
    the recompute asked for.
    """
    rules = Constraints.of_rule(problem.recompute, problem.num_layers)
    if start is None or {"partition", "placement"} <= phases:
        return rules
    if "placement" in phases:
        return replace(rules, layers_P=start.layers_P)
    return replace(rules, ranks_S=start.rank_S)


def candidates_of(
    start: Beginning, problem: Problem, phases: frozenset[str]
) -> tuple[Candidate, ...]:
    """Returns the start itself first, then other layouts and priorities that `phases` allow."""
    candidates = []
    own = _layout(start.rank_S, start.partition.sizes)
    for layout in (own, *_other_layouts(start, problem, phases)):
        if start.plan is not None and (layout is own or "schedule" not in phases):
            candidates += _as_planned(start, start.plan, problem, layout, "schedule" in phases)
        if "schedule" in phases:
            order, sizes = _order(layout)
            known = published_orders(problem, order)
            for keys in priorities(problem, sizes, known):
                candidates.append(Candidate.of(layout[0], keys, layout[1]))
        elif start.plan is None:
            keys = by_formula(problem, ONE_F_ONE_B, late_weights=False)
            candidates.append(Candidate.of(layout[0], keys, layout[1]))
    return tuple(candidates)


def _other_layouts(start: Beginning, problem: Problem, phases: frozenset[str]) -> Iterator[Layout]:
    """Yields layouts beside the start's own that keep what may not change of it."""
    p, stages = problem, start.partition.num_stages
    if "placement" in phases and "partition" not in phases:
        yield from _in_turns(start.layers_P)
    elif "partition" in phases and "placement" not in phases:
        for sizes in (uniform_partition(p.profile.kinds, stages).sizes, p.balanced_sizes(stages)):
            yield _layout(start.rank_S, sizes)


def _in_turns(layers_P: np.ndarray) -> Iterator[Layout]:
    """Yields loops and waves over the ranks in which every rank gets its number of layers."""
    ranks, none = len(layers_P), np.zeros(int(layers_P.sum()), np.bool_)
    for turns in TURNS:
        if turns > layers_P.max():
            return
        for growth in GROWTHS if turns > 1 else (1.0,):
            shares = np.cumsum([0.0, *(growth**t for t in range(turns))])
            borders = np.rint(np.outer(shares / shares[-1], layers_P)).astype(np.int64)
            pieces = np.diff(borders, axis=0)  # (turns, ranks)
            for wave in (False, True) if turns > 1 else (False,):
                order = [
                    (r if not (wave and t % 2) else ranks - 1 - r, t)
                    for t in range(turns)
                    for r in range(ranks)
                ]
                dealt = [np.full(pieces[t, r], r, np.int64) for r, t in order]
                yield np.concatenate(dealt), none


def _as_planned(
    start: Beginning, plan: Plan, problem: Problem, layout: Layout, late: bool
) -> Iterator[Candidate]:
    """Yields candidates with the priorities and flags of a plan; with `late` also W after every F
    and I that is ready, and every backward split.
    """
    rank_L, cut_L = layout
    sizes = plan.partition.sizes
    whole = {a.stage for _, _, a in plan.schedule.actions() if a.kind is Kind.BACKWARD}
    fused = np.repeat([s in whole for s in range(plan.num_stages)], sizes)
    recompute = _of_stages(np.repeat(plan.recomputes, sizes), layout)
    keys = _times(plan, problem)
    exact = Candidate(rank_L, cut_L, recompute, _of_stages(fused, layout), keys, np.zeros(1))
    yield exact
    if late:
        for weights in (keys[:, 2], np.full_like(keys[:, 2], LATE_S)):
            other = keys.copy()
            other[:, 2] = weights
            yield replace(exact, key_LKM=other, fused_L=np.zeros_like(fused))


def _times(plan: Plan, problem: Problem) -> np.ndarray:
    """Returns (layers, 3, microbatches) keys: when each action runs in the plan, simulated."""
    p, table = problem, Table.of(plan)
    costs = StageCosts.of(p.profile, plan.partition, plan.recompute)
    starts = trace(table, costs, Links.of(p.profile.machine, p.ranks)).start_s
    when = np.full((plan.num_stages, 3, plan.num_microbatches), LATE_S)
    for at, begun in enumerate(starts.tolist()):
        for action in actions_of(table.item(at)):
            if action.kind in COLUMNS:
                when[action.stage, COLUMNS[action.kind], action.microbatch] = begun
    return when[np.repeat(np.arange(plan.num_stages), plan.partition.sizes)]


def _layout(rank_S: np.ndarray, sizes: tuple[int, ...]) -> Layout:
    rank_L = np.repeat(rank_S, sizes)
    begins = np.zeros(len(rank_L), np.bool_)
    begins[np.cumsum(sizes)[:-1]] = True
    begins[1:] &= np.diff(rank_L) == 0
    return rank_L, begins


def _first(layout: Layout) -> np.ndarray:
    """Returns the first layer of every stage."""
    rank_L, cut_L = layout
    return np.flatnonzero(np.concatenate([[True], (np.diff(rank_L) != 0) | cut_L[1:]]))


def _order(layout: Layout) -> tuple[list[int], tuple[int, ...]]:
    """Returns the ranks and the sizes of the stages."""
    first = _first(layout)
    sizes = np.diff(np.append(first, len(layout[0])))
    return layout[0][first].tolist(), tuple(sizes.tolist())


def _of_stages(flag_L: np.ndarray, layout: Layout) -> np.ndarray:
    """Returns flags of layers in which every stage has that of its first layer."""
    first = _first(layout)
    return np.repeat(flag_L[first], _order(layout)[1]).astype(np.bool_)
