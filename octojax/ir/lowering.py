"""Which values cross ranks, and a table with its sends and receives spelled out."""

from dataclasses import dataclass
from typing import NamedTuple

from octojax.errors import ScheduleError
from octojax.ir.action import Action, Item, Kind, Overlap
from octojax.ir.schedule import Schedule
from octojax.ir.transfer import Cargo, Transfer, counterpart, sends
from octojax.ir.wiring import Wiring

_BACKWARD = (Kind.BACKWARD, Kind.INPUT_GRAD)

Value = tuple[str, int, int]
"""`("F", stage, microbatch)`: the stage's output. `("B", ...)`: the gradient of its input."""


def actions_of(item: Item) -> tuple[Action, ...]:
    """Returns the one action of a cell, or the two of an overlapped pair."""
    return item.actions if isinstance(item, Overlap) else (item,)


def makes(action: Action) -> Value | None:
    """Returns the value that an action leaves behind for others, if any."""
    if action.kind is Kind.FORWARD:
        return ("F", action.stage, action.microbatch)
    if action.kind in _BACKWARD:
        return ("B", action.stage, action.microbatch)
    return None


class Needs(NamedTuple):
    """What must be there before a unit runs, what it makes, and what leaves its rank then."""

    reads: tuple[Value, ...]
    makes: tuple[Value, ...]
    leaving: tuple[Transfer, ...]


@dataclass(frozen=True)
class Crossings:
    """The values of a schedule, by the actions that make and take them.

    `bring[action]` is the transfer that brings what an action takes from another rank,
    `take[action]` the one that takes away what it makes. `maker[value]` is `(rank, action)`.
    """

    wiring: Wiring
    maker: dict[Value, tuple[int, Action]]
    bring: dict[Action, Transfer]
    take: dict[Action, Transfer]

    @classmethod
    def of(cls, schedule: Schedule, wiring: Wiring | None = None) -> "Crossings":
        wiring = wiring or Wiring.chain(schedule.num_stages)
        maker: dict[Value, tuple[int, Action]] = {}
        for rank, _, action in schedule.actions():
            value = makes(action)
            if value is not None:
                maker[value] = (rank, action)
        crossings = cls(wiring, maker, {}, {})
        for rank, _, action in schedule.actions():
            value = crossings.takes(action)
            if value is None or value not in maker:
                continue
            source, making = maker[value]
            if source != rank:
                transfer = Transfer(source, rank, Cargo(value[0]), value[1], value[2])
                crossings.bring[action] = crossings.take[making] = transfer
        return crossings

    def needs(self, actions: tuple[Action, ...], together: bool) -> "Needs":
        """Returns what a unit of actions needs and leaves behind.

        Of those that run `together`, as an overlapped pair, none feeds another.
        """
        results: list[Value] = []
        read: list[Value] = []
        for action in actions:
            read += [v for v in self.reads(action) if together or v not in results]
            value = makes(action)
            results += [] if value is None else [value]
        leaving = [self.take[action] for action in actions if action in self.take]
        return Needs(tuple(read), tuple(results), tuple(leaving))

    def takes(self, action: Action) -> Value | None:
        """Returns the value of a neighbouring stage that an action is the first to read."""
        stage, microbatch = action.stage, action.microbatch
        if action.kind is Kind.FORWARD:
            kind, stage = Cargo.OUTPUT, stage - 1
        elif action.kind in _BACKWARD or (action.kind is Kind.WEIGHT_GRAD and self._alone(action)):
            kind, stage = Cargo.GRADIENT, stage + 1
        else:
            return None
        return (kind, stage, microbatch) if self.wiring.carries(kind, stage) else None

    def reads(self, action: Action) -> tuple[Value, ...]:
        """Returns the values that must be on the action's rank before it can run."""
        stage, microbatch = action.stage, action.microbatch
        if action.kind is Kind.WEIGHT_GRAD and not self._alone(action):
            return (("B", stage, microbatch),)
        taken = self.takes(action)
        own: tuple[Value, ...] = ()
        if action.kind.computes and action.kind is not Kind.FORWARD:
            own = (("F", stage, microbatch),)
        return own if taken is None else (*own, taken)

    def _alone(self, weight: Action) -> bool:
        """Whether a W has no I before it: the stage's I has nothing to compute."""
        return ("B", weight.stage, weight.microbatch) not in self.maker


def as_transfer(action: Action, crossings: Crossings) -> Transfer:
    """Returns the transfer of a SEND or RECV. Raises `ScheduleError` if no value needs it."""
    send = action if sends(action) else counterpart(action)
    kind = Cargo(send.kind.value[-1])
    source = crossings.maker.get((kind, send.stage, send.microbatch))
    transfer = None if source is None else crossings.take.get(source[1])
    if transfer is None:
        raise ScheduleError(f"{action} moves a value that does not cross ranks")
    return transfer


def transfers_of(schedule: Schedule, wiring: Wiring | None = None) -> tuple[Transfer, ...]:
    """Returns every value that crosses ranks, in the senders' program order, rank by rank."""
    crossings = Crossings.of(without_transfers(schedule), wiring)
    return tuple(
        crossings.take[action] for _, _, action in schedule.actions() if action in crossings.take
    )


def without_transfers(schedule: Schedule) -> Schedule:
    """Returns the computing actions of a lowered table alone, in their order."""

    def computes(item: Item) -> bool:
        return isinstance(item, Overlap) or item.kind.computes

    if all(computes(item) for row in schedule.ranks for item in row):
        return schedule
    return Schedule(tuple(tuple(filter(computes, row)) for row in schedule.ranks))
