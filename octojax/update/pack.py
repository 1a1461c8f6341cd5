"""Small values of any type as one vector of bytes, exact to the bit."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from octojax.update.layout import Partial, Rows

_JOINS = {
    "add": jnp.sum,
    "mul": jnp.prod,
    "max": jnp.max,
    "min": jnp.min,
    "and": jnp.all,
    "or": jnp.any,
    "same": lambda x, axis: x[0],
}


def pack(values: Sequence[Any], width: int) -> jax.Array:
    """Returns the bytes of `values` one after the other, filled up with zeros: uint8[width]."""
    parts = [_to_bytes(value) for value in values]
    missing = width - sum(part.shape[0] for part in parts)
    return jnp.concatenate([*parts, jnp.zeros(missing, jnp.uint8)])


def unpack(bytes_: jax.Array, offset: int, shape: Sequence[int], dtype: Any) -> jax.Array:
    """Returns the values of `shape` and `dtype` whose bytes start at `offset` of the last axis."""
    itemsize = np.dtype(dtype).itemsize
    count = int(np.prod(shape, dtype=np.int64)) * itemsize
    lead = bytes_.shape[:-1]
    piece = jax.lax.slice_in_dim(bytes_, offset, offset + count, axis=-1)
    if dtype == np.bool_:
        return piece.reshape(*lead, *shape) != 0
    if itemsize == 1:
        return jax.lax.bitcast_convert_type(piece.reshape(*lead, *shape), dtype)
    return jax.lax.bitcast_convert_type(piece.reshape(*lead, *shape, itemsize), dtype)


def join_shares(shares: jax.Array, layout: Partial) -> jax.Array:
    """Returns the reduction of which `shares[i]` are parts."""
    return _JOINS[layout.how](shares, axis=0).astype(shares.dtype)


def join_rows(rows: Sequence[jax.Array], layout: Rows) -> jax.Array:
    """Returns the whole array of rows by rank (`[rows of the rank, *row]`), ranks ascending."""
    stack = layout.stack
    every = jnp.concatenate(rows)
    order = [row for rank in stack.ranks for row in stack.rows_by_rank[rank]]
    if order != sorted(order):
        every = every[np.argsort(order)]
    whole = jnp.moveaxis(every, 0, layout.axis)
    shape = list(whole.shape[: layout.axis]) + list(whole.shape[layout.axis + 1 :])
    shape[layout.axis] *= len(stack.owners)
    return whole.reshape(shape)


def _to_bytes(value: Any) -> jax.Array:
    value = jnp.asarray(value)
    if value.dtype == np.bool_:
        value = value.astype(jnp.uint8)
    return jax.lax.bitcast_convert_type(value, jnp.uint8).reshape(-1)
