"""Put transfers in an order that all ranks agree on, hidden behind computation.

After the paper's section VII. Two ranks that reach two transfers in opposite orders wait for
each other for ever. The cure is one order of everything, computations and transfers, of which
every rank's row is a part: whatever comes next in it can run, so no rank waits in a cycle.

1. *Order.* The simulated start times give one order of all computations.
2. *Mismatches.* The naive rule wants a transfer right after its producer on the sender, and
   right before its consumer on the receiver. Both can be had if the receiver's cell before the
   consumer comes before the sender's cell after the producer. Else the pair is mismatched, and
   may be part of a cycle. One look per transfer.
3. *Window.* A mismatched transfer may stand anywhere between producer and consumer. Each place
   next to a cell of its two ranks is tried, and the cheapest kept. Cost = span, from when the
   first side reaches the transfer until the value is there, minus the computation that the two
   ranks have meanwhile; and how much the cells after it would be late.
4. *Proof.* The result is executed under rendezvous; what does not pass is never returned.
"""

from dataclasses import dataclass

from octojax.ir import Item, Machine, Plan, Profile, Schedule
from octojax.ir.lowering import Transfer, lower_naively
from octojax.ir.progress import stuck_ranks
from octojax.ir.verify import deliverable
from octojax.passes.one_order import OneOrder
from octojax.passes.rewriting import PlanOrSchedule, rewritten
from octojax.simulate.costs import StageCosts

_WINDOW = 64  # places tried per transfer, from its producer on: keeps the pass near linear


@dataclass(frozen=True)
class Reordered:
    """A lowered table that is proven deliverable, and what it took.

    `order` is the one order of all transfers. `naive_stuck` are the operations at which the
    naive rule deadlocks (none: it is safe). `refused` transfers had naive places that no common
    order holds; all of them are repaired. `tried` counts the places looked at for them.
    """

    schedule: Schedule
    order: tuple[Transfer, ...]
    naive_stuck: tuple[str, ...]
    refused: int
    tried: int


@dataclass(frozen=True)
class ReorderComm:
    """Spell out sends and receives so that they neither deadlock nor wait needlessly.

        before   0F0 0F1 0B0 0B1                     1F0 1B0 1F1 1B1
        naive    ... 0F1 0SEND_F1 0RECV_B0 0B0 ...   ... 1B0 1SEND_B0 1RECV_F1 1F1 ...
        after    ... 0F1 0SEND_F1 0RECV_B0 0B0 ...   ... 1B0 1RECV_F1 1SEND_B0 1F1 ...

    Takes any valid schedule on any placement; transfers already there are dropped first.
    Promises a table that finishes under blocking rendezvous, and leaves the order of
    computation alone. `costs` and `machine` say what is worth hiding where; by default every
    action costs one and a transfer a hundredth. With `eager`, every transfer stands right
    after its producer on both ranks: best where transfers run beside computation, so that a
    receive may be posted long before its use; without, receives stay as late as they can.
    """

    costs: StageCosts | Profile | None = None
    machine: Machine | None = None
    eager: bool = False

    def __call__(self, plan: PlanOrSchedule) -> PlanOrSchedule:
        result = self.reorder(plan).schedule
        return rewritten(plan, lambda _: result)

    def reorder(self, plan: Plan | Schedule) -> Reordered:
        """Returns the lowered table with its order of transfers and the counts of repairs."""
        order = OneOrder.of(plan, self.costs, self.machine)
        placed: list[tuple[int, int, str, Transfer]] = []
        refused = tried = 0
        for transfer in order.transfers:
            slot = natural_slot(order, transfer)
            if slot is None:
                slots = window(order, transfer)
                slot = cheapest(order, transfer, slots)
                refused += 1
                tried += len(slots)
            if self.eager:
                slot = order.producer(transfer)
            placed.append((slot, order.producer(transfer), transfer.kind, transfer))
        placed.sort()
        lowered = lowered_by(order, [(slot, transfer) for slot, _, _, transfer in placed])
        deliverable(lowered)
        naive = stuck_ranks(lower_naively(order.schedule), rendezvous=True)
        return Reordered(
            lowered,
            tuple(transfer for *_, transfer in placed),
            tuple(str(x.item) for x in naive),
            refused,
            tried,
        )


def transfer_order(
    plan: Plan | Schedule,
    costs: StageCosts | Profile | None = None,
    machine: Machine | None = None,
) -> tuple[Transfer, ...]:
    """Returns all transfers in the order in which their values are made.

    One order for all ranks, and a linear extension of the dependencies: ranks that issue their
    transfers in this order, beside their computation, cannot deadlock, and no value that is
    there waits behind one that is not.
    """
    order = OneOrder.of(plan, costs, machine)

    def made(transfer: Transfer) -> tuple[float, int, str]:
        cell = order.producer(transfer)
        return order.end_s[cell], cell, transfer.kind

    return tuple(sorted(order.transfers, key=made))


def natural_slot(order: OneOrder, transfer: Transfer) -> int | None:
    """Returns the cell after which the transfer stands by the naive rule on both its ranks.

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


def window(order: OneOrder, transfer: Transfer) -> list[int]:
    """Returns the cells after which the transfer may stand: its ranks', producer to consumer."""
    producer, consumer = order.producer(transfer), order.consumer(transfer)
    slots = [producer]
    sides = (transfer.source, transfer.target)
    following = [order.first_after(rank, producer) for rank in sides]
    while len(slots) < _WINDOW:
        side = min((0, 1), key=lambda k: _or_never(following[k]))
        cell = following[side]
        if cell is None or cell >= consumer:
            break
        slots.append(cell)
        following[side] = order.first_after(sides[side], cell)
    return slots


def _or_never(cell: int | None) -> float:
    return float("inf") if cell is None else cell


def cheapest(order: OneOrder, transfer: Transfer, slots: list[int]) -> int:
    """Returns the slot of least cost, the earliest of equals."""
    return min(slots, key=lambda slot: (cost_s(order, transfer, slot), slot))


def cost_s(order: OneOrder, transfer: Transfer, slot: int) -> float:
    """Returns what it costs to have the transfer after cell `slot`, in seconds.

    The span from when the first side reaches it until the value is there, less the mean of the
    two ranks' computation meanwhile, plus how late it makes the next cells of both.
    """
    ranks = (transfer.source, transfer.target)
    last = [order.last_until(rank, slot) for rank in ranks]
    reached = [0.0 if cell is None else order.end_s[cell] for cell in last]
    done = max(reached) + order.duration_s[transfer]
    first = min(reached)
    hidden = sum(order.busy_s(rank, first, done) for rank in ranks) / 2
    late = 0.0
    for rank in ranks:
        cell = order.first_after(rank, slot)
        if cell is not None:
            late += max(0.0, done - order.start_s[cell])
    return done - first - hidden + late


def lowered_by(order: OneOrder, placed: list[tuple[int, Transfer]]) -> Schedule:
    """Returns the table with each transfer after the cell it was given, on both its ranks.

    `placed` is ascending. Transfers after one cell keep its order.
    """
    rows: list[list[Item]] = [[] for _ in order.schedule.ranks]
    at = 0
    for index, item in enumerate(order.items):
        rows[order.rank_of[index]].append(item)
        while at < len(placed) and placed[at][0] == index:
            transfer = placed[at][1]
            rows[transfer.source].append(transfer.send)
            rows[transfer.target].append(transfer.receive)
            at += 1
    return Schedule(tuple(map(tuple, rows)))
