"""What ranks do at the ends of a step, beside their actions: the data axis, and the update.

    rank 1   gather . . 1F0 1B0 | reduce | update          ends the step
    rank 0   gather 0F0 . . . . 0B0 | reduce | update      when the last rank is through

Each stage has collectives of its own over its rank's replicas, one after the other (Rajbhandari
et al., "ZeRO" (2020), section 5). They start when the rank's last action has ended, beside the
drain of the others.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from octojax.ir import Placement, Profile
from octojax.ir.collectives import Group

Floats = NDArray[np.float64]


def data_axis_s(
    group: Group, params_bytes: float, gradients_bytes: float, zero: int
) -> tuple[float, float]:
    """Returns what replicas take before a step, and after it, for parameters and gradients of so
    many bytes on each: `zero` 0 reduces gradients, 1 gathers new parameters, too, 3 gathers
    parameters before."""
    if zero == 0:
        return 0.0, group.all_reduce_s(gradients_bytes)
    after = group.reduce_scatter_s(gradients_bytes)
    gather = group.all_gather_s(params_bytes)
    return (0.0, after + gather) if zero == 1 else (gather, after)


@dataclass(frozen=True, eq=False)
class StageEnds:
    """Bytes of every layer, from which the ends of stages are cut."""

    profile: Profile
    params: Floats
    state: Floats
    gradient_ratio: float

    @classmethod
    def of(cls, profile: Profile) -> "StageEnds | None":
        """Returns None for a machine without replicas and updates that take time."""
        if not profile.machine.has_step_ends:
            return None
        return cls(
            profile,
            np.array([x.param_bytes for x in profile.layers], dtype=np.float64),
            np.array([x.state_bytes for x in profile.layers], dtype=np.float64),
            float(dict(profile.extra).get("gradient_ratio", 1.0)),
        )

    def cut(self, starts: NDArray[np.int64]) -> Floats:
        """Returns (stages, 2) seconds of stages that begin at those layers."""
        machine = self.profile.machine
        group = machine.between_replicas()
        rows = []
        for params, state in zip(
            np.add.reduceat(self.params, starts).tolist(),
            np.add.reduceat(self.state, starts).tolist(),
            strict=True,
        ):
            before, after = data_axis_s(group, params, params * self.gradient_ratio, machine.zero)
            own = state / machine.replicas if machine.zero else state
            rows.append((before, after + own / machine.update_bytes_per_s))
        return np.array(rows)


def ends_of_ranks(ends_s: Floats | None, placement: Placement) -> tuple[tuple[float, float], ...]:
    """Returns what every rank takes before its first action and after its last, in seconds."""
    return rank_ends(ends_s, [sorted(stages) for stages in placement.ranks])


def rank_ends(
    ends_s: Floats | None, stages_of_rank: Sequence[Sequence[int]]
) -> tuple[tuple[float, float], ...]:
    """Returns the same for ranks that hold those stages, in ascending order."""
    if ends_s is None:
        return tuple((0.0, 0.0) for _ in stages_of_rank)
    rows = ends_s.tolist()
    return tuple(
        (sum(rows[s][0] for s in own), sum(rows[s][1] for s in own)) for own in stages_of_rank
    )
