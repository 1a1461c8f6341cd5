"""Spell out sends and receives by the naive rule."""

from dataclasses import dataclass

from octojax.ir.lowering import lower_naively
from octojax.passes.rewriting import PlanOrSchedule, rewritten


@dataclass(frozen=True)
class LowerTransfers:
    """Put every receive just before its use and every send just after its producer.

        before   0F0 0B0                      1F0 1B0
        after    0F0 0SEND_F0 0RECV_B0 0B0    1RECV_F0 1F0 1B0 1SEND_B0

    The rule of the paper's Fig. 4(a), and where `ReorderComm` starts. Transfers already there
    are dropped first. The result runs with transfers that do not block; under rendezvous it
    deadlocks for nearly every schedule but GPipe.
    """

    def __call__(self, plan: PlanOrSchedule) -> PlanOrSchedule:
        return rewritten(plan, lower_naively)
