"""The optimizer's update of a model that is cut into stages."""

from collections.abc import Sequence
from dataclasses import replace

import jax
import optax

from octojax.layers.cut import StagedLoss
from octojax.mesh import PipelineMesh
from octojax.update import UpdatePlan, build_update


def trained_units(staged: StagedLoss) -> tuple[int, ...]:
    """Returns the units that the optimizer sees: every leaf of the parameters, in their order."""
    units = staged.units
    trained = [u for u, unit in enumerate(units) if unit.leaf < len(staged.traced.params)]
    return tuple(sorted(trained, key=lambda u: (units[u].leaf, units[u].index or 0)))


def update_of(
    optimizer: optax.GradientTransformation,
    staged: StagedLoss,
    owners: Sequence[int],
    mesh: PipelineMesh,
) -> UpdatePlan:
    """Returns the update as programs per rank; `owners[u]` is the rank that updates unit u.

    Every process has the scalars on its first rank. Raises `PlanError` as `build_update` does.
    """
    by_leaf: dict[int, list[int]] = {}
    for unit in trained_units(staged):
        by_leaf.setdefault(staged.units[unit].leaf, []).append(unit)
    leaves, ranks_of_leaves = [], []
    for _, mine in sorted(by_leaf.items()):
        aval, ranks = staged.unit_avals[mine[0]], [owners[u] for u in mine]
        rows = staged.units[mine[0]].index is not None
        shape = (len(mine), *aval.shape) if rows else aval.shape
        leaves.append(jax.ShapeDtypeStruct(shape, aval.dtype))
        ranks_of_leaves.append(ranks if rows else ranks[0])
    tree = staged.traced.params.unflatten(leaves)
    extra = {"value": jax.ShapeDtypeStruct((), staged.emits[0].dtype)}
    plan = build_update(optimizer, tree, ranks_of_leaves, mesh.num_ranks, extra=extra)
    firsts: dict[int, int] = {}
    for rank in mesh.ranks:
        for process in rank.processes:
            firsts.setdefault(process, rank.index)
    return replace(plan, update=plan.update.with_scalars_on(dict.fromkeys(firsts.values())))
