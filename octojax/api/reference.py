"""The unpipelined model with the same meaning: microbatch by microbatch on one device."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from octojax.programs.finish import join_results
from octojax.programs.microbatch import Microbatches

PureFn = Callable[[Any, Any, Any], tuple[Any, Any, Any]]


def reference(
    fn: PureFn, params: Any, state: Any, batch: Any, batches: Microbatches
) -> tuple[jax.Array, Any, Any, Any]:
    """Returns `(loss, aux, grads, new_state)` of the whole batch, by plain `jax.value_and_grad`.

    Every microbatch sees the rows, keys and module state that it sees in the pipeline; the
    results are joined by the same rules, and what a derivative rule puts in adds up.
    `fn(params, state, batch) -> (loss, aux, new_state)`.
    """
    leaves, tree = jax.tree.flatten(batch)
    leaves = [x if hasattr(x, "dtype") else jnp.asarray(x) for x in leaves]
    shards: tuple[int | None, ...] = tuple(range(batches.shards)) if batches.shards > 1 else (None,)

    @jax.jit
    def add(totals: Any, params: Any, state: Any, part: Any, share: Any) -> Any:
        def loss_of(params: Any) -> tuple[Any, Any]:
            loss, aux, new_state = fn(params, state, part)
            return loss * share.astype(loss.dtype), (loss, aux, new_state)

        grads, (loss, aux, new_state) = jax.grad(loss_of, has_aux=True, allow_int=True)(params)
        totals = jax.tree.map(_plus, totals, grads)
        return totals, (loss, aux), new_state

    @jax.jit
    def join(totals: Any, params: Any, found: Any) -> Any:
        flat = [[jax.tree.leaves(x) for x in of_shards] for of_shards in found]
        joined = [
            join_results(
                [jnp.stack(pieces) if len(shards) > 1 else pieces[0] for pieces in of_leaf],
                batches,
                stacked=len(shards) > 1,
                loss=e == 0,
            )
            for e, of_leaf in enumerate(
                [[leaves[e] for leaves in of_shards] for of_shards in flat]
                for e in range(len(flat[0][0]))
            )
        ]
        grads = jax.tree.map(lambda g, p: g.astype(p.dtype), totals, params)
        return jax.tree.unflatten(jax.tree.structure(found[0][0]), joined), grads

    totals = jax.tree.map(
        lambda p: np.zeros(p.shape, jnp.promote_types(p.dtype, jnp.float32)), params
    )
    found = []
    for m, weight in enumerate(batches.weights):
        new_state, of_shards = state, []
        for shard in shards:
            part = tree.unflatten([batches.piece(i, x, m, shard) for i, x in enumerate(leaves)])
            share = np.float32(weight / len(shards))
            totals, emitted, new_state = add(totals, params, state, part, share)
            of_shards.append(emitted)
        state = new_state
        found.append(of_shards)
    (loss, aux), grads = join(totals, params, found)
    return loss, aux, grads, state


def _plus(total: Any, gradient: Any) -> Any:
    """The running sum; a parameter of integers gathers nothing."""
    return total if gradient.dtype == jax.dtypes.float0 else total + gradient.astype(total.dtype)
