"""A schedule and its placement as flat arrays: what the compiled simulator reads."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from octojax.errors import ScheduleError
from octojax.ir import Action, Item, Overlap, Placement, Plan, Schedule
from octojax.simulate.costs import BACKWARD, FORWARD, KINDS

Ints = NDArray[np.int32]

CODES = {kind: code for code, kind in enumerate(KINDS)}


@dataclass(frozen=True, eq=False)
class Table:
    """The computing actions of a schedule as arrays.

    `items` is (n, 5) int32, rank after rank in program order: kind code, stage, microbatch,
    and for an overlapped pair the stage and microbatch of its backward (else -1, -1).
    Rank r's items are `rank_start[r]` to `rank_start[r + 1] - 1`. `holds[r, s]` tells whether
    rank r holds the state of stage s. A tuner may build and change these arrays itself.
    """

    items: Ints
    rank_start: Ints
    holds: NDArray[np.bool_]
    num_microbatches: int

    @classmethod
    def of(cls, schedule: Schedule | Plan, placement: Placement | None = None) -> "Table":
        """Returns the table of a schedule (or plan) without transfer actions."""
        if isinstance(schedule, Plan):
            schedule, placement = schedule.schedule, placement or schedule.placement
        placement = placement or schedule.placement
        rows = [_row(item) for rank in schedule.ranks for item in rank]
        counts = [len(rank) for rank in schedule.ranks]
        holds = np.zeros((schedule.num_ranks, placement.num_stages), dtype=np.bool_)
        for stage, ranks in enumerate(placement.stages):
            holds[list(ranks), stage] = True
        return cls(
            np.array(rows, dtype=np.int32).reshape(-1, 5),
            np.cumsum([0, *counts], dtype=np.int32),
            holds,
            schedule.num_microbatches,
        )

    @property
    def num_ranks(self) -> int:
        return len(self.rank_start) - 1

    @property
    def num_stages(self) -> int:
        return self.holds.shape[1]

    def item(self, index: int) -> Item:
        """Returns the action or overlapped pair in row `index` of `items`."""
        kind, stage, microbatch, stage2, microbatch2 = map(int, self.items[index])
        action = Action(stage, KINDS[kind], microbatch)
        if stage2 < 0:
            return action
        return Overlap(action, Action(stage2, KINDS[BACKWARD], microbatch2))

    def to_schedule(self) -> Schedule:
        """Returns the schedule that these arrays describe."""
        bounds = self.rank_start
        return Schedule(
            tuple(
                tuple(self.item(i) for i in range(bounds[r], bounds[r + 1]))
                for r in range(self.num_ranks)
            )
        )


def _row(item: Item) -> tuple[int, int, int, int, int]:
    if isinstance(item, Overlap):
        f, b = item.actions
        return (FORWARD, f.stage, f.microbatch, b.stage, b.microbatch)
    code = CODES.get(item.kind)
    if code is None:
        raise ScheduleError(
            f"{item} is not a computing action; lowered tables are simulated by "
            f"simulate(..., mode='blocking'), or drop their transfers with without_transfers()"
        )
    return (code, item.stage, item.microbatch, -1, -1)
