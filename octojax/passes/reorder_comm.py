"""Put transfers in an order that all ranks agree on, hidden behind computation.

After the paper's section VII. Two ranks that reach two transfers in opposite orders wait for
each other for ever. The cure is one order of everything, computations and transfers, of which
every rank's row is a part: whatever comes next in it can run, so no rank waits in a cycle.

Transfers that run beside computation (`mode="async"`) need only be posted in time. In the order
in which units *end*, each stands right after its producer, on both ranks: the receiver has posted
it before it starts what it computes meanwhile, so no value waits for its receiver, and links
carry values in the order in which they are made.

Transfers that occupy both ranks (`mode="blocking"`) should come when both are free:

1. *Order.* The simulated start times give one order of all computations.
2. *Mismatches.* The naive rule wants a transfer right after its producer on the sender, and
   right before its consumer on the receiver. Both can be had if the receiver's unit before the
   consumer comes before the sender's unit after the producer. Else the pair is mismatched, and
   may be part of a cycle. One look per transfer.
3. *Window.* A mismatched transfer may stand anywhere between producer and consumer. Each place
   next to a unit of its two ranks is tried, and the cheapest kept. Cost = span, from when the
   first side reaches the transfer until the value is there, minus the computation that the two
   ranks have meanwhile; and how much the units after it would be late.
4. *Choice.* With costs given, this is done by them and without them, in the order of starts and
   by the other mode's rule, and the quickest result is kept. So knowing more is never worse.

Either way the result is executed under rendezvous; what does not pass is never returned.
"""

from dataclasses import dataclass
from typing import ClassVar, Literal

from octojax.ir import (
    Instruction,
    LoweredPlan,
    Machine,
    Profile,
    Receive,
    Send,
    Transfer,
    Update,
)
from octojax.ir.delivery import deliverable
from octojax.ir.walk import Mode
from octojax.passes.one_order import OneOrder, blocks, meaning_of
from octojax.simulate.costs import StageCosts
from octojax.simulate.oracle import Meaning

_UNKNOWN_S = {"async": 1.0, "blocking": 0.01}
"""What a transfer is taken to last where nothing is known, beside actions of one second."""


@dataclass(frozen=True)
class ReorderComm:
    """Move sends and receives so that they neither deadlock nor wait needlessly.

        before     ... 0F1 0SEND_F1 0RECV_B0 0B0 ...   ... 1B0 1SEND_B0 1RECV_F1 1F1 ...
        async      ... 0F1 0SEND_F1 0RECV_B0 0B0 ...   ... 1RECV_F1 1B0 1SEND_B0 1F1 ...
        blocking   ... 0F1 0SEND_F1 0RECV_B0 0B0 ...   ... 1B0 1RECV_F1 1SEND_B0 1F1 ...

    Takes a lowered plan with its transfers. Promises one that finishes under blocking
    rendezvous, and leaves the order of computation alone. `costs` and `machine` say what is worth
    hiding where; by default every action costs one, and a transfer a hundredth of that if it
    occupies its ranks, else as much (posting early costs nothing). `window` is how many places
    are tried per transfer in mode "blocking", which keeps the pass near linear. The mode is that
    of the machine unless it is given.
    """

    name: ClassVar[str] = "reorder"
    mode: Literal["async", "blocking"] | None = None
    window: int = 64
    costs: StageCosts | Profile | None = None
    machine: Machine | None = None

    def __call__(self, plan: LoweredPlan) -> LoweredPlan:
        mode = self.mode or ("blocking" if blocks(self.costs, self.machine) else "async")
        meaning = meaning_of(plan, self.costs, self.machine, _UNKNOWN_S[mode])
        if mode == "async":
            lowered = _as_made(OneOrder.of(meaning, "end"))
        else:
            lowered = self._quickest(plan, meaning)
        whole = _ended(lowered, plan)
        deliverable(whole)
        return whole

    def _quickest(self, plan: LoweredPlan, meaning: Meaning) -> LoweredPlan:
        if self.costs is None and self.machine is None:
            return self._repaired(meaning)
        tables = [
            self._repaired(meaning),
            self._repaired(meaning_of(plan, None, None)),
            self._repaired(meaning_of(plan, None, Machine())),
            _as_made(OneOrder.of(meaning, "start")),
            _as_made(OneOrder.of(meaning, "end")),
        ]

        def makespan_s(table: LoweredPlan) -> float:
            walk = Meaning(table, meaning.costs, meaning.machine).walk(Mode.RENDEZVOUS)
            return max((end for row in walk.units for _, end in row), default=0.0)

        return min(tables, key=makespan_s)

    def _repaired(self, meaning: Meaning) -> LoweredPlan:
        order = OneOrder.of(meaning, "start")
        slots = []
        for number, transfer in enumerate(order.transfers):
            slot = natural_slot(order, transfer)
            if slot is None:
                slot = cheapest(order, transfer, window(order, transfer, self.window))
            slots.append((slot, order.producer(transfer), number, transfer))
        return placed(order, [(slot, transfer) for slot, _, _, transfer in sorted(slots)])


