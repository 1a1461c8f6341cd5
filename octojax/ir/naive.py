"""The naive rule: receive just before use, send just after (the paper's Fig. 4(a)).

Under blocking rendezvous this deadlocks for nearly every schedule but GPipe; the pass `reorder`
repairs it.
"""

from collections.abc import Iterator

from octojax.ir.instruction import Instruction, Receive, Run, Send
from octojax.ir.lowered import LoweredPlan
from octojax.ir.lowering import Crossings, without_transfers
from octojax.ir.schedule import Schedule


def placed_naively(plan: LoweredPlan) -> LoweredPlan:
    """Returns the units of a plan with every receive just before its use, every send just after."""
    return plan.with_ranks(tuple(tuple(_around(row, plan.crossings)) for row in plan.units))


def lower_naively(schedule: Schedule) -> Schedule:
    """Returns the table of a schedule lowered by the naive rule; its own transfers are dropped."""
    rows = placed_naively(LoweredPlan.of(without_transfers(schedule))).ranks
    return Schedule(tuple(tuple(x.cell for x in row) for row in rows))  # type: ignore[misc]


def _around(units: tuple[Run, ...], crossings: Crossings) -> Iterator[Instruction]:
    for run in units:
        for action in run.actions:
            if action in crossings.bring:
                yield Receive(crossings.bring[action])
        yield run
        for action in run.actions:
            if action in crossings.take:
                yield Send(crossings.take[action])
