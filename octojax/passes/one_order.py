"""All computations of a table in one order, of which every rank's row is a part."""

from bisect import bisect_left, bisect_right
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

from octojax.ir import Item, Machine, Plan, Profile, Schedule
from octojax.ir.lowering import Transfer, actions_of, without_transfers
from octojax.ir.progress import Progress, Value, makes
from octojax.simulate.costs import StageCosts
from octojax.simulate.simulator import costs_of, simulate


@dataclass(frozen=True)
class OneOrder:
    """The cells of a table sorted by their simulated start, and their transfers.

    Position i of every tuple is the i-th cell of the order. The order is a linear extension of
    the dependencies: a cell starts after those it needs have ended, and among cells that start
    at one instant (some take no time) the order of a run without clocks decides.
    """

    schedule: Schedule
    items: tuple[Item, ...]
    start_s: tuple[float, ...]
    end_s: tuple[float, ...]
    rank_of: tuple[int, ...]
    transfers: tuple[Transfer, ...]
    duration_s: dict[Transfer, float]

    @classmethod
    def of(
        cls,
        plan: Plan | Schedule,
        costs: StageCosts | Profile | None = None,
        machine: Machine | None = None,
    ) -> "OneOrder":
        """Returns the order of a plan or schedule; its own transfers, if any, are dropped.

        Without costs every action costs one and a transfer a hundredth. Raises what
        `simulate` raises.
        """
        rows = without_transfers(plan.schedule if isinstance(plan, Plan) else plan)
        if costs is None:
            costs = StageCosts.unit(plan.num_stages)
            machine = machine or Machine(latency_s=0.01)
        elif isinstance(costs, Profile):
            machine = machine or costs.machine
            costs = costs_of(plan, costs)
        bare = plan.with_schedule(rows) if isinstance(plan, Plan) else rows
        timeline = simulate(bare, costs, machine)
        turn = {cell: n for n, cell in enumerate(Progress(rows, rendezvous=False).order)}
        cells = [(r, p) for r, row in enumerate(rows.ranks) for p in range(len(row))]
        spans = [
            span
            for _, _, span in sorted(
                (span.start_s, turn[cell], span)
                for cell, span in zip(cells, timeline.actions, strict=True)
            )
        ]
        moves = {
            Transfer(t.source, t.target, t.stage, t.kind, t.microbatch): t.end_s - t.start_s
            for t in timeline.transfers
        }
        return cls(
            rows,
            tuple(span.item for span in spans),
            tuple(span.start_s for span in spans),
            tuple(span.end_s for span in spans),
            tuple(span.rank for span in spans),
            tuple(moves),
            moves,
        )

    @cached_property
    def maker(self) -> dict[Value, int]:
        """The cell that makes each value."""
        return {
            value: index
            for index, item in enumerate(self.items)
            for action in actions_of(item)
            if (value := makes(action)) is not None
        }

    def producer(self, transfer: Transfer) -> int:
        return self.maker[transfer.kind, transfer.stage, transfer.microbatch]

    def consumer(self, transfer: Transfer) -> int:
        stage = transfer.stage + (1 if transfer.kind == "F" else -1)
        return self.maker[transfer.kind, stage, transfer.microbatch]

    @cached_property
    def cells(self) -> tuple[list[int], ...]:
        """Per rank, its cells, ascending."""
        found: tuple[list[int], ...] = tuple([] for _ in self.schedule.ranks)
        for index, rank in enumerate(self.rank_of):
            found[rank].append(index)
        return found

    def last_until(self, rank: int, slot: int) -> int | None:
        """Returns a rank's last cell not after `slot`, if it has one."""
        at = bisect_right(self.cells[rank], slot)
        return self.cells[rank][at - 1] if at else None

    def first_after(self, rank: int, slot: int) -> int | None:
        """Returns a rank's first cell after `slot`, if it has one."""
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
