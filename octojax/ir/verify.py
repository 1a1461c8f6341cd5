"""The checker: what must hold of a schedule, and an error that shows where it does not."""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

from octojax.errors import ScheduleError
from octojax.ir.action import Action, Item, Kind
from octojax.ir.lowering import (
    counterpart,
    lower_naively,
    owners,
    received,
    sent,
    without_transfers,
)
from octojax.ir.marked import Place, mark
from octojax.ir.plan import Plan
from octojax.ir.progress import Stuck, stuck_ranks
from octojax.ir.schedule import Schedule

_MOST = 12  # offenders listed in full
_NAMED = 4  # places named of one action that is doubled
_ENOUGH = 1000  # offenders looked for: a mistyped 0F99999999 lacks a hundred million actions


@dataclass(frozen=True, slots=True)
class Fault:
    """One thing that is wrong, and the cell where, if it has one."""

    text: str
    place: Place | None = None


def verify(
    schedule: Schedule | Plan,
    num_microbatches: int | None = None,
    num_stages: int | None = None,
) -> None:
    """Returns nothing if the schedule is complete and can run; else raises `ScheduleError`.

    Complete: each stage and microbatch has one F and either one B, or one I with one W, all
    on one rank that holds the stage. Ordered: F before B or I, I before W, and no ranks that
    wait for each other in a cycle. A table that spells out transfers must moreover send and
    receive each value that crosses ranks once, and finish under blocking rendezvous.
    `num_microbatches` and `num_stages` are those that must be there; by default, as many as
    the table shows. The message lists all offenders and draws the table with them marked.
    """
    placement = None
    if isinstance(schedule, Plan):
        num_stages = schedule.num_stages if num_stages is None else num_stages
        placement = schedule.placement.stages
        schedule = schedule.schedule
    stages = schedule.num_stages if num_stages is None else num_stages
    microbatches = schedule.num_microbatches if num_microbatches is None else num_microbatches
    faults = [*islice(_counted(schedule, stages, microbatches), _ENOUGH)]
    if faults:
        _refuse(schedule, faults, _ADVICE_COUNT)
    faults = [*_placed(schedule, placement), *_ordered(schedule)]
    if faults:
        _refuse(schedule, faults, _ADVICE_ORDER)
    bare = without_transfers(schedule) if schedule.has_transfers else schedule
    blocked = stuck_ranks(bare, rendezvous=False)
    if blocked:
        faults = [Fault(_waiting(bare, x), (x.rank, x.position)) for x in blocked]
        _refuse(bare, faults, _ADVICE_CYCLE, _summary(bare, blocked))
    if schedule.has_transfers:
        deliverable(schedule)


def deliverable(schedule: Schedule) -> None:
    """Returns nothing if a lowered table finishes under blocking rendezvous; else raises.

    A send and its receive happen only when both ranks have reached them. This is the strictest
    way to carry out a table, so what passes here cannot deadlock on any transport that keeps
    each rank's order.
    """
    matched(schedule)
    blocked = stuck_ranks(schedule, rendezvous=True)
    if blocked:
        heads = " ".join(str(x.item) for x in blocked)
        summary = f"the table deadlocks under blocking rendezvous, stuck at {heads}"
        faults = [Fault(_waiting(schedule, x), (x.rank, x.position)) for x in blocked]
        _refuse(schedule, faults, _ADVICE_RENDEZVOUS, summary)


def matched(schedule: Schedule) -> None:
    """Returns nothing if each value that crosses ranks is sent and received once; else raises."""
    faults = list(_sent_and_received(schedule))
    if faults:
        _refuse(schedule, faults, _ADVICE_TRANSFER)


def naive_deadlock(schedule: Schedule) -> tuple[Stuck, ...]:
    """Returns where ranks get stuck if they receive just before use and send just after.

    Empty if the naive rule of the paper's Fig. 4(a) is safe for this table (GPipe).
    """
    return stuck_ranks(lower_naively(schedule), rendezvous=True)


