"""The optimizer state of the whole tree, from what the ranks keep of it, and back."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Sharding

from octojax.update.layout import Rows
from octojax.update.places import Places
from octojax.update.plan import UpdatePlan

Fetch = Callable[[Any, int, jax.ShapeDtypeStruct], jax.Array]

OptState = tuple[tuple[jax.Array, ...] | None, ...]
"""Per rank its pieces in the order of `plan.states_on(rank)`; None: another process's."""


def gather_state(plan: UpdatePlan, opt_state: OptState, fetch: Fetch | None = None) -> Any:
    """Returns the state as the tree that `optimizer.init` makes of the whole parameters.

    Leaves stay on their devices, rows of a stacked one are joined on those of its first. Where
    ranks are in other processes, `fetch(piece, rank, shape)` returns here what rank `rank` has;
    all processes call it alike.
    """
    pieces: list[Any] = [None] * len(plan.state_pieces)
    for rank, mine in reversed(list(enumerate(opt_state))):
        for k, piece in zip(plan.states_on(rank), mine or (), strict=mine is not None):
            pieces[k] = piece
    leaves: list[list[Any]] = [[] for _ in plan.state_layouts]
    for k, (piece, value) in enumerate(zip(plan.state_pieces, pieces, strict=True)):
        if fetch is not None and piece.rank is not None:
            value = fetch(value, piece.rank, piece_aval(plan, k))
        leaves[piece.leaf].append(value)
    return plan.state_tree.unflatten(
        [
            join_pieces(values, layout) if isinstance(layout, Rows) else values[0]
            for values, layout in zip(leaves, plan.state_layouts, strict=True)
        ]
    )


def scatter_state(plan: UpdatePlan, places: Places, tree: Any) -> OptState:
    """Returns what the ranks of this process keep of a whole optimizer state, placed there.

    Raises `ValueError` naming every leaf whose shape or type does not fit.
    """
    leaves = state_leaves(plan, tree)
    return tuple(
        tuple(
            _copy(_piece(leaves, plan, k), places.of_state(plan, k, rank))
            for k in plan.states_on(rank)
        )
        if rank in places.local_ranks
        else None
        for rank in range(plan.num_ranks)
    )


def state_leaves(plan: UpdatePlan, tree: Any) -> list[Any]:
    """Returns the flat leaves of a whole optimizer state.

    Raises `ValueError` where structure, shapes or types are not those of the plan's optimizer.
    """
    leaves, structure = jax.tree.flatten(tree)
    if structure != plan.state_tree:
        raise ValueError(
            f"this optimizer state has the structure {structure}, the optimizer's own is "
            f"{plan.state_tree}; restore it with the optimizer that it was saved with"
        )
    wrong = [
        f"{name}: {leaf.dtype}{list(leaf.shape)} instead of {aval.dtype}{list(aval.shape)}"
        for name, leaf, aval in zip(plan.state_names, leaves, plan.state_avals, strict=True)
        if (leaf.shape, leaf.dtype) != (aval.shape, aval.dtype)
    ]
    if wrong:
        raise ValueError(f"{len(wrong)} leaves of the state do not fit: {'; '.join(wrong)}")
    return leaves


def piece_aval(plan: UpdatePlan, k: int) -> jax.ShapeDtypeStruct:
    """Returns shape and type of a piece of the state."""
    leaf = plan.state_pieces[k].leaf
    aval, layout = plan.state_avals[leaf], plan.state_layouts[leaf]
    shape = layout.piece_shape(aval.shape) if isinstance(layout, Rows) else aval.shape
    return jax.ShapeDtypeStruct(shape, aval.dtype)


def _piece(leaves: Sequence[Any], plan: UpdatePlan, k: int) -> Any:
    piece = plan.state_pieces[k]
    leaf, layout = leaves[piece.leaf], plan.state_layouts[piece.leaf]
    if piece.row is None:
        return leaf
    assert isinstance(layout, Rows), "a piece with a row"
    start = piece.row * layout.block
    index = (slice(None),) * layout.axis
    return leaf[(*index, piece.row if layout.block == 1 else slice(start, start + layout.block))]


def join_pieces(pieces: Sequence[Any], layout: Rows) -> jax.Array:
    """Returns the leaf of which `pieces` are the rows, on the devices of the first."""
    here = [jax.device_put(x, pieces[0].sharding) for x in pieces]
    join = jnp.stack if layout.block == 1 else jnp.concatenate
    return join(here, axis=layout.axis)


def _copy(leaf: Any, sharding: Sharding | None) -> jax.Array:
    """A fresh array on `sharding`: the caller's must outlive the donation of ours."""
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return jax.device_put(leaf, sharding)
    return jax.device_put(np.asarray(leaf), sharding)
