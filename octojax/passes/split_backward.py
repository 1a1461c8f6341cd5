"""Split each backward, so that what nobody waits for can be moved."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from octojax.ir import Action, Item, Kind, Schedule
from octojax.passes.rewriting import PlanOrSchedule, rewritten


@dataclass(frozen=True)
class SplitBackward:
    """Replace every `B` by `I` then `W`, so that later passes may move `W`.

        before   0F0 0B0
        after    0F0 0I0 0W0

    Needs nothing, and keeps every order there was. A `B` inside an overlapped pair stays: the
    pair is one unit.
    """

    name: ClassVar[str] = "split"

    def __call__(self, plan: PlanOrSchedule) -> PlanOrSchedule:
        return rewritten(plan, _split)


def _split(schedule: Schedule) -> Schedule:
    return Schedule(tuple(tuple(_row(rank)) for rank in schedule.ranks))


def _row(items: tuple[Item, ...]) -> Iterator[Item]:
    for item in items:
        if isinstance(item, Action) and item.kind is Kind.BACKWARD:
            yield Action(item.stage, Kind.INPUT_GRAD, item.microbatch)
            yield Action(item.stage, Kind.WEIGHT_GRAD, item.microbatch)
        else:
            yield item
