"""Join actions that follow each other into one program."""

from collections import Counter
from dataclasses import dataclass
from itertools import pairwise
from typing import ClassVar

from octojax.ir import Action, Cargo, Instruction, Kind, LoweredPlan, Run

_BACKWARD = (Kind.BACKWARD, Kind.INPUT_GRAD)
_Kind = tuple[int, Kind]


@dataclass(frozen=True)
class JoinActions:
    """Join neighbours of one microbatch that continue each other, where nothing stands between.

        before   1RECV_F0 1F0 1B0 1SEND_B0      the last rank
        after    1RECV_F0 1F0+1B0 1SEND_B0

    One program is launched instead of two, and what goes from one to the other never leaves it.
    A pair of kinds is joined only if it can be wherever the stage runs, so that joining replaces
    compiled programs and never adds any. Takes a lowered plan; promises the same order of
    everything, and so the same transfers delivered.
    """

    name: ClassVar[str] = "join"

    def __call__(self, plan: LoweredPlan) -> LoweredPlan:
        total: Counter[_Kind] = Counter(
            _kind(action)
            for row in plan.ranks
            for x in row
            if isinstance(x, Run)
            for action in x.actions
        )
        joinable: Counter[tuple[_Kind, _Kind]] = Counter(
            (_kind(first.actions[-1]), _kind(second.actions[0]))
            for row in plan.ranks
            for first, second in pairwise(row)
            if isinstance(first, Run)
            and isinstance(second, Run)
            and _continues(first, second, plan)
        )
        accepted = {pair for pair, n in joinable.items() if n == total[pair[0]] == total[pair[1]]}
        return plan.with_ranks(tuple(_joined(row, plan, accepted) for row in plan.ranks))


def _joined(
    row: tuple[Instruction, ...], plan: LoweredPlan, accepted: set[tuple[_Kind, _Kind]]
) -> tuple[Instruction, ...]:
    joined: list[Instruction] = []
    for x in row:
        last = joined[-1] if joined else None
        if (
            isinstance(x, Run)
            and isinstance(last, Run)
            and (_kind(last.actions[-1]), _kind(x.actions[0])) in accepted
            and _continues(last, x, plan)
        ):
            joined[-1] = Run((*last.actions, *x.actions))
        else:
            joined.append(x)
    return tuple(joined)


def _kind(action: Action) -> _Kind:
    return action.stage, action.kind


def _continues(first: Run, second: Run, plan: LoweredPlan) -> bool:
    """Whether the second reads what the first makes, or is of the same stage."""
    if first.pair or second.pair:
        return False
    a, b = first.actions[-1], second.actions[0]
    if a.microbatch != b.microbatch or not (a.kind.computes and b.kind.computes):
        return False
    if a.stage == b.stage:
        return True
    if a.kind is b.kind is Kind.FORWARD:
        return b.stage == a.stage + 1 and plan.wiring.carries(Cargo.OUTPUT, a.stage)
    return a.kind in _BACKWARD and plan.crossings.takes(b) == ("B", a.stage, a.microbatch)
