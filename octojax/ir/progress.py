"""How far a table gets: it is run without clocks, to find which rank waits for what.

No times are needed to be exact: in whatever order ready ranks are taken, the same items run in
the end, because an item that can run stays able to run. Linear in the length of the table.
"""

from collections import deque
from dataclasses import dataclass

from octojax.ir.action import Action, Item, Kind
from octojax.ir.lowering import actions_of, counterpart
from octojax.ir.schedule import Schedule

Value = tuple[str, int, int]
"""`("F", stage, microbatch)`: the stage's output. `("B", ...)`: the gradient of its input."""


@dataclass(frozen=True, slots=True)
class Stuck:
    """A rank that cannot go on at `position`: what it `needs` has not happened.

    `needs` is a computation, or the other side of a transfer.
    """

    rank: int
    position: int
    item: Item
    needs: Action


def makes(action: Action) -> Value | None:
    """Returns the value that an action leaves behind for others, if any."""
    if action.kind is Kind.FORWARD:
        return ("F", action.stage, action.microbatch)
    if action.kind in (Kind.BACKWARD, Kind.INPUT_GRAD):
        return ("B", action.stage, action.microbatch)
    return None


def reads(action: Action, last_stage: int) -> tuple[Value, ...]:
    """Returns the values that must be on the action's rank before it can run."""
    stage, microbatch = action.stage, action.microbatch
    if action.kind is Kind.FORWARD:
        return (("F", stage - 1, microbatch),) if stage > 0 else ()
    if action.kind in (Kind.BACKWARD, Kind.INPUT_GRAD):
        own: tuple[Value, ...] = (("F", stage, microbatch),)
        return (*own, ("B", stage + 1, microbatch)) if stage < last_stage else own
    if action.kind is Kind.WEIGHT_GRAD:
        return (("B", stage, microbatch),)
    if action.kind is Kind.RECOMPUTE:
        return (("F", stage, microbatch),)
    return ()


def carried(transfer: Action) -> Value:
    """Returns the value that a SEND takes away, or that a RECV brings."""
    if transfer.kind in (Kind.SEND_FORWARD, Kind.SEND_BACKWARD):
        return (transfer.kind.value[-1], transfer.stage, transfer.microbatch)
    return carried(counterpart(transfer))


class Progress:
    """One run of a table. `stuck()` is empty if every rank finished its row.

    `order` holds the cells `(rank, position)` in the order in which they ran: a linear
    extension of the dependencies and of every row.
    """

    def __init__(self, schedule: Schedule, rendezvous: bool) -> None:
        self.schedule = schedule
        self.rendezvous = rendezvous
        self.last_stage = schedule.num_stages - 1
        self.maker: dict[Value, Action] = {}
        self.readers: dict[Value, set[int]] = {}
        self.rank_of: dict[Action, int] = {}
        for rank, _, action in schedule.actions():
            self.rank_of[action] = rank
            value = makes(action)
            if value is not None:
                self.maker[value] = action
            for need in reads(action, self.last_stage):
                self.readers.setdefault(need, set()).add(rank)
        self.have: list[set[Value]] = [set() for _ in schedule.ranks]
        self.head = [0] * schedule.num_ranks
        self.order: list[tuple[int, int]] = []
        self._run()

    def _run(self) -> None:
        ready = deque(range(self.schedule.num_ranks))
        while ready:
            rank = ready.popleft()
            row = self.schedule.ranks[rank]
            while self.head[rank] < len(row) and self.lacks(rank) is None:
                item = row[self.head[rank]]
                self.order.append((rank, self.head[rank]))
                self.head[rank] += 1
                ready.extend(self._happen(rank, item))

    def _happen(self, rank: int, item: Item) -> set[int]:
        """Runs the item and returns the ranks that may now go on."""
        if isinstance(item, Action) and item.kind.transfers:
            if not self.rendezvous:
                return set()
            other = self.rank_of[counterpart(item)]
            self.head[other] += 1
            value = carried(item)
            self.have[rank].add(value)
            self.have[other].add(value)
            return {other}
        woken: set[int] = set()
        for action in actions_of(item):
            value = makes(action)
            if value is None:
                continue
            self.have[rank].add(value)
            if not self.rendezvous:
                woken |= self.readers.get(value, set()) - {rank}
        for action in actions_of(item):
            value = makes(action)
            if value is not None:
                for other in woken:
                    self.have[other].add(value)
        return woken

    def lacks(self, rank: int) -> Action | None:
        """Returns what the item at a rank's head waits for; None if it can run."""
        item = self.schedule.ranks[rank][self.head[rank]]
        if isinstance(item, Action) and item.kind.transfers:
            return self._lacks_transfer(rank, item) if self.rendezvous else None
        for action in actions_of(item):
            for value in reads(action, self.last_stage):
                if value not in self.have[rank]:
                    return self._waited_for(rank, value)
        return None

    def _waited_for(self, rank: int, value: Value) -> Action:
        kind, stage, microbatch = value
        maker = self.maker.get(value, Action(stage, Kind(kind), microbatch))
        if self.rendezvous and self.rank_of.get(maker, rank) != rank:
            step = 1 if kind == "F" else -1
            return Action(stage + step, Kind(f"RECV_{kind}"), microbatch)
        return maker

    def _lacks_transfer(self, rank: int, item: Action) -> Action | None:
        value = carried(item)
        if item.kind in (Kind.SEND_FORWARD, Kind.SEND_BACKWARD) and value not in self.have[rank]:
            return self._waited_for(rank, value)
        other_side = counterpart(item)
        other = self.rank_of.get(other_side)
        if other is None or other == rank or self.head[other] >= len(self.schedule.ranks[other]):
            return other_side
        if self.schedule.ranks[other][self.head[other]] != other_side:
            return other_side
        if value not in self.have[rank] and value not in self.have[other]:
            return self._waited_for(other, value)
        return None

    def stuck(self) -> tuple[Stuck, ...]:
        """Returns the ranks that did not finish, in rank order."""
        found = []
        for rank, row in enumerate(self.schedule.ranks):
            if self.head[rank] < len(row):
                needs = self.lacks(rank)
                assert needs is not None, "a rank stopped although it could go on"
                found.append(Stuck(rank, self.head[rank], row[self.head[rank]], needs))
        return tuple(found)


def stuck_ranks(schedule: Schedule, rendezvous: bool | None = None) -> tuple[Stuck, ...]:
    """Returns the ranks that never finish their row, in rank order; none if all do.

    Without `rendezvous` values move by themselves and only the order of computation counts.
    With it (the default for a table that spells out transfers), a send and its receive both
    need to be at the head of their rows, and an input from another rank must be received first.
    """
    if rendezvous is None:
        rendezvous = schedule.has_transfers
    return Progress(schedule, rendezvous).stuck()
