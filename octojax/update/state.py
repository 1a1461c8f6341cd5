"""The optimizer state of the whole tree, from what the ranks keep of it, and back."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Sharding

from octojax.arrays import local, put
from octojax.compat import is_key, key_impl
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
        leaves[piece.leaf].append(local(value))
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


def read_state(plan: UpdatePlan, places: Places, leaves: Sequence[Any]) -> OptState:
    """Returns what the ranks of this process keep of an optimizer state that is at hand in
    slices: `leaves[i][index]` reads that of the i-th leaf (PRNG keys as integers)."""

    def piece(k: int, rank: int) -> jax.Array:
        leaf, aval = leaves[plan.state_pieces[k].leaf], piece_aval(plan, k)
        where, prefix = places.of_state(plan, k, rank), _index_of(plan, k)
        assert where is not None, "a rank of this process"
        if is_key(aval):
            values = jax.random.wrap_key_data(jnp.asarray(leaf[prefix]), impl=key_impl(aval))
            return put(values, where)
        return jax.make_array_from_callback(
            aval.shape, where, lambda index: np.array(leaf[_inside(prefix, index)], aval.dtype)
        )

    return tuple(
        tuple(piece(k, rank) for k in plan.states_on(rank)) if rank in places.local_ranks else None
        for rank in range(plan.num_ranks)
    )


def _inside(prefix: tuple[Any, ...], index: Any) -> tuple[Any, ...]:
    """Returns the index of a leaf that is `index` of the part of it that `prefix` takes."""
    rest = list(index)
    result: list[Any] = []
    for entry in prefix:
        if not isinstance(entry, slice):
            result.append(entry)
            continue
        inner = rest.pop(0)
        if entry == slice(None):
            result.append(inner)
        else:
            first, last, _ = inner.indices(entry.stop - entry.start)
            result.append(slice(entry.start + first, entry.start + last))
    return (*result, *rest)


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
    leaf, index = leaves[plan.state_pieces[k].leaf], _index_of(plan, k)
    return leaf[index] if index else leaf


def _index_of(plan: UpdatePlan, k: int) -> tuple[Any, ...]:
    """Which part of its leaf a piece is: () for all of it."""
    piece = plan.state_pieces[k]
    if piece.row is None:
        return ()
    layout = plan.state_layouts[piece.leaf]
    assert isinstance(layout, Rows), "a piece with a row"
    start = piece.row * layout.block
    own = piece.row if layout.block == 1 else slice(start, start + layout.block)
    return (*(slice(None),) * layout.axis, own)


def join_pieces(pieces: Sequence[Any], layout: Rows) -> jax.Array:
    """Returns the leaf of which `pieces` are the rows, on the devices of the first."""
    here = [jax.device_put(x, pieces[0].sharding) for x in pieces]
    join = jnp.stack if layout.block == 1 else jnp.concatenate
    return join(here, axis=layout.axis)


def _copy(leaf: Any, sharding: Sharding | None) -> jax.Array:
    """Returns a fresh array on `sharding`: the caller's must outlive the donation of ours."""
    assert sharding is not None, "a rank of this process"
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return put(leaf, sharding)
    return put(np.asarray(leaf), sharding)
