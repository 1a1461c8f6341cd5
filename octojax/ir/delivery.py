"""The proof that a lowered table delivers: every value sent and received, and no rank stuck."""

from bisect import bisect_left
from collections.abc import Iterator

from octojax.ir.exchange import exchanges
from octojax.ir.faults import ADVICE_RENDEZVOUS, ADVICE_TRANSFER, Entry, Fault, Table
from octojax.ir.instruction import Instruction, Receive, Run, Send, Update
from octojax.ir.lowered import LoweredPlan
from octojax.ir.lowering import Crossings, without_transfers
from octojax.ir.marked import Place
from octojax.ir.naive import placed_naively
from octojax.ir.schedule import Schedule
from octojax.ir.transfer import Cargo, Transfer, counterpart
from octojax.ir.walk import Mode, Stuck, TableWalk


def deliverable(subject: Schedule | LoweredPlan) -> None:
    """Returns nothing if a lowered table finishes under blocking rendezvous; else raises.

    A send and its receive happen only when both ranks have reached them. This is the strictest
    way to carry out a table, so what passes here cannot deadlock on any transport that keeps
    each rank's order. The message draws the cycle in which ranks wait.
    """
    if isinstance(subject, LoweredPlan) and subject.proven("delivers"):
        return
    matched(subject)
    plan = LoweredPlan.of(subject) if isinstance(subject, Schedule) else subject
    stuck = TableWalk(plan, Mode.RENDEZVOUS).stuck()
    plan.note(delivers=not stuck)
    if stuck:
        how = "under blocking rendezvous"
        Table.of(subject).refuse_stuck(stuck, ADVICE_RENDEZVOUS, "the table", how)


def matched(subject: Schedule | LoweredPlan) -> None:
    """Returns nothing if each value that crosses ranks is sent and received once; else raises."""
    if isinstance(subject, Schedule):
        crossings = Crossings.of(without_transfers(subject))
        faults = list(_values(Table.of(subject), crossings))
    else:
        faults = (
            [] if _all_matched(subject) else list(_values(Table.of(subject), subject.crossings))
        )
        faults += [*_exchanged(subject), *_updated(subject)]
    if faults:
        Table.of(subject).refuse(faults, ADVICE_TRANSFER)


def _all_matched(plan: LoweredPlan) -> bool:
    """Whether outputs and gradients are sent and received as they should, each once."""
    sent: list[Transfer] = []
    received: list[Transfer] = []
    for rank, row in enumerate(plan.ranks):
        for x in row:
            if isinstance(x, Run | Update) or x.transfer.stage < 0:
                continue
            home = x.transfer.source if isinstance(x, Send) else x.transfer.target
            if home != rank:
                return False
            (sent if isinstance(x, Send) else received).append(x.transfer)
    wanted = set(plan.crossings.take.values())
    return len(sent) == len(received) == len(wanted) and set(sent) == set(received) == wanted


def naive_deadlock(schedule: Schedule) -> tuple[Stuck, ...]:
    """Returns where ranks get stuck if they receive just before use and send just after.

    Empty if the naive rule of the paper's Fig. 4(a) is safe for this table (GPipe).
    """
    bare = LoweredPlan.of(without_transfers(schedule))
    return TableWalk(placed_naively(bare), Mode.RENDEZVOUS).stuck()


def mismatches(plan: LoweredPlan) -> tuple[Transfer, ...]:
    """Returns the fewest transfers without which any two ranks have theirs in the same order.

    Two ranks that come to two transfers in opposite orders may wait for each other for ever.
    """
    rows: dict[tuple[int, int], tuple[list[Transfer], list[Transfer]]] = {}
    for rank, row in enumerate(plan.ranks):
        for x in row:
            if isinstance(x, Send | Receive):
                ends = sorted((x.transfer.source, x.transfer.target))
                both = rows.setdefault((ends[0], ends[1]), ([], []))
                both[rank == ends[1]].append(x.transfer)
    return tuple(t for first, second in rows.values() for t in _out_of_order(first, second))


def _out_of_order(first: list[Transfer], second: list[Transfer]) -> Iterator[Transfer]:
    """Yields what is not in a longest common order: the longest ascending run of places."""
    place = {transfer: n for n, transfer in enumerate(first)}
    tops: list[int] = []  # the lowest end of an ascending run of each length
    ends: list[int] = []  # which transfer of `second` that end is
    before: list[int] = []
    for n, transfer in enumerate(second):
        at = bisect_left(tops, place[transfer])
        before.append(ends[at - 1] if at else -1)
        tops[at : at + 1] = [place[transfer]]
        ends[at : at + 1] = [n]
    kept, n = set(), ends[-1] if ends else -1
    while n >= 0:
        kept.add(n)
        n = before[n]
    yield from (transfer for n, transfer in enumerate(second) if n not in kept)


