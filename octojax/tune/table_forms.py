"""Forms of a published table: its backwards split, and W run where its rank would wait."""

import itertools
import math
from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from octojax.ir.action import Action, Item, Kind, Overlap
from octojax.ir.plan import Plan
from octojax.ir.schedule import Schedule
from octojax.simulate.costs import BACKWARD, INPUT_GRAD, WEIGHT_GRAD
from octojax.simulate.table import Table
from octojax.tune.problem import Problem


def split(table: Schedule) -> Schedule:
    """Returns the table with every B as I and W right after it; overlapped pairs taken apart."""
    return Schedule(tuple(tuple(_split_row(row)) for row in table.ranks))


def _split_row(row: tuple[Item, ...]) -> Iterator[Action]:
    for item in row:
        for action in item.actions if isinstance(item, Overlap) else (item,):
            if action.kind is Kind.BACKWARD:
                yield replace(action, kind=Kind.INPUT_GRAD)
                yield replace(action, kind=Kind.WEIGHT_GRAD)
            else:
                yield action


def split_table(table: Table) -> Table:
    """Returns what `split` does, of arrays: the items of every rank in the same order."""
    items = table.items
    pair = items[:, 3] >= 0
    count = 1 + (items[:, 0] == BACKWARD) + 2 * pair  # a pair is F, I and W
    source = np.repeat(np.arange(len(items)), count)
    nth = np.arange(len(source)) - np.repeat(np.cumsum(count) - count, count)
    rows, of_pair = items[source].copy(), pair[source]
    behind = of_pair & (nth > 0)  # I and W of a pair's backward
    rows[behind, 1:3] = rows[behind, 3:5]
    halves = behind | (items[source, 0] == BACKWARD)
    rows[halves, 0] = np.where((nth - of_pair)[halves] == 0, INPUT_GRAD, WEIGHT_GRAD)
    rows[:, 3:5] = -1
    ends = np.concatenate([[0], np.cumsum(count)])
    return replace(table, items=rows, rank_start=ends[table.rank_start].astype(np.int32))


def fill(plan: Plan, problem: Problem) -> Plan:
    """Returns a split plan with its F and I in order, and W run where its rank would wait.

    A W runs when the next F or I is not there yet, or at the end. Memory is not looked at.
    """
    p = problem
    bounds = plan.partition.bounds
    sums = {
        kind: [float(costs[a:b].sum()) for a, b in itertools.pairwise(bounds)]
        for kind, costs in (
            (Kind.FORWARD, p.forward_s),
            (Kind.INPUT_GRAD, p.input_grad_s),
            (Kind.WEIGHT_GRAD, p.weight_grad_s),
        )
    }
    for stage, again in enumerate(plan.recompute):
        sums[Kind.INPUT_GRAD][stage] += again * sums[Kind.FORWARD][stage]
    rows: list[list[Action]] = [[] for _ in range(p.ranks)]
    for rank, _, action in plan.schedule.actions():
        if action.kind is not Kind.WEIGHT_GRAD:
            rows[rank].append(action)
    home = {a: r for r, row in enumerate(rows) for a in row}
    ready: dict[Action, float] = {}
    clock, at = [0.0] * p.ranks, [0] * p.ranks
    waiting: list[list[Action]] = [[] for _ in range(p.ranks)]
    table: list[list[Action]] = [[] for _ in range(p.ranks)]
    link: dict[tuple[int, int], float] = {}
    last = plan.num_stages - 1

    def comes(action: Action) -> float:
        if action.kind is Kind.FORWARD and action.stage == 0:
            return 0.0
        return ready.get(action, math.inf)

    left = sum(map(len, rows)) + sum(a.kind is Kind.INPUT_GRAD for row in rows for a in row)
    for _ in range(left):
        choice = (math.inf, 0, False)
        for r in range(p.ranks):
            nexts = comes(rows[r][at[r]]) if at[r] < len(rows[r]) else math.inf
            start = max(nexts, clock[r])
            if waiting[r] and clock[r] < start:
                choice = min(choice, (clock[r], r, True))
            else:
                choice = min(choice, (start, r, False))
        start, r, is_w = choice
        if start == math.inf:
            return plan
        if is_w:
            action = waiting[r].pop(0)
        else:
            action = rows[r][at[r]]
            at[r] += 1
        host = p.host_cost_s * _transfers(action, r, home, last)
        end = start + sums[action.kind][action.stage] / p.speeds[r] + host
        clock[r] = end
        table[r].append(action)
        if is_w:
            continue
        if action.kind is Kind.INPUT_GRAD:
            waiting[r].append(replace(action, kind=Kind.WEIGHT_GRAD))
        _deliver(action, r, end, home, last, ready, link, bounds, problem)
    return plan.with_schedule(Schedule(tuple(map(tuple, table))))


def _next(action: Action, last: int) -> Action | None:
    """Returns the action that waits for what this one makes."""
    if action.kind is Kind.FORWARD:
        if action.stage == last:
            return replace(action, kind=Kind.INPUT_GRAD)
        return replace(action, stage=action.stage + 1)
    return replace(action, stage=action.stage - 1) if action.stage > 0 else None


def _transfers(action: Action, rank: int, home: dict[Action, int], last: int) -> int:
    if action.kind is Kind.WEIGHT_GRAD:
        return 0
    stages = [s for s in (action.stage - 1, action.stage + 1) if 0 <= s <= last]
    return sum(home[replace(action, stage=s)] != rank for s in stages)


def _deliver(action, rank, end, home, last, ready, link, bounds, problem) -> None:
    """Notes when the value that `action` made is where it is used."""
    after = _next(action, last)
    if after is None:
        return
    to = home[after]
    if to == rank:
        ready[after] = end
        return
    border = bounds[action.stage + 1] if action.kind is Kind.FORWARD else bounds[action.stage]
    size = problem.output_bytes[border - 1]
    leaves = max(end, link.get((rank, to), 0.0)) + size * problem.s_per_byte[rank, to]
    link[rank, to] = leaves
    ready[after] = leaves + problem.latency_s[rank, to]
