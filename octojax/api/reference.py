"""The unpipelined model with the same meaning: microbatch by microbatch on one device."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from octojax.programs.finish import join_results
from octojax.programs.microbatch import Microbatches

PureFn = Callable[[Any, Any, Any], tuple[Any, Any, Any]]


def reference(
    fn: PureFn, params: Any, state: Any, batch: Any, batches: Microbatches
) -> tuple[jax.Array, Any, Any, Any]:
    """Returns `(loss, aux, grads, new_state)` of the whole batch, by plain `jax.value_and_grad`.

    Every microbatch sees the rows, keys and module state that it sees in the pipeline; the
    results are joined by the same rules. `fn(params, state, batch) -> (loss, aux, new_state)`.
    """
    leaves, tree = jax.tree.flatten(batch)
    leaves = [jnp.asarray(x) for x in leaves]

    @jax.jit
    def one(params: Any, state: Any, part: Any) -> Any:
        def loss_of(params: Any) -> tuple[Any, Any]:
            loss, aux, new_state = fn(params, state, part)
            return loss, (loss, aux, new_state)

        return jax.grad(loss_of, has_aux=True, allow_int=True)(params)

    totals, emits = None, []
    for m, weight in enumerate(batches.weights):
        shards = range(batches.shards) if batches.shards > 1 else (None,)
        found = []
        for shard in shards:
            part = tree.unflatten([batches.piece(i, x, m, shard) for i, x in enumerate(leaves)])
            grads, (loss, aux, new_state) = one(params, state, part)
            found.append((loss, *jax.tree.leaves(aux)))
            share = weight / len(shards)
            scaled = jax.tree.map(lambda g, share=share: _scaled(g, share), grads)
            totals = scaled if totals is None else jax.tree.map(_add, totals, scaled)
        state = new_state
        emits.append(found)
    stacked = batches.shards > 1
    joined = [
        join_results(
            [jnp.stack([f[e] for f in found]) if stacked else found[0][e] for found in emits],
            batches,
            stacked=stacked,
        )
        for e in range(len(emits[0][0]))
    ]
    grads = jax.tree.map(lambda g, p: g.astype(jnp.asarray(p).dtype), totals, params)
    return joined[0], jax.tree.unflatten(jax.tree.structure(aux), joined[1:]), grads, state


def _scaled(gradient: Any, share: float) -> Any:
    if gradient.dtype == jax.dtypes.float0:
        return jnp.zeros(gradient.shape, jnp.float32)
    return gradient.astype(jnp.promote_types(gradient.dtype, jnp.float32)) * share


def _add(a: Any, b: Any) -> Any:
    return a + b