def _values(table: Table, crossings: Crossings) -> Iterator[Fault]:
    expected = {}
    for transfer in crossings.take.values():
        expected[transfer.send] = transfer.source
        expected[transfer.receive] = transfer.target
    first: dict[object, Entry] = {}
    for entry in table.entries:
        action = entry.action
        if not action.kind.transfers:
            continue
        before = first.setdefault(action, entry)
        if before is not entry:
            yield Fault(
                f"{action} is doubled: rank {before.rank} has it at position {before.position}",
                entry.place,
            )
        elif action not in expected:
            yield Fault(f"{action} moves a value that does not cross ranks", entry.place)
        elif expected[action] != entry.rank:
            yield Fault(
                f"{action} is misplaced: rank {entry.rank} has it, but it belongs to rank "
                f"{expected[action]}",
                entry.place,
            )
    for action, rank in expected.items():
        if action not in first:
            other = first.get(counterpart(action))
            yield Fault(
                f"{action} is missing on rank {rank}, the other side of {counterpart(action)}",
                other and other.place,
            )


def _exchanged(plan: LoweredPlan) -> Iterator[Fault]:
    """What ends a step: all of it or (before the pass that places it) none, after all work."""
    wanted = {
        (rank, str(side))
        for t in exchanges(plan)
        for rank, side in ((t.source, Send(t)), (t.target, Receive(t)))
    }
    places: dict[tuple[int, str], Place] = {}
    for rank, row in enumerate(plan.ranks):
        last = max((p for p, x in enumerate(row) if isinstance(x, Run)), default=-1)
        for position, x in enumerate(row):
            if isinstance(x, Run | Update) or x.transfer.kind.crosses_stages:
                continue
            if x.transfer.kind is Cargo.UPDATE:
                continue
            side = (rank, str(x))
            if side in places:
                yield Fault(f"{x} is doubled on rank {rank}", (rank, position))
            elif side not in wanted:
                yield Fault(
                    f"{x} on rank {rank} moves what no other rank keeps or makes", (rank, position)
                )
            elif position < last:
                yield Fault(
                    f"{x} stands at position {position} of rank {rank}, before the last action, "
                    f"{row[last]} at position {last}",
                    (rank, position),
                )
            places[side] = (rank, position)
    if places:
        for rank, text in sorted(wanted - places.keys()):
            yield Fault(f"{text} is missing on rank {rank}")


def _updated(plan: LoweredPlan) -> Iterator[Fault]:
    """The update: after all that it reads, before the copies of what it makes; phases ascend, and
    every value that one hands to another leaves after its phase and is sent and received once."""
    sides: dict[tuple[int, str], Place] = {}
    for rank, row in enumerate(plan.ranks):
        phase, copied = -1, False
        last = max((p for p, x in enumerate(row) if _before_update(x)), default=-1)
        for position, x in enumerate(row):
            if isinstance(x, Update):
                if x.phase <= phase:
                    yield Fault(f"{x} comes after UPDATE{phase} on rank {rank}", (rank, position))
                phase = x.phase
            elif isinstance(x, Run) or x.transfer.kind not in (Cargo.UPDATE, Cargo.PARAMETERS):
                continue
            elif x.transfer.kind is Cargo.PARAMETERS:
                copied = True
                continue
            else:
                yield from _handed_on(x, rank, position, phase, sides)
            if position < last or copied:
                wrong = f"before {row[last]}" if position < last else "after copies of parameters"
                text = f"{x} stands at position {position} of rank {rank}, {wrong}"
                yield Fault(text, (rank, position))
    for (rank, text), place in sides.items():
        side, _, rest = text.partition("_")
        other = f"{'RECV' if side == 'SEND' else 'SEND'}_{rest}"
        if not any(cell == other for _, cell in sides):
            yield Fault(f"{other} is missing, the other side of {text} on rank {rank}", place)


def _before_update(x: Instruction) -> bool:
    return isinstance(x, Run) or (
        isinstance(x, Send | Receive) and x.transfer.kind not in (Cargo.UPDATE, Cargo.PARAMETERS)
    )


def _handed_on(
    x: Send | Receive, rank: int, position: int, phase: int, sides: dict[tuple[int, str], Place]
) -> Iterator[Fault]:
    transfer = x.transfer
    home = transfer.source if isinstance(x, Send) else transfer.target
    if home != rank:
        yield Fault(f"{x} is misplaced: rank {rank} has it, not rank {home}", (rank, position))
    if (rank, str(x)) in sides:
        yield Fault(f"{x} is doubled on rank {rank}", (rank, position))
    sides[rank, str(x)] = (rank, position)
    if len(transfer.parts) != 1 or transfer.parts[0] < phase:
        yield Fault(f"{x} comes after UPDATE{phase} on rank {rank}", (rank, position))