def _as_made(order: OneOrder) -> LoweredPlan:
    """Every transfer right after its producer."""
    places = sorted((order.producer(t), number, t) for number, t in enumerate(order.transfers))
    return placed(order, [(slot, transfer) for slot, _, transfer in places])


def placed(order: OneOrder, slots: list[tuple[int, Transfer]]) -> LoweredPlan:
    """Returns the table with each transfer after the unit `slot`, on both its ranks.

    `slots` are ascending. Transfers after one unit keep their order.
    """
    rows: list[list[Instruction]] = [[] for _ in order.plan.ranks]
    at = 0
    for index, unit in enumerate(order.units):
        rows[order.rank_of[index]].append(unit)
        while at < len(slots) and slots[at][0] == index:
            transfer = slots[at][1]
            rows[transfer.source].append(Send(transfer))
            rows[transfer.target].append(Receive(transfer))
            at += 1
    return order.plan.with_ranks(tuple(map(tuple, rows)))


def _ended(lowered: LoweredPlan, plan: LoweredPlan) -> LoweredPlan:
    """The lowered plan with what ended the rows of `plan`: sums, results, new parameters."""
    return lowered.with_ranks(
        tuple(
            (*row, *(x for x in old if _ends_a_step(x)))
            for row, old in zip(lowered.ranks, plan.ranks, strict=True)
        )
    )


def _ends_a_step(x: Instruction) -> bool:
    return isinstance(x, Update) or (isinstance(x, Send | Receive) and x.transfer.stage < 0)


def natural_slot(order: OneOrder, transfer: Transfer) -> int | None:
    """Returns the unit after which the transfer stands by the naive rule on both its ranks.

    None if the naive rule wants it in two places that the one order does not allow.
    """
    producer, consumer = order.producer(transfer), order.consumer(transfer)
    before = order.last_until(transfer.target, consumer - 1)
    after = order.first_after(transfer.source, producer)
    if before is None:
        return producer
    if after is not None and before > after:
        return None
    return max(producer, before)


def window(order: OneOrder, transfer: Transfer, most: int) -> list[int]:
    """Returns the units after which the transfer may stand: its ranks', producer to consumer."""
    producer, consumer = order.producer(transfer), order.consumer(transfer)
    slots = [producer]
    sides = (transfer.source, transfer.target)
    following = [order.first_after(rank, producer) for rank in sides]
    while len(slots) < most:
        side = min((0, 1), key=lambda k: _or_never(following[k]))
        unit = following[side]
        if unit is None or unit >= consumer:
            break
        slots.append(unit)
        following[side] = order.first_after(sides[side], unit)
    return slots


def _or_never(unit: int | None) -> float:
    return float("inf") if unit is None else unit


def cheapest(order: OneOrder, transfer: Transfer, slots: list[int]) -> int:
    """Returns the slot of least cost, the earliest of equals."""
    return min(slots, key=lambda slot: (cost_s(order, transfer, slot), slot))


def cost_s(order: OneOrder, transfer: Transfer, slot: int) -> float:
    """Returns what it costs to have the transfer after unit `slot`, in seconds.

    The span from when the first side reaches it until the value is there, less the mean of the
    two ranks' computation meanwhile, plus how late it makes the next units of both.
    """
    ranks = (transfer.source, transfer.target)
    last = [order.last_until(rank, slot) for rank in ranks]
    reached = [0.0 if unit is None else order.end_s[unit] for unit in last]
    done = max(reached) + order.duration_s[transfer]
    first = min(reached)
    hidden = sum(order.busy_s(rank, first, done) for rank in ranks) / 2
    late = 0.0
    for rank in ranks:
        unit = order.first_after(rank, slot)
        if unit is not None:
            late += max(0.0, done - order.start_s[unit])
    return done - first - hidden + late
