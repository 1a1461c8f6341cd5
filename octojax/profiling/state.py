"""Bytes of weights, gradients and optimizer state per layer, from the optimizer itself."""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
import optax

from octojax.compat import is_float, num_bytes
from octojax.layers.cut import StagedLoss
from octojax.programs.accumulator import accumulator_dtype
from octojax.stages.program import Role, Stage
from octojax.update import locate_state


def state_bytes(
    staged: StagedLoss,
    stages: Sequence[Stage],
    optimizer: optax.GradientTransformation | None = None,
) -> tuple[int, ...]:
    """Returns per layer the bytes of its weights, their gradient accumulators (at least
    float32), and what `optimizer` (None: nothing) keeps for them.

    A weight that several layers read belongs to the first of them. State that belongs to no
    parameter (counters) counts for every layer.
    """
    owners = _owners(stages, len(staged.units))
    totals = [0] * len(stages)
    for unit, aval in enumerate(staged.unit_avals):
        trained = staged.units[unit].leaf < len(staged.traced.params) and is_float(aval)
        totals[owners[unit]] += num_bytes(aval) + (_accumulator(aval) if trained else 0)
    if optimizer is None:
        return tuple(totals)
    params, ranks = _tree(staged, owners)
    for size, rank in locate_state(optimizer, params, ranks, len(stages)):
        for layer in range(len(stages)) if rank is None else (rank,):
            totals[layer] += size
    return tuple(totals)


def _owners(stages: Sequence[Stage], num_units: int) -> list[int]:
    """Per unit, the first layer that reads it; 0 if none does."""
    owners: dict[int, int] = {}
    for at, stage in enumerate(stages):
        for program in (stage.forward, stage.backward):
            for ref in program.reads:
                if ref.role is Role.PARAM:
                    owners.setdefault(ref.index, at)
    return [owners.get(unit, 0) for unit in range(num_units)]


def _accumulator(aval: Any) -> int:
    itemsize = accumulator_dtype(aval.dtype).itemsize
    return int(np.prod(aval.shape, dtype=np.int64)) * itemsize


def _tree(staged: StagedLoss, owners: Sequence[int]) -> tuple[Any, list[int | list[int]]]:
    """The shapes of the user's tree of parameters, and the owner of each leaf or of its rows."""
    params = staged.traced.params
    units: dict[int, list[int]] = {}
    for unit, where in enumerate(staged.units):
        units.setdefault(where.leaf, []).append(unit)
    leaves, ranks = [], []
    for leaf, aval in enumerate(params.avals):
        mine = sorted(units.get(leaf, ()), key=lambda u: staged.units[u].index or 0)
        rows = bool(mine) and staged.units[mine[0]].index is not None
        each = [owners[u] for u in mine] or [0]
        leaves.append(jax.ShapeDtypeStruct(aval.shape, aval.dtype))
        ranks.append(each if rows else each[0])
    return params.unflatten(leaves), ranks
