"""What ranks exchange once their computation is done: sums, results and new parameters.

G   sums of gradients of a parameter that several ranks keep, to its owner
E   results of the loss that several ranks make, to the first of them
U   what a phase of the optimizer's update hands to the next, on another rank
P   the updated parameter, from its owner to the others that keep it
"""

from collections import defaultdict
from collections.abc import Collection, Sequence

from octojax.ir.instruction import Instruction, Receive, Rows, Send, Update
from octojax.ir.lowered import LoweredPlan
from octojax.ir.transfer import Cargo, Transfer
from octojax.ir.wiring import holders_of, owner_of


def owners(plan: LoweredPlan) -> tuple[int, ...]:
    """Returns, per parameter, the rank that updates it: that of its lowest stage; -1: none."""
    return tuple(owner_of(unit, plan.ranks_of) for unit in plan.wiring.units)


def holders(plan: LoweredPlan) -> tuple[tuple[int, ...], ...]:
    """Returns, per parameter, the ranks that keep it, ascending."""
    return tuple(holders_of(unit, plan.ranks_of) for unit in plan.wiring.units)


def exchanges(plan: LoweredPlan) -> tuple[Transfer, ...]:
    """Returns the transfers that end a step, in an order that all ranks keep."""
    sums: dict[tuple[int, int], list[int]] = defaultdict(list)
    copies: dict[tuple[int, int], list[int]] = defaultdict(list)
    for number, unit in enumerate(plan.wiring.units):
        owner = owner_of(unit, plan.ranks_of)
        summing = {rank for stage in unit.summers for rank in plan.ranks_of[stage]}
        for rank in holders_of(unit, plan.ranks_of):
            if rank != owner:
                copies[owner, rank].append(number)
                if rank in summing:
                    sums[rank, owner].append(number)
    results: dict[tuple[int, int], list[int]] = defaultdict(list)
    for number, stages in enumerate(plan.wiring.results):
        makers = sorted({rank for stage in stages for rank in plan.ranks_of[stage]})
        for rank in makers[1:]:
            results[rank, makers[0]].append(number)
    return tuple(
        Transfer(source, target, kind, parts=tuple(parts))
        for kind, pairs in (
            (Cargo.SUMS, sums),
            (Cargo.RESULTS, results),
            (Cargo.PARAMETERS, copies),
        )
        for (source, target), parts in sorted(pairs.items())
    )


Phases = Sequence[tuple[Collection[int], Sequence[tuple[int, int]]]]
"""Per phase of an update the ranks that have work in it, and then `(source, target)` of what they
hand on, in an order that all ranks keep."""


def update_rows(num_ranks: int, phases: Phases) -> Rows:
    """Returns what every rank does in an optimizer's update.

    UPDATE0 RECV_U(1->0;0) UPDATE1
    UPDATE0 SEND_U(1->0;0)
    """
    rows: list[list[Instruction]] = [[] for _ in range(num_ranks)]
    for phase, (ranks, pairs) in enumerate(phases):
        for rank in ranks:
            rows[rank].append(Update(phase))
        for source, target in pairs:
            transfer = Transfer(source, target, Cargo.UPDATE, parts=(phase,))
            rows[source].append(Send(transfer))
            rows[target].append(Receive(transfer))
    return tuple(map(tuple, rows))


def with_update(plan: LoweredPlan, phases: Phases) -> LoweredPlan:
    """Returns the plan with an optimizer's update, after sums and results, before new copies.

    before   ... RECV_G(1->0;4) SEND_P(0->1;4)
    after    ... RECV_G(1->0;4) UPDATE0 RECV_U(1->0;0) UPDATE1 SEND_P(0->1;4)
    """
    rows = []
    for row, update in zip(
        plan.without_update().ranks, update_rows(plan.num_ranks, phases), strict=True
    ):
        copies = tuple(filter(_is_copy, row))
        rows.append((*(x for x in row if not _is_copy(x)), *update, *copies))
    return plan.with_ranks(tuple(rows))


def end_rows(plan: LoweredPlan) -> Rows:
    """Returns what every rank does from the optimizer's update on: that, and new copies."""
    return tuple(tuple(x for x in row if after_gradients(x)) for row in plan.ranks)


def after_gradients(x: Instruction) -> bool:
    """Whether an instruction belongs to the update or to the copies of what that makes."""
    return isinstance(x, Update) or (
        isinstance(x, Send | Receive) and x.transfer.kind in (Cargo.UPDATE, Cargo.PARAMETERS)
    )


def _is_copy(x: Instruction) -> bool:
    return isinstance(x, Send | Receive) and x.transfer.kind is Cargo.PARAMETERS