def _counted(schedule: Schedule, stages: int, microbatches: int) -> Iterator[Fault]:
    seen: dict[Action, list[Place]] = defaultdict(list)
    for rank, position, action in schedule.actions():
        seen[action].append((rank, position))
    for action, places in seen.items():
        if len(places) > 1 and action.kind.computes:
            at = ", ".join(f"{p} of rank {r}" for r, p in places[:_NAMED])
            if len(places) > _NAMED:
                at += f" and {len(places) - _NAMED} more"
            for place in places[1:]:
                yield Fault(f"{action} is doubled: it stands at position {at}", place)
        outside = []
        if action.stage >= stages:
            outside.append(f"stage {action.stage} is beyond the {stages} stages asked for")
        if action.microbatch >= microbatches:
            outside.append(
                f"microbatch {action.microbatch} is beyond the {microbatches} asked for "
                f"(0 to {microbatches - 1})"
            )
        for reason in outside:
            yield Fault(f"{action}: {reason}", places[0])
    short = schedule.num_microbatches
    if short < microbatches:
        yield Fault(
            f"{microbatches} microbatches were asked for, but the table runs only {short} "
            f"(0 to {short - 1}): {microbatches - short} are dropped"
        )
    for stage in range(stages):
        for microbatch in range(min(microbatches, short)):
            yield from _cell(seen, stage, microbatch)


def _cell(seen: dict[Action, list[Place]], stage: int, microbatch: int) -> Iterator[Fault]:
    has = {kind: Action(stage, kind, microbatch) for kind in Kind if kind.computes}
    there = {kind: seen[action][0] for kind, action in has.items() if action in seen}
    places = list(there.values())
    who = f"of stage {stage}, microbatch {microbatch}"
    backwards = [k for k in (Kind.BACKWARD, Kind.INPUT_GRAD, Kind.WEIGHT_GRAD) if k in there]
    if not there:
        names = f"{has[Kind.FORWARD]} and {has[Kind.BACKWARD]}"
        yield Fault(f"{names} are missing: there is nothing {who}")
        return
    if Kind.FORWARD not in there:
        yield Fault(f"{has[Kind.FORWARD]} is missing: no forward {who}", places[0])
    if Kind.BACKWARD in there:
        for kind in backwards[1:]:
            yield Fault(
                f"{has[kind]} repeats what {has[Kind.BACKWARD]} already does: "
                f"a microbatch has either B, or I and W",
                there[kind],
            )
    elif not backwards:
        yield Fault(
            f"{has[Kind.BACKWARD]} is missing: no backward (B, or I and W) {who}", places[-1]
        )
    elif Kind.WEIGHT_GRAD not in there:
        yield Fault(
            f"{has[Kind.WEIGHT_GRAD]} is missing: {has[Kind.INPUT_GRAD]} makes only the input "
            f"gradient {who}",
            places[-1],
        )
    elif Kind.INPUT_GRAD not in there:
        yield Fault(
            f"{has[Kind.INPUT_GRAD]} is missing: {has[Kind.WEIGHT_GRAD]} needs what it keeps {who}",
            places[-1],
        )


def _placed(schedule: Schedule, placement: tuple[tuple[int, ...], ...] | None) -> Iterator[Fault]:
    home: dict[tuple[int, int], tuple[int, Action]] = {}
    for rank, position, action in schedule.actions():
        if not action.kind.computes:
            continue
        if placement is not None and rank not in placement[action.stage]:
            held = "+".join(map(str, placement[action.stage]))
            yield Fault(
                f"{action} is misplaced: rank {rank} runs it, but stage {action.stage} "
                f"is placed on rank {held}",
                (rank, position),
            )
        cell = (action.stage, action.microbatch)
        first_rank, first = home.setdefault(cell, (rank, action))
        if first_rank != rank:
            yield Fault(
                f"{action} is misplaced: rank {rank} runs it, but rank {first_rank} runs "
                f"{first} of the same stage and microbatch, and its residuals are there",
                (rank, position),
            )


_BEFORE = {
    Kind.BACKWARD: Kind.FORWARD,
    Kind.INPUT_GRAD: Kind.FORWARD,
    Kind.WEIGHT_GRAD: Kind.INPUT_GRAD,
    Kind.RECOMPUTE: Kind.FORWARD,
}


def _ordered(schedule: Schedule) -> Iterator[Fault]:
    for rank, items in enumerate(schedule.ranks):
        row = [(p, a) for p, x in enumerate(items) for a in _parts(x)]
        position_of = {a: p for p, a in row}
        for position, action in row:
            if action.kind not in _BEFORE:
                continue
            needed = Action(action.stage, _BEFORE[action.kind], action.microbatch)
            at = position_of.get(needed)
            if at is not None and at >= position:
                where = "in the same cell" if at == position else f"only at position {at}"
                yield Fault(
                    f"rank {rank} runs {action} at position {position}, "
                    f"but {needed}, which it needs, {where}",
                    (rank, position),
                )
        for position, action in row:
            if action.kind is not Kind.RECOMPUTE:
                continue
            for kind in (Kind.BACKWARD, Kind.INPUT_GRAD):
                use = Action(action.stage, kind, action.microbatch)
                if position_of.get(use, position + 1) <= position:
                    yield Fault(
                        f"rank {rank} runs {action} at position {position}, after {use} at "
                        f"position {position_of[use]}, which it should serve",
                        (rank, position),
                    )


