"""Tables with their transfers spelled out, simulated as they stand.

    blocking   a SEND and its RECV start when both ranks have reached them and occupy both
               until the value is over: latency + bytes / bandwidth
    posted     a SEND and a RECV are posted when the rank reaches them and take it no time; the
               value leaves when both are posted and the link is free of what the sender
               posted for it before

Either way a consumer waits for its value, and the host cost of a transfer lengthens the action
that makes and the action that takes the value, as it does without transfers spelled out.
"""

from collections import defaultdict

from octojax.errors import ScheduleError
from octojax.ir import Action, Item, Kind, Schedule
from octojax.ir.lowering import Transfer, actions_of, counterpart, transfers_of
from octojax.ir.progress import Value, makes, reads
from octojax.ir.verify import deliverable, matched
from octojax.simulate.oracle import Meaning, Run

_SENDS = (Kind.SEND_FORWARD, Kind.SEND_BACKWARD)


class _Clocks:
    """Where each rank is in its row, and when each value is where."""

    def __init__(self, lowered: Schedule, meaning: Meaning) -> None:
        self.rows = lowered.ranks
        self.meaning = meaning
        self.transfer_of: dict[Action, Transfer] = {}
        for transfer in transfers_of(meaning.schedule):
            self.transfer_of[transfer.send] = self.transfer_of[transfer.receive] = transfer
        self.head = [0] * len(self.rows)
        self.cell = [0] * len(self.rows)  # position among the computing cells
        self.free = [0.0] * len(self.rows)
        self.at: dict[tuple[int, Value], float] = {}
        self.run = Run()

    def item(self, rank: int) -> Item | None:
        row = self.rows[rank]
        return row[self.head[rank]] if self.head[rank] < len(row) else None

    def compute(self, rank: int, item: Item) -> bool:
        """Runs the computing item at a rank's head; False while an input is not there."""
        if isinstance(item, Action) and not item.kind.computes:  # UNSHARD and the like
            self.head[rank] += 1
            return True
        start = self.free[rank]
        for action in actions_of(item):
            for value in reads(action, self.meaning.last_stage):
                if (rank, value) not in self.at:
                    return False
                start = max(start, self.at[rank, value])
        end = start + self.meaning.duration_s(rank, item)
        self.run.start[rank, self.cell[rank]], self.run.end[rank, self.cell[rank]] = start, end
        self.free[rank] = end
        self.cell[rank] += 1
        self.head[rank] += 1
        for action in actions_of(item):
            made = makes(action)
            if made is not None:
                self.at[rank, made] = end
        return True

    def arrive(self, transfer: Transfer, start: float) -> tuple[float, float]:
        """Moves a value and returns when it leaves its link, and when it is there."""
        latency, occupied = self.meaning.wire_s(transfer)
        end = start + (latency + occupied)
        self.run.moves[transfer] = (start, end)
        self.at[transfer.target, _value(transfer)] = end
        return start + occupied, end


def _value(transfer: Transfer) -> Value:
    return (transfer.kind, transfer.stage, transfer.microbatch)


def run_blocking(lowered: Schedule, meaning: Meaning) -> Run:
    """Returns the times of a lowered table under blocking rendezvous.

    Raises `ScheduleError` naming the stuck operations if it deadlocks.
    """
    deliverable(lowered)
    clocks = _Clocks(lowered, meaning)
    waiting = list(range(lowered.num_ranks))
    while waiting:
        rank = waiting.pop()
        while (item := clocks.item(rank)) is not None:
            if not (isinstance(item, Action) and item.kind.transfers):
                if clocks.compute(rank, item):
                    continue
                break
            transfer = clocks.transfer_of[item]
            other = transfer.target if rank == transfer.source else transfer.source
            if clocks.item(other) != counterpart(item):
                break
            made = clocks.at[transfer.source, _value(transfer)]
            _, end = clocks.arrive(transfer, max(clocks.free[rank], clocks.free[other], made))
            for side in (rank, other):
                clocks.free[side] = end
                clocks.head[side] += 1
            waiting.append(other)
    return clocks.run


def run_posted(lowered: Schedule, meaning: Meaning) -> Run:
    """Returns the times of a lowered table whose transfers run beside computation.

    Raises `ScheduleError` if it lacks transfers or waits for ever even so.
    """
    matched(lowered)
    clocks = _Clocks(lowered, meaning)
    posted: dict[Action, float] = {}
    queues: dict[tuple[int, int], list[Transfer]] = defaultdict(list)
    link_free: dict[tuple[int, int], float] = defaultdict(float)
    waiting = list(range(lowered.num_ranks))
    while waiting:
        rank = waiting.pop()
        while (item := clocks.item(rank)) is not None:
            if not (isinstance(item, Action) and item.kind.transfers):
                if clocks.compute(rank, item):
                    continue
                break
            transfer = clocks.transfer_of[item]
            link = (transfer.source, transfer.target)
            if item.kind in _SENDS:
                if (rank, _value(transfer)) not in clocks.at:
                    break
                queues[link].append(transfer)
            posted[item] = clocks.free[rank]
            clocks.head[rank] += 1
            while queues[link] and queues[link][0].receive in posted:
                first = queues[link].pop(0)
                start = max(posted[first.send], posted[first.receive], link_free[link])
                link_free[link], _ = clocks.arrive(first, start)
                waiting.append(first.target)
    stuck = [str(x) for r in range(lowered.num_ranks) if (x := clocks.item(r)) is not None]
    if stuck:
        raise ScheduleError(
            f"the lowered table deadlocks even with asynchronous transfers, stuck at "
            f"{' '.join(stuck)}. `octopipe check` shows what each rank waits for"
        )
    return clocks.run
