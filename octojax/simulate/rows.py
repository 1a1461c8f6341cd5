"""Tables with their transfers spelled out, simulated as they stand, in plain Python.

    blocking   a SEND and its RECV start when both ranks have reached them and occupy both
               until the value is over: latency + bytes / bandwidth
    async      a SEND and a RECV are posted when the rank reaches them and take it no time; the
               value leaves when both are posted, it is made, and the link is free of what the
               sender posted for it before

Either way a consumer waits for its value, and the host cost of a transfer lengthens the action
that makes and the action that takes the value, as it does without transfers spelled out.
"""

from collections import defaultdict
from dataclasses import dataclass

import numpy as np

from octojax.errors import ScheduleError
from octojax.ir import (
    Action,
    Item,
    Kind,
    Machine,
    Plan,
    Schedule,
    Timeline,
)
from octojax.ir.lowering import (
    actions_of,
    counterpart,
    lower_naively,
    owners,
    received,
    sent,
    without_transfers,
)
from octojax.ir.progress import Value, carried, makes, reads
from octojax.ir.verify import deliverable, verify
from octojax.simulate.costs import KINDS, StageCosts
from octojax.simulate.evaluate import Trace
from octojax.simulate.table import Table
from octojax.simulate.timelines import Free, timeline_of

_SENDS = (Kind.SEND_FORWARD, Kind.SEND_BACKWARD)


@dataclass(frozen=True)
class Lowered:
    """A lowered table with what its simulation looks up again and again."""

    rows: Schedule
    costs: StageCosts
    machine: Machine

    @classmethod
    def of(cls, schedule: Schedule | Plan, costs: StageCosts, machine: Machine | None) -> "Lowered":
        """Returns the table, lowered naively (receive just before use, send just after) if it
        has no transfers. Raises `ScheduleError` if it is wrong.
        """
        rows = schedule.schedule if isinstance(schedule, Plan) else schedule
        plain = without_transfers(rows)
        verify(plain, num_stages=costs.num_stages)
        return cls(rows if rows.has_transfers else lower_naively(rows), costs, machine or Machine())

    def durations(self) -> dict[tuple[int, int], float]:
        """Returns how long each computing cell (rank, position) keeps its rank busy."""
        owner = owners(self.rows)
        explicit = {a for _, _, a in self.rows.actions() if a.kind is Kind.RECOMPUTE}
        found = {}
        for rank, row in enumerate(self.rows.ranks):
            for position, item in enumerate(row):
                actions = [a for a in actions_of(item) if a.kind.computes]
                ends = [f(a, rank, owner) for a in actions for f in (received, sent)]
                host = sum(t is not None for t in ends) * self.machine.host_cost_s
                compute = sum(self._seconds(a, explicit) for a in actions)
                found[rank, position] = compute / self.machine.speed(rank) + host
        return found

    def _seconds(self, action: Action, explicit: set[Action]) -> float:
        seconds = float(self.costs.seconds[action.stage, KINDS.index(action.kind)])
        again = Action(action.stage, Kind.RECOMPUTE, action.microbatch)
        backward = action.kind in (Kind.BACKWARD, Kind.INPUT_GRAD)
        if backward and self.costs.recompute[action.stage] and again not in explicit:
            seconds += float(self.costs.forward_s[action.stage])
        return seconds

    def wire(self, transfer: Action, source: int, target: int) -> tuple[float, float, float]:
        """Returns latency, seconds on the link and bytes of a SEND."""
        forward = transfer.kind is Kind.SEND_FORWARD
        column = self.costs.output_bytes if forward else self.costs.input_bytes
        size = float(column[transfer.stage])
        latency, bandwidth = self.machine.link(source, target)
        return latency, size / bandwidth, size


class _Clocks:
    """The state of one simulation: where each rank is, and when each value is where."""

    def __init__(self, lowered: Lowered) -> None:
        self.rows = lowered.rows.ranks
        self.head = [0] * len(self.rows)
        self.free = [0.0] * len(self.rows)
        self.at: dict[tuple[int, Value], float] = {}
        self.start: dict[tuple[int, int], float] = {}
        self.end: dict[tuple[int, int], float] = {}
        self.moves: dict[Action, tuple[int, int, float, float]] = {}  # by SEND

    def item(self, rank: int) -> Item | None:
        row = self.rows[rank]
        return row[self.head[rank]] if self.head[rank] < len(row) else None

    def ready(self, rank: int, item: Item, last_stage: int) -> float | None:
        """Returns when a rank can start a computing item; None while an input is not there."""
        times = [self.free[rank]]
        for action in actions_of(item):
            for value in reads(action, last_stage):
                if (rank, value) not in self.at:
                    return None
                times.append(self.at[rank, value])
        return max(times)

    def compute(self, rank: int, item: Item, start: float, duration: float) -> None:
        position = self.head[rank]
        self.start[rank, position], self.end[rank, position] = start, start + duration
        self.free[rank] = start + duration
        self.head[rank] += 1
        for action in actions_of(item):
            value = makes(action)
            if value is not None:
                self.at[rank, value] = start + duration


