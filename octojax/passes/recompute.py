"""Trade computation for memory, and hide it in bubbles.

In the manner of Mario (PPoPP'25): checkpoint, place the recomputation where the rank waits for
a gradient anyway, drop what gains nothing, and let forwards use the memory that became free.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from importlib import import_module
from itertools import zip_longest
from types import ModuleType
from typing import ClassVar

import numpy as np

from octojax.errors import PlanError, ScheduleError
from octojax.ir import Action, Item, Kind, Machine, Plan, Profile, Schedule
from octojax.ir.lowering import actions_of
from octojax.simulate.costs import StageCosts
from octojax.simulate.links import Links
from octojax.simulate.simulator import costs_of
from octojax.simulate.table import Table

_BACKWARD = (Kind.BACKWARD, Kind.INPUT_GRAD)
_ROUNDS = 8  # sweeps over the bubbles; each ends at once where nothing is gained
_KEPT = 8.0  # without costs, a stage keeps so many times its input

Rows = tuple[tuple[Item, ...], ...]


@dataclass(frozen=True)
class Recompute:
    """Recompute the forward of `stages` (None: of all) ahead of their backward.

        before   0F0 0F1 0F2 0B0 0F3 0B1
        insert   0F0 0F1 0F2 0R0 0B0 0F3 0R1 0B1
        overlap  0F0 0F1 0F2 0R0 0R1 0B0 0F3 0B1       R1 in the bubble before B0
        prepose  0F0 0F1 0F2 0R0 0F3 0R1 0B0 0B1       F3 too, if memory allows

    A stage whose every forward is followed at once by its backward keeps nothing in between:
    recomputing it gains nothing, so it is left out (`drop_redundant`). Moves are kept only if
    they shorten the step by `costs` and `machine` and no rank's peak rises above what it was
    before the pass. Takes a valid plan without transfers; promises a valid one. By default
    every action costs one, and a stage keeps eight times its input.
    """

    name: ClassVar[str] = "recompute"
    stages: tuple[int, ...] | None = None
    costs: StageCosts | Profile | None = None
    machine: Machine | None = None
    drop_redundant: bool = True
    overlap: bool = True
    prepose: bool = True

    def __call__(self, plan: Plan) -> Plan:
        flags = self._flags(plan)
        if plan.schedule.has_transfers:
            raise ScheduleError(
                "recompute needs a table without SEND and RECV, since it moves actions: place "
                "transfers afterwards (recompute,transfers,reorder)"
            )
        costs = costs_of(plan, self.costs) if self.costs is not None else _default(plan)
        machine = self.machine
        if machine is None and isinstance(self.costs, Profile):
            machine = self.costs.machine
        links = Links.of(machine, plan.num_ranks)
        limit = _compiled().evaluate(Table.of(plan), costs, links).peak_bytes
        rows = tuple(tuple(_inserted(row, flags)) for row in plan.schedule.ranks)
        judge = _Judge(plan, replace(costs, recompute=np.array(flags)), links, limit)
        moves = (_earlier_recompute,) * self.overlap + (_earlier_forward,) * self.prepose
        rows = _improved(rows, judge, moves)
        return replace(
            plan,
            schedule=Schedule(rows),
            recompute=flags if any(flags) else (),
            prediction=None,
        )

    def _flags(self, plan: Plan) -> tuple[bool, ...]:
        stages = range(plan.num_stages) if self.stages is None else self.stages
        outside = [s for s in stages if not 0 <= s < plan.num_stages]
        if outside:
            raise PlanError(
                f"stages {outside} cannot be recomputed: the plan has stages 0 to "
                f"{plan.num_stages - 1}"
            )
        chosen = set(stages)
        if self.drop_redundant:
            chosen -= _redundant(plan.schedule)
        return tuple(s in chosen or before for s, before in enumerate(plan.recomputes))


def _compiled() -> ModuleType:
    """The compiled simulator, which takes a moment to load."""
    return import_module("octojax.simulate.evaluation")


def _default(plan: Plan) -> StageCosts:
    costs = StageCosts.unit(plan.num_stages)
    nbytes = np.tile([_KEPT, 0.0, 1.0, 1.0, 0.0], (plan.num_stages, 1))
    return replace(costs, nbytes=nbytes, recompute=np.array(plan.recomputes))


def _redundant(schedule: Schedule) -> set[int]:
    """Returns the stages whose every forward is followed at once by its own backward."""
    redundant: dict[int, bool] = {}
    for items in schedule.ranks:
        for item, after in zip_longest(items, items[1:]):
            for action in actions_of(item):
                if action.kind is Kind.FORWARD:
                    own = [Action(action.stage, kind, action.microbatch) for kind in _BACKWARD]
                    at_once = isinstance(item, Action) and after in own
                    redundant[action.stage] = redundant.get(action.stage, True) and at_once
    return {stage for stage, at_once in redundant.items() if at_once}


def _inserted(items: tuple[Item, ...], flags: tuple[bool, ...]) -> Iterator[Item]:
    for item in items:
        for action in actions_of(item):
            again = Action(action.stage, Kind.RECOMPUTE, action.microbatch)
            if action.kind in _BACKWARD and flags[action.stage] and again not in items:
                yield again
        yield item


@dataclass(frozen=True)
class _Judge:
    """What makes one table better than another."""

    plan: Plan
    costs: StageCosts
    links: Links
    limit: np.ndarray

    def table(self, rows: Rows) -> Table:
        return Table.of(Schedule(rows), self.plan.placement)

    def value(self, rows: Rows) -> tuple[float, float]:
        """Returns `(makespan_s, sum of all ends)`, the less the better; infinity for a table
        that deadlocks or needs more memory. The sum tells which of two equally long steps
        leaves more room for further moves.
        """
        table = self.table(rows)
        result = _compiled().evaluate(table, self.costs, self.links)
        if result.done < len(table.items) or bool((result.peak_bytes > self.limit).any()):
            return np.inf, np.inf
        return result.makespan_s, float(
            _compiled().trace(table, self.costs, self.links).end_s.sum()
        )

    def bubbles(self, rows: Rows) -> list[tuple[int, int]]:
        """Returns the cells (rank, position) that wait, in the order of time."""
        times = _compiled().trace(self.table(rows), self.costs, self.links)
        gaps, index = [], 0
        for rank, row in enumerate(rows):
            end = 0.0
            for position in range(len(row)):
                start = float(times.start_s[index])
                if start > end:
                    gaps.append((start, rank, position))
                end = float(times.end_s[index])
                index += 1
        return [(rank, position) for _, rank, position in sorted(gaps)]


Move = Callable[[tuple[Item, ...], int], tuple[Item, ...] | None]


def _improved(rows: Rows, judge: _Judge, moves: tuple[Move, ...]) -> Rows:
    """Returns the rows after moves into bubbles, if those shorten the step; else as they are.

    A move that only ends something sooner is tried too, for what it makes possible, but a
    step of equal length is not worth the memory that moves take.
    """
    first = best = judge.value(rows)
    current = rows
    for _ in range(_ROUNDS):
        before = best
        for rank, position in judge.bubbles(current):
            for move in moves:
                moved = move(current[rank], position)
                if moved is None:
                    continue
                changed = (*current[:rank], moved, *current[rank + 1 :])
                value = judge.value(changed)
                if value < best:
                    current, best = changed, value
        if not best < before:
            break
    return current if best[0] < first[0] else rows


def _earlier_recompute(row: tuple[Item, ...], gap: int) -> tuple[Item, ...] | None:
    """Returns the row with the next R whose forward is done by then moved into the gap."""
    done = {a for item in row[:gap] for a in actions_of(item)}
    for at in range(gap + 1, len(row)):
        item = row[at]
        if isinstance(item, Action) and item.kind is Kind.RECOMPUTE:
            if Action(item.stage, Kind.FORWARD, item.microbatch) in done:
                return _moved(row, at, gap)
            return None
    return None


def _earlier_forward(row: tuple[Item, ...], gap: int) -> tuple[Item, ...] | None:
    """Returns the row with the next forward moved into the gap, if a backward waits there."""
    if not any(a.kind in _BACKWARD for a in actions_of(row[gap])):
        return None
    for at in range(gap + 1, len(row)):
        item = row[at]
        if isinstance(item, Action) and item.kind is Kind.FORWARD:
            return _moved(row, at, gap)
    return None


def _moved(row: tuple[Item, ...], source: int, target: int) -> tuple[Item, ...]:
    return (*row[:target], row[source], *row[target:source], *row[source + 1 :])
