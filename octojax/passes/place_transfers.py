"""Spell out sends and receives by the naive rule."""

from dataclasses import dataclass
from typing import ClassVar

from octojax.ir import LoweredPlan, Plan, Schedule, Wiring
from octojax.ir.lowering import without_transfers
from octojax.ir.naive import placed_naively


@dataclass(frozen=True)
class PlaceTransfers:
    """Put every receive just before its use and every send just after its producer.

        before   0F0 0B0                      1F0 1B0
        after    0F0 0SEND_F0 0RECV_B0 0B0    1RECV_F0 1F0 1B0 1SEND_B0

    The rule of the paper's Fig. 4(a), and where `ReorderComm` starts. Takes a valid plan;
    transfers already there are dropped first. With the model's `wiring`, actions that have
    nothing to compute are left out, and boundaries that carry nothing get no transfer. Promises
    a table that runs with transfers that do not block; under rendezvous it deadlocks for nearly
    every schedule but GPipe.
    """

    name: ClassVar[str] = "transfers"
    wiring: Wiring | None = None

    def __call__(self, plan: Plan | Schedule) -> LoweredPlan:
        schedule = plan if isinstance(plan, Schedule) else plan.schedule
        bare = without_transfers(schedule)
        whole = bare if isinstance(plan, Schedule) else plan.with_schedule(bare)
        return placed_naively(LoweredPlan.of(whole, self.wiring or Wiring.chain(plan.num_stages)))