def _parts(item: Item) -> tuple[Action, ...]:
    return (item,) if isinstance(item, Action) else item.actions


def _sent_and_received(schedule: Schedule) -> Iterator[Fault]:
    bare = without_transfers(schedule)
    owner = owners(bare)
    expected: dict[Action, int] = {}
    for rank, _, action in bare.actions():
        for transfer in (received(action, rank, owner), sent(action, rank, owner)):
            if transfer is not None:
                expected[transfer.send] = transfer.source
                expected[transfer.receive] = transfer.target
    found: dict[Action, Place] = {}
    for rank, position, action in schedule.actions():
        if not action.kind.transfers:
            continue
        place = (rank, position)
        if action in found:
            yield Fault(
                f"{action} is doubled: rank {found[action][0]} has it at position "
                f"{found[action][1]}",
                place,
            )
        elif action not in expected:
            yield Fault(f"{action} moves a value that does not cross ranks", place)
        elif expected[action] != rank:
            yield Fault(
                f"{action} is misplaced: rank {rank} has it, but it belongs to rank "
                f"{expected[action]}",
                place,
            )
        found.setdefault(action, place)
    for action, rank in expected.items():
        if action not in found:
            other = found.get(counterpart(action))
            yield Fault(
                f"{action} is missing on rank {rank}, the other side of {counterpart(action)}",
                other,
            )


def _waiting(schedule: Schedule, stuck: Stuck) -> str:
    places = {a: (r, p) for r, p, a in schedule.actions()}
    text = f"rank {stuck.rank} waits at {stuck.item} (position {stuck.position}) "
    if stuck.needs not in places:
        return f"{text}for {stuck.needs}, which is nowhere in the table"
    rank, position = places[stuck.needs]
    return f"{text}for {stuck.needs}, which rank {rank} has at position {position}"


def _summary(schedule: Schedule, blocked: tuple[Stuck, ...]) -> str:
    """Follows who waits for whom from the first stuck rank until a rank comes up again."""
    by_rank = {x.rank: x for x in blocked}
    places = {a: r for r, _, a in schedule.actions()}
    path = [blocked[0].rank]
    while True:
        target = places.get(by_rank[path[-1]].needs)
        if target is None or target not in by_rank:
            break
        if target in path:
            cycle = [*path[path.index(target) :], target]
            names = " -> ".join(f"rank {r} ({by_rank[r].item})" for r in cycle)
            return f"the order of computation deadlocks in a cycle: {names}"
        path.append(target)
    heads = " ".join(str(x.item) for x in blocked)
    return f"the order of computation deadlocks, stuck at {heads}"


_ADVICE_COUNT = (
    "Every stage and microbatch needs one F and one B (or one I and one W), once, on the rank "
    "that holds the stage."
)
_ADVICE_ORDER = (
    "A backward needs its own forward first, a W its own I, all on one rank. To find the pass "
    "that did this, compare the table before and after each pass."
)
_ADVICE_CYCLE = (
    "Each of these ranks waits for an action that stands behind another's wait. Move one of "
    "the marked actions behind what it waits for."
)
_ADVICE_TRANSFER = (
    "Each value that crosses ranks needs one SEND after its producer and one RECV before its "
    "consumer. Drop all transfers and lower the table again with passes.ReorderComm."
)
_ADVICE_RENDEZVOUS = (
    "Both sides of a transfer must come up in an order that all ranks agree on. "
    "passes.ReorderComm finds such an order for any valid table."
)


def _refuse(schedule: Schedule, faults: list[Fault], advice: str, summary: str = "") -> None:
    faults = sorted(faults, key=lambda fault: fault.place is None)  # those that can be marked
    texts = list(dict.fromkeys(fault.text for fault in faults))
    lines = texts[:_MOST]
    if len(texts) > _MOST:
        over = "over " if len(faults) >= _ENOUGH else ""
        lines.append(f"... and {over}{len(texts) - _MOST} more")
    places = [fault.place for fault in faults if fault.place is not None]
    raise ScheduleError(
        "\n".join([*([summary] if summary else []), *lines, mark(schedule, places), advice])
    )
