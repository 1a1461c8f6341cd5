"""Which values cross ranks, and a table with its sends and receives spelled out."""

from collections.abc import Iterator
from dataclasses import dataclass

from octojax.ir.action import Action, Item, Kind, Overlap
from octojax.ir.schedule import Schedule

_BACKWARD = (Kind.BACKWARD, Kind.INPUT_GRAD)


@dataclass(frozen=True, slots=True, order=True)
class Transfer:
    """One value that crosses ranks: stage `stage` on `source` sends, its neighbour receives.

    `kind` is "F" (the output, for stage + 1) or "B" (the input gradient, for stage - 1).
    """

    source: int
    target: int
    stage: int
    kind: str
    microbatch: int

    def __str__(self) -> str:
        return str(self.send)

    @property
    def send(self) -> Action:
        """`3SEND_F2` for the output of stage 3."""
        return Action(self.stage, Kind(f"SEND_{self.kind}"), self.microbatch)

    @property
    def receive(self) -> Action:
        """`4RECV_F2` for the output of stage 3: it names the receiving stage."""
        step = 1 if self.kind == "F" else -1
        return Action(self.stage + step, Kind(f"RECV_{self.kind}"), self.microbatch)


def actions_of(item: Item) -> tuple[Action, ...]:
    """Returns the one action of a cell, or the two of an overlapped pair."""
    return item.actions if isinstance(item, Overlap) else (item,)


def counterpart(action: Action) -> Action:
    """Returns the receive of a send, or the send of a receive."""
    forward = action.kind in (Kind.SEND_FORWARD, Kind.RECV_FORWARD)
    sends = action.kind in (Kind.SEND_FORWARD, Kind.SEND_BACKWARD)
    step = 1 if forward == sends else -1
    kind = Kind(("RECV_" if sends else "SEND_") + ("F" if forward else "B"))
    return Action(action.stage + step, kind, action.microbatch)


def owners(schedule: Schedule) -> dict[tuple[str, int, int], int]:
    """Returns the rank that runs ("F", stage, microbatch), and ("B", ...) for its B or I."""
    found: dict[tuple[str, int, int], int] = {}
    for rank, _, action in schedule.actions():
        if action.kind is Kind.FORWARD:
            found["F", action.stage, action.microbatch] = rank
        elif action.kind in _BACKWARD:
            found["B", action.stage, action.microbatch] = rank
    return found


def received(action: Action, rank: int, owner: dict[tuple[str, int, int], int]) -> Transfer | None:
    """Returns the transfer that brings the input of an action on `rank`, if one does."""
    if action.kind is Kind.FORWARD:
        kind, stage = "F", action.stage - 1
    elif action.kind in _BACKWARD:
        kind, stage = "B", action.stage + 1
    else:
        return None
    source = owner.get((kind, stage, action.microbatch), rank)
    if source == rank:
        return None
    return Transfer(source, rank, stage, kind, action.microbatch)


def sent(action: Action, rank: int, owner: dict[tuple[str, int, int], int]) -> Transfer | None:
    """Returns the transfer that takes away the output of an action on `rank`, if one does."""
    if action.kind is Kind.FORWARD:
        kind, stage = "F", action.stage + 1
    elif action.kind in _BACKWARD:
        kind, stage = "B", action.stage - 1
    else:
        return None
    target = owner.get((kind, stage, action.microbatch), rank)
    if target == rank:
        return None
    return Transfer(rank, target, action.stage, kind, action.microbatch)


def transfers_of(schedule: Schedule) -> tuple[Transfer, ...]:
    """Returns every value that crosses ranks, in the senders' program order, rank by rank."""
    owner = owners(schedule)
    found = (sent(action, rank, owner) for rank, _, action in schedule.actions())
    return tuple(t for t in found if t is not None)


def without_transfers(schedule: Schedule) -> Schedule:
    """Returns the computing actions of a lowered table alone, in their order."""
    return Schedule(
        tuple(
            tuple(x for x in rank if isinstance(x, Overlap) or x.kind.computes)
            for rank in schedule.ranks
        )
    )


def lower_naively(schedule: Schedule) -> Schedule:
    """Returns the table with every receive just before its use and every send just after.

    The paper's Fig. 4(a). Under blocking rendezvous this deadlocks for nearly every schedule
    but GPipe; `passes.ReorderComm` repairs it.
    """
    bare = without_transfers(schedule)
    owner = owners(bare)
    return Schedule(
        tuple(tuple(_around(items, rank, owner)) for rank, items in enumerate(bare.ranks))
    )


def _around(
    items: tuple[Item, ...], rank: int, owner: dict[tuple[str, int, int], int]
) -> Iterator[Item]:
    for item in items:
        pair = actions_of(item)
        for action in pair:
            transfer = received(action, rank, owner)
            if transfer is not None:
                yield transfer.receive
        yield item
        for action in pair:
            transfer = sent(action, rank, owner)
            if transfer is not None:
                yield transfer.send
