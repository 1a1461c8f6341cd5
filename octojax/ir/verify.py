"""The checker: what must hold of a table, and an error that shows where it does not."""

from collections import defaultdict
from collections.abc import Iterator
from itertools import islice

from octojax.ir.action import Action, Kind
from octojax.ir.delivery import deliverable, matched, naive_deadlock
from octojax.ir.faults import ADVICE_COUNT, ADVICE_CYCLE, ADVICE_ORDER, ENOUGH, Entry, Fault, Table
from octojax.ir.lowered import LoweredPlan
from octojax.ir.lowering import without_transfers
from octojax.ir.marked import Place
from octojax.ir.placement import Placement
from octojax.ir.plan import Plan
from octojax.ir.schedule import Schedule
from octojax.ir.walk import Mode, TableWalk

__all__ = ["deliverable", "matched", "naive_deadlock", "verify"]

_NAMED = 4  # places named of one action that is doubled
Idle = frozenset[tuple[int, Kind]]


def verify(
    subject: Schedule | Plan | LoweredPlan,
    num_microbatches: int | None = None,
    num_stages: int | None = None,
    delivers: bool = True,
) -> None:
    """Returns nothing if a table is complete and can run; else raises `ScheduleError`.

    Complete: each stage and microbatch has one F and either one B, or one I with one W, all
    on one rank that holds the stage; a lowered plan may leave out what its wiring calls idle.
    Ordered: F before B or I, I before W, and no ranks that wait for each other in a cycle. A
    table that spells out transfers must moreover send and receive each value that crosses ranks
    once, and finish under blocking rendezvous; `delivers` false leaves out this last proof.
    `num_microbatches` and `num_stages` are those that must be there; by default, as many as
    the table shows. The message lists all offenders and draws the table with them marked.
    """
    if isinstance(subject, LoweredPlan):
        sizes = (num_microbatches, num_stages)
        if not (sizes == (None, None) and subject.proven("complete")):
            _complete(subject, subject.placement, *sizes)
            _refuse_cycles(subject)
            subject.note(complete=True)
        (deliverable if delivers else matched)(subject)
        return
    if isinstance(subject, Plan):
        placement, schedule = subject.placement, subject.schedule
        num_stages = subject.num_stages if num_stages is None else num_stages
    else:
        placement, schedule = None, subject
    _complete(schedule, placement, num_microbatches, num_stages)
    _refuse_cycles(LoweredPlan.of(without_transfers(schedule)))
    if schedule.has_transfers:
        (deliverable if delivers else matched)(schedule)


def _complete(
    subject: Schedule | LoweredPlan,
    placement: Placement | None,
    num_microbatches: int | None,
    num_stages: int | None,
) -> None:
    """Raises `ScheduleError` unless all actions are there, once, where and when they should be."""
    table = Table.of(subject)
    stages = subject.num_stages if num_stages is None else num_stages
    microbatches = subject.num_microbatches if num_microbatches is None else num_microbatches
    idle = subject.wiring.idle if isinstance(subject, LoweredPlan) else frozenset()
    counted = _counted(table, subject.num_microbatches, stages, microbatches, idle)
    faults = [*islice(counted, ENOUGH)]
    if faults:
        table.refuse(faults, ADVICE_COUNT)
    faults = [*_placed(table, placement and placement.stages), *_ordered(table)]
    if faults:
        table.refuse(faults, ADVICE_ORDER)


def _refuse_cycles(plan: LoweredPlan) -> None:
    stuck = TableWalk(plan, Mode.FREE).stuck()
    if stuck:
        Table.of(plan).refuse_stuck(stuck, ADVICE_CYCLE, "the order of computation")


def _counted(
    table: Table, short: int, stages: int, microbatches: int, idle: Idle
) -> Iterator[Fault]:
    seen: dict[Action, list[Place]] = defaultdict(list)
    for entry in table.entries:
        seen[entry.action].append(entry.place)
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
    if short < microbatches:
        yield Fault(
            f"{microbatches} microbatches were asked for, but the table runs only {short} "
            f"(0 to {short - 1}): {microbatches - short} are dropped"
        )
    for stage in range(stages):
        for microbatch in range(min(microbatches, short)):
            yield from _cell(seen, stage, microbatch, idle)


