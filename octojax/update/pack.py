"""Small values of any type as one vector of bytes, exact to the bit."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def pack(values: Sequence[Any], width: int) -> jax.Array:
    """Returns the bytes of `values` one after the other, filled up with zeros: uint8[width]."""
    parts = [_to_bytes(value) for value in values]
    missing = width - sum(part.shape[0] for part in parts)
    return jnp.concatenate([*parts, jnp.zeros(missing, jnp.uint8)])


def unpack(vector: jax.Array, offset: int, aval: Any) -> jax.Array:
    """Returns the value of type `aval` whose bytes start at `offset`."""
    itemsize = np.dtype(aval.dtype).itemsize
    count = int(np.prod(aval.shape, dtype=np.int64)) * itemsize
    piece = jax.lax.slice(vector, (offset,), (offset + count,))
    if aval.dtype == np.bool_:
        return piece.reshape(aval.shape) != 0
    if itemsize == 1:
        return jax.lax.bitcast_convert_type(piece.reshape(aval.shape), aval.dtype)
    return jax.lax.bitcast_convert_type(piece.reshape(*aval.shape, itemsize), aval.dtype)


def _to_bytes(value: Any) -> jax.Array:
    value = jnp.asarray(value)
    if value.dtype == np.bool_:
        value = value.astype(jnp.uint8)
    return jax.lax.bitcast_convert_type(value, jnp.uint8).reshape(-1)
