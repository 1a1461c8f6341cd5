"""End the step: sums to the owners of shared parameters, results to one rank, new copies back."""

from dataclasses import dataclass
from typing import ClassVar

from octojax.ir import Instruction, LoweredPlan, Receive, Run, Send, Update
from octojax.ir.exchange import exchanges


@dataclass(frozen=True)
class PlaceExchanges:
    """Give every parameter that several ranks keep one owner, and send it what it needs.

        before   ... 0B3                               ... 1B3
        after    ... 0B3 RECV_G(1->0;4) SEND_P(0->1;4)  ... 1B3 SEND_G(1->0;4) RECV_P(0->1;4)

    Parameter 4 is tied: stages on both ranks read it. The rank of the lowest stage owns it, adds
    up the sums of its gradient (G), updates it, and sends it back (P, after the update). Results
    of the loss that several ranks make, as in a bidirectional pipeline, go to the first of them
    (E). Takes a lowered plan; promises that every rank has these in one common order, so that the
    table stays deliverable.
    """

    name: ClassVar[str] = "ownership"

    def __call__(self, plan: LoweredPlan) -> LoweredPlan:
        rows: list[list[Instruction]] = [
            [x for x in row if isinstance(x, Run | Update) or x.transfer.kind.crosses_stages]
            for row in plan.without_update().ranks
        ]
        for transfer in exchanges(plan):
            rows[transfer.source].append(Send(transfer))
            rows[transfer.target].append(Receive(transfer))
        return plan.with_ranks(tuple(map(tuple, rows)))
