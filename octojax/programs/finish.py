"""What happens once per step and rank: sums of gradients, and results of all microbatches.

Results join by what they are:

    the loss                              as `Microbatches.weights` say: mean, or sum
    other floating scalars                mean, weighted by the rows of each microbatch
    leading axis = rows of a microbatch   concatenated
    other floating arrays                 the weighted mean, element by element
    integers                              sum
    booleans                              all
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

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
    if first.dtype == jnp.bool_:
        return jnp.stack([p.all(axis=0) if stacked else p for p in pieces]).all(axis=0)
    if jnp.issubdtype(first.dtype, jnp.integer):
        return sum(p.sum(axis=0, dtype=p.dtype) if stacked else p for p in pieces)
    total = sum(
        (p.mean(axis=0) if stacked else p).astype(jnp.promote_types(p.dtype, jnp.float32)) * weight
        for p, weight in zip(pieces, batch.weights if loss else batch.shares, strict=True)
    )
    return jnp.asarray(total).astype(first.dtype)


def sum_gradients(sums: Sequence[Any], dtype: Any, *, stacked: bool) -> Any:
    """Returns the gradient of one parameter from the sums of all its holders.

    Over a stacked axis (the data axis of the mesh) this is the step's only reduction.
    """
    total = sum(s.sum(axis=0) if stacked else s for s in sums)
    return jnp.asarray(total).astype(dtype)


def zeros(shapes: Sequence[jax.ShapeDtypeStruct]) -> tuple[jax.Array, ...]:
    return tuple(jnp.zeros(s.shape, s.dtype) for s in shapes)
