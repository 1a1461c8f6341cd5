"""All computations of a table in one order, of which every rank's row is a part."""

from bisect import bisect_left, bisect_right
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Literal

from octojax.ir import LoweredPlan, Machine, Profile, Run, Transfer
from octojax.ir.lowering import Value, makes
from octojax.ir.walk import Mode
from octojax.simulate.costs import StageCosts
from octojax.simulate.oracle import Meaning
from octojax.simulate.simulator import costs_of


def meaning_of(
    plan: LoweredPlan,
    costs: StageCosts | Profile | None,
    machine: Machine | None,
    unknown_s: float = 0.01,
) -> Meaning:
    """Returns what a plan costs. By default every action takes one, a transfer `unknown_s`."""
    if costs is None:
        costs = StageCosts.unit(plan.num_stages)
        machine = machine or Machine(latency_s=unknown_s)
    elif isinstance(costs, Profile):
        machine = machine or costs.machine
    return Meaning(plan, costs_of(plan, costs), machine)


def blocks(costs: StageCosts | Profile | None, machine: Machine | None) -> bool:
    """Returns whether transfers occupy both their ranks, by the machine or the profile's."""
    if machine is None and isinstance(costs, Profile):
        machine = costs.machine
    return machine is not None and machine.blocking


@dataclass(frozen=True)
class OneOrder:
    """The units of a table sorted by their simulated start or end, and their transfers.

    Position i of every tuple is the i-th unit of the order. The order is a linear extension of
    the dependencies: a unit starts after those it needs have ended, and among units of one
    instant (some take no time) the order of a run without clocks decides.
    """

    plan: LoweredPlan
    units: tuple[Run, ...]
    start_s: tuple[float, ...]
    end_s: tuple[float, ...]
    rank_of: tuple[int, ...]
    transfers: tuple[Transfer, ...]
    duration_s: dict[Transfer, float]

    @classmethod
    def of(cls, meaning: Meaning, by: Literal["start", "end"]) -> "OneOrder":
        """Returns the order of a valid plan; its own transfers do not matter."""
        plan = meaning.plan.without_transfers()
        walk = Meaning(plan, meaning.costs, meaning.machine, meaning.seconds).walk(Mode.FREE)
        turn = {cell: n for n, cell in enumerate(walk.order)}
        column = 0 if by == "start" else 1
        cells = sorted(
            (span[column], turn[rank, position], rank, position)
            for rank, row in enumerate(walk.units)
            for position, span in enumerate(row)
        )
        spans = [walk.units[rank][position] for _, _, rank, position in cells]
        units = [plan.ranks[rank][position] for _, _, rank, position in cells]
        return cls(
            plan,
            tuple(x for x in units if isinstance(x, Run)),
            tuple(start for start, _ in spans),
            tuple(end for _, end in spans),
            tuple(rank for _, _, rank, _ in cells),
            tuple(walk.moves),
            {transfer: end - start for transfer, (start, end) in walk.moves.items()},
        )

    @cached_property
    def maker(self) -> dict[Value, int]:
        """The unit that makes each value."""
        return {
            value: index
            for index, run in enumerate(self.units)
            for action in run.actions
            if (value := makes(action)) is not None
        }

    @cached_property
    def _taker(self) -> dict[Transfer, int]:
        bring = self.plan.crossings.bring
        taken: dict[Transfer, int] = {}
        for index, run in enumerate(self.units):
            for action in run.actions:
                if action in bring:
                    taken.setdefault(bring[action], index)
        return taken

    def producer(self, transfer: Transfer) -> int:
        return self.maker[transfer.value]

    def consumer(self, transfer: Transfer) -> int:
        return self._taker[transfer]

    @cached_property
    def cells(self) -> tuple[list[int], ...]:
        """Per rank, its units, ascending."""
        of_rank: tuple[list[int], ...] = tuple([] for _ in self.plan.ranks)
        for index, rank in enumerate(self.rank_of):
            of_rank[rank].append(index)
        return of_rank

    def last_until(self, rank: int, slot: int) -> int | None:
        """Returns a rank's last unit not after `slot`, if it has one."""
        at = bisect_right(self.cells[rank], slot)
        return self.cells[rank][at - 1] if at else None

    def first_after(self, rank: int, slot: int) -> int | None:
        """Returns a rank's first unit after `slot`, if it has one."""
        at = bisect_right(self.cells[rank], slot)
        return self.cells[rank][at] if at < len(self.cells[rank]) else None

    @cached_property
    def _busy(self) -> tuple[tuple[list[float], list[float]], ...]:
        return tuple(
            (
                [self.start_s[i] for i in cells],
                list(accumulate((self.end_s[i] - self.start_s[i] for i in cells), initial=0.0)),
            )
            for cells in self.cells
        )

    def busy_s(self, rank: int, begin_s: float, stop_s: float) -> float:
        """Returns how long a rank computes between two times."""
        return self._busy_until(rank, stop_s) - self._busy_until(rank, begin_s)

    def _busy_until(self, rank: int, time_s: float) -> float:
        starts, summed = self._busy[rank]
        at = bisect_left(starts, time_s)
        if not at:
            return 0.0
        return min(summed[at], summed[at - 1] + time_s - starts[at - 1])
