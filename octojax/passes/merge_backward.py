"""Join the halves of a backward again, where splitting gains nothing."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import zip_longest
from typing import ClassVar

from octojax.ir import Action, Item, Kind, Schedule
from octojax.passes.rewriting import PlanOrSchedule, rewritten


@dataclass(frozen=True)
class MergeBackward:
    """Replace `I` by `B` and drop its `W`.

        before   0F0 0I0 0F1 0W0 0I1 0W1
        adjacent 0F0 0I0 0F1 0W0 0B1
        all      0F0 0B0 0F1 0B1

    Fused, the two share work and keep nothing in between. With `only_adjacent` (the default)
    only a `W` that comes right after its `I` is joined, and no order changes; without, every
    `W` moves up to its `I`.
    """

    name: ClassVar[str] = "merge"
    only_adjacent: bool = True

    def __call__(self, plan: PlanOrSchedule) -> PlanOrSchedule:
        return rewritten(plan, self._merge)

    def _merge(self, schedule: Schedule) -> Schedule:
        return Schedule(tuple(tuple(self._row(rank)) for rank in schedule.ranks))

    def _row(self, items: tuple[Item, ...]) -> Iterator[Item]:
        joined = {
            weight
            for item, after in zip_longest(items, items[1:])
            if (weight := _weight_of(item)) is not None
            and (weight == after if self.only_adjacent else weight in items)
        }
        for item in items:
            if item in joined:
                continue
            if isinstance(item, Action) and _weight_of(item) in joined:
                yield Action(item.stage, Kind.BACKWARD, item.microbatch)
            else:
                yield item


def _weight_of(item: Item) -> Action | None:
    if isinstance(item, Action) and item.kind is Kind.INPUT_GRAD:
        return Action(item.stage, Kind.WEIGHT_GRAD, item.microbatch)
    return None
