"""What happens once per step and rank: sums of gradients, and results of all microbatches.

Results join by what they are:

    the loss                              as `Microbatches.weights` say: mean, or sum
    other floating scalars                mean, weighted by the rows of each microbatch
    leading axis = rows of a microbatch   concatenated
    other floating arrays                 the weighted mean, element by element
    integers                              sum
    booleans                              all
"""

import functools
import operator
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from octojax.programs.microbatch import Microbatches


def join_results(
    pieces: Sequence[Any], batch: Microbatches, *, stacked: bool, loss: bool = False
) -> Any:
    """Returns one leaf of what the loss returns, for the whole batch.

    `pieces[m]` is the leaf of microbatch m; if `stacked`, with one more leading axis, over
    the data shards. `loss`: the leaf is the loss itself.
    """
    shards = batch.shards if stacked else 1
    first = pieces[0][0] if stacked else pieces[0]
    if first.shape[:1] == (batch.sizes[0] // shards,):
        flat = [p.reshape(-1, *p.shape[2:]) if stacked else p for p in pieces]
        return jnp.concatenate(flat)
    every = jnp.stack(pieces)  # of all microbatches, and of their shards: as one array, since
    shard = (1,) if stacked else ()  # a sum of a thousand terms takes seconds to compile
    if first.dtype == jnp.bool_:
        return every.all(axis=(0, *shard))
    if jnp.issubdtype(first.dtype, jnp.integer):
        return every.sum(axis=(0, *shard), dtype=first.dtype)
    wide = (every.mean(axis=1) if stacked else every).astype(
        jnp.promote_types(first.dtype, jnp.float32)
    )
    weights = np.asarray(batch.weights if loss else batch.shares, wide.dtype)
    total = (wide * weights.reshape(-1, *(1,) * first.ndim)).sum(axis=0)
    return total.astype(first.dtype)


def sum_gradients(sums: Sequence[Any], dtype: Any, *, stacked: bool) -> Any:
    """Returns the gradient of one parameter from the sums of all its holders.

    Over a stacked axis (the data axis of the mesh) this is the step's only reduction.
    """
    total = functools.reduce(operator.add, [s.sum(axis=0) if stacked else s for s in sums])
    return total if total.dtype == dtype else total.astype(dtype)


def zeros(shapes: Sequence[jax.ShapeDtypeStruct]) -> tuple[jax.Array, ...]:
    return tuple(jax.lax.full(s.shape, 0, s.dtype) for s in shapes)