def run_blocking(lowered: Lowered) -> _Clocks:
    """Returns the times of a table under blocking rendezvous.

    Raises `ScheduleError` naming the stuck operations if it deadlocks.
    """
    deliverable(lowered.rows)
    clocks, durations = _Clocks(lowered), lowered.durations()
    rank_of = {a: r for r, _, a in lowered.rows.actions()}
    last_stage = lowered.costs.num_stages - 1
    waiting = list(range(len(clocks.rows)))
    while waiting:
        rank = waiting.pop()
        while (item := clocks.item(rank)) is not None:
            if isinstance(item, Action) and item.kind.transfers:
                other = rank_of[counterpart(item)]
                if clocks.item(other) != counterpart(item):
                    break
                send = item if item.kind in _SENDS else counterpart(item)
                source, target = (rank, other) if send is item else (other, rank)
                value = carried(send)
                start = max(clocks.free[rank], clocks.free[other], clocks.at[source, value])
                latency, on_link, _ = lowered.wire(send, source, target)
                end = start + (latency + on_link)
                clocks.moves[send] = (source, target, start, end)
                clocks.at[target, value] = end
                clocks.free[rank] = clocks.free[other] = end
                clocks.head[rank] += 1
                clocks.head[other] += 1
                waiting.append(other)
                continue
            start = clocks.ready(rank, item, last_stage)
            if start is None:
                break
            clocks.compute(rank, item, start, durations[rank, clocks.head[rank]])
    return clocks


def run_posted(lowered: Lowered) -> _Clocks:
    """Returns the times of a lowered table whose transfers are posted and run beside compute."""
    clocks, durations = _Clocks(lowered), lowered.durations()
    last_stage = lowered.costs.num_stages - 1
    rank_of = {a: r for r, _, a in lowered.rows.actions()}
    posted: dict[Action, float] = {}
    queues: dict[tuple[int, int], list[Action]] = defaultdict(list)  # sends, in posted order
    sent_from: dict[tuple[int, int], int] = defaultdict(int)
    link_free: dict[tuple[int, int], float] = defaultdict(float)
    waiting = list(range(len(clocks.rows)))

    def leave(link: tuple[int, int]) -> None:
        queue = queues[link]
        while sent_from[link] < len(queue):
            send = queue[sent_from[link]]
            if counterpart(send) not in posted:
                return
            source, target = link
            latency, on_link, _ = lowered.wire(send, source, target)
            start = max(posted[send], posted[counterpart(send)], link_free[link])
            link_free[link] = start + on_link
            clocks.moves[send] = (source, target, start, start + (latency + on_link))
            clocks.at[target, carried(send)] = start + (latency + on_link)
            sent_from[link] += 1
            waiting.append(target)

    while waiting:
        rank = waiting.pop()
        while (item := clocks.item(rank)) is not None:
            if isinstance(item, Action) and item.kind.transfers:
                send = item if item.kind in _SENDS else counterpart(item)
                link = (rank_of[send], rank_of[counterpart(send)])
                if item is send:
                    if (rank, carried(send)) not in clocks.at:
                        break
                    queues[link].append(send)
                posted[item] = clocks.free[rank]
                clocks.head[rank] += 1
                leave(link)
                continue
            start = clocks.ready(rank, item, last_stage)
            if start is None:
                break
            clocks.compute(rank, item, start, durations[rank, clocks.head[rank]])
    stuck = [str(item) for r in range(len(clocks.rows)) if (item := clocks.item(r)) is not None]
    if stuck:
        raise ScheduleError(
            f"the lowered table deadlocks even with asynchronous transfers, stuck at "
            f"{' '.join(stuck)}. Run `octopipe check` on it to see what each rank waits for"
        )
    return clocks


def simulate_rows(
    schedule: Schedule | Plan,
    costs: StageCosts,
    machine: Machine | None,
    blocking: bool,
    free: Free,
) -> Timeline:
    """Returns the timeline of a lowered table, or of a plain one under blocking transfers."""
    lowered = Lowered.of(schedule, costs, machine)
    clocks = run_blocking(lowered) if blocking else run_posted(lowered)
    rows = without_transfers(lowered.rows)
    table = Table.of(rows, schedule.placement)
    return timeline_of(table, costs, _trace(lowered, rows, clocks), rows, free)


def _trace(lowered: Lowered, rows: Schedule, clocks: _Clocks) -> Trace:
    """Returns the times of the computing cells alone, in the order of `rows`."""
    keys = [
        (rank, position)
        for rank, row in enumerate(lowered.rows.ranks)
        for position, item in enumerate(row)
        if not isinstance(item, Action) or item.kind.computes
    ]
    maker: dict[Value, int] = {}
    reader: dict[tuple[int, Value], int] = {}
    cells = [(rank, item) for rank, row in enumerate(rows.ranks) for item in row]
    for index, (rank, item) in enumerate(cells):
        for action in actions_of(item):
            value = makes(action)
            if value is not None:
                maker[value] = index
            for need in reads(action, lowered.costs.num_stages - 1):
                reader.setdefault((rank, need), index)
    sent_s = np.full((len(keys), 2), np.nan)
    arrived_s = np.full((len(keys), 2), np.nan)
    target = np.full((len(keys), 2), -1, np.int32)
    for send, (_, to, start, end) in clocks.moves.items():
        i, slot = maker[carried(send)], 0 if send.kind is Kind.SEND_FORWARD else 1
        sent_s[i, slot], arrived_s[i, slot] = start, end
        target[i, slot] = reader[to, carried(send)]
    return Trace(
        np.array([clocks.start[key] for key in keys]),
        np.array([clocks.end[key] for key in keys]),
        sent_s,
        arrived_s,
        target,
        np.array([rank for rank, _ in keys], dtype=np.int32),
        len(keys),
    )