_BACKWARDS = (Kind.BACKWARD, Kind.INPUT_GRAD, Kind.WEIGHT_GRAD)
_COMPLETE = ({Kind.FORWARD, Kind.BACKWARD}, {Kind.FORWARD, Kind.INPUT_GRAD, Kind.WEIGHT_GRAD})


def _cell(
    seen: dict[Action, list[Place]], stage: int, microbatch: int, idle: Idle
) -> Iterator[Fault]:
    has = {k: Action(stage, k, microbatch) for k in (Kind.FORWARD, *_BACKWARDS)}
    there = {kind: seen[action][0] for kind, action in has.items() if action in seen}
    if there.keys() in _COMPLETE:
        return
    optional = {kind for kind in has if (stage, kind) in idle}
    places = list(there.values())
    who = f"of stage {stage}, microbatch {microbatch}"
    backwards = [k for k in _BACKWARDS if k in there]
    if not there and Kind.FORWARD not in optional:
        names = f"{has[Kind.FORWARD]} and {has[Kind.BACKWARD]}"
        yield Fault(f"{names} are missing: there is nothing {who}")
        return
    if Kind.FORWARD not in there and Kind.FORWARD not in optional:
        yield Fault(f"{has[Kind.FORWARD]} is missing: no forward {who}", places[0])
    if Kind.BACKWARD in there:
        for kind in backwards[1:]:
            yield Fault(
                f"{has[kind]} repeats what {has[Kind.BACKWARD]} already does: "
                f"a microbatch has either B, or I and W",
                there[kind],
            )
    elif not backwards and not (Kind.BACKWARD in optional or optional >= set(_BACKWARDS[1:])):
        yield Fault(
            f"{has[Kind.BACKWARD]} is missing: no backward (B, or I and W) {who}", places[-1]
        )
    elif backwards == [Kind.INPUT_GRAD] and Kind.WEIGHT_GRAD not in optional:
        yield Fault(
            f"{has[Kind.WEIGHT_GRAD]} is missing: {has[Kind.INPUT_GRAD]} makes only the input "
            f"gradient {who}",
            places[-1],
        )
    elif backwards == [Kind.WEIGHT_GRAD] and Kind.INPUT_GRAD not in optional:
        yield Fault(
            f"{has[Kind.INPUT_GRAD]} is missing: {has[Kind.WEIGHT_GRAD]} needs what it keeps {who}",
            places[-1],
        )


def _placed(table: Table, placement: tuple[tuple[int, ...], ...] | None) -> Iterator[Fault]:
    home: dict[tuple[int, int], tuple[int, Action]] = {}
    for entry in table.entries:
        rank, position, action = entry.rank, entry.position, entry.action
        if not action.kind.computes:
            continue
        if placement is not None and rank not in placement[action.stage]:
            homes = "+".join(map(str, placement[action.stage]))
            yield Fault(
                f"{action} is misplaced: rank {rank} runs it, but stage {action.stage} "
                f"is placed on rank {homes}",
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


def _ordered(table: Table) -> Iterator[Fault]:
    entry_of = {(entry.rank, entry.action): entry for entry in table.entries}
    for entry in table.entries:
        rank, action = entry.rank, entry.action
        if action.kind not in _BEFORE:
            continue
        needed = Action(action.stage, _BEFORE[action.kind], action.microbatch)
        before = entry_of.get((rank, needed))
        if before is not None and _turn(before) >= _turn(entry):
            same = before.position == entry.position
            where = "in the same cell" if same else f"only at position {before.position}"
            yield Fault(
                f"rank {rank} runs {action} at position {entry.position}, "
                f"but {needed}, which it needs, {where}",
                entry.place,
            )
    for entry in table.entries:
        if entry.action.kind is not Kind.RECOMPUTE:
            continue
        for kind in (Kind.BACKWARD, Kind.INPUT_GRAD):
            use = Action(entry.action.stage, kind, entry.action.microbatch)
            served = entry_of.get((entry.rank, use))
            if served is not None and _turn(served) <= _turn(entry):
                yield Fault(
                    f"rank {entry.rank} runs {entry.action} at position {entry.position}, after "
                    f"{use} at position {served.position}, which it should serve",
                    entry.place,
                )


def _turn(entry: Entry) -> tuple[int, int]:
    return entry.position, entry.turn
