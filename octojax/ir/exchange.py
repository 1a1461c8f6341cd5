"""What ranks exchange once their computation is done: sums, results and new parameters.

G   sums of gradients of a parameter that several ranks keep, to its owner
E   results of the loss that several ranks make, to the first of them
P   the updated parameter, from its owner to the others that keep it
"""

from collections import defaultdict

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
