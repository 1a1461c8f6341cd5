"""The unpipelined model with the same meaning, on one device, by plain JAX."""

from typing import Any

import jax
import jax.numpy as jnp

from octojax import compat
from octojax.api.whole_batch import WholeBatch
from octojax.programs.finish import join_results
from octojax.programs.microbatch import Kind
from octojax.trace import TracedLoss


def reference(whole: WholeBatch, params: Any, state: Any, batch: Any) -> tuple[Any, Any, Any, Any]:
    """Returns `(loss, aux, grads, new_state)` of the whole batch, by plain `jax.value_and_grad`.

    The loss sees the whole batch at once. Where that would be something else, because a random key
    is folded for every microbatch or module state is carried from one to the next, it sees the
    microbatches one after the other, each as the pipeline does, and their values join by the same
    rules.
    """
    if per_microbatch(whole):
        return by_microbatches(whole, params, state, batch)

    def loss_of(params: Any) -> tuple[Any, Any]:
        loss, aux, new_state = whole.pure.fn(params, state, batch)
        return loss, (aux, new_state)

    run = jax.jit(jax.value_and_grad(loss_of, has_aux=True, allow_int=True))
    (loss, (aux, new_state)), grads = run(params)
    return loss, aux, grads, new_state


def per_microbatch(whole: WholeBatch) -> bool:
    """Whether keys or module state make the whole batch at once another computation."""
    traced = whole.first.traced
    changes = any(
        traced.flat.outvars[traced.num_emits + k] is not traced.flat.invars[len(traced.params) + k]
        for k in range(len(traced.state))
    )
    return changes or Kind.KEY in whole.given.kinds


def by_microbatches(
    whole: WholeBatch, params: Any, state: Any, batch: Any
) -> tuple[Any, Any, Any, Any]:
    """Returns what `reference` does, with the microbatches of the pipeline one by one."""
    cut = whole.batch
    leaves = [x if hasattr(x, "dtype") else jnp.asarray(x) for x in jax.tree.leaves(batch)]
    if whole.evaluate is not None:
        leaves += jax.jit(whole.evaluate)(leaves)
    shards: tuple[int | None, ...] = tuple(range(cut.shards)) if cut.shards > 1 else (None,)
    values = jax.tree.leaves(params)
    states = jax.tree.leaves(state)
    totals = [0.0 * x if compat.is_float(jnp.asarray(x)) else x for x in values]
    pieces: list[list[list[Any]]] = []
    terms: list[Any] = []
    steps: dict[tuple[int, bool], Any] = {}
    for m in range(cut.count):
        of_shards, new = [], states
        for shard in shards:
            with_terms = m == 0 and shard in (None, 0)
            if (size := cut.sizes[m], with_terms) not in steps:
                steps[size, with_terms] = _gradient(whole.traced(m), with_terms)
            part = [cut.piece(i, x, m, shard) for i, x in enumerate(leaves)]
            (_, (emits, new, more)), grads = steps[size, with_terms](values, states, part)
            totals = [
                t + g if compat.is_float(jnp.asarray(t)) else g
                for t, g in zip(totals, grads, strict=True)
            ]
            of_shards.append(emits)
            terms = terms or more
        states = new
        pieces.append(of_shards)
    emits = [
        join_results(
            [jnp.stack([x[e] for x in p]) if len(shards) > 1 else p[0][e] for p in pieces],
            cut,
            join,
            stacked=len(shards) > 1,
        )
        for e, join in enumerate(whole.joins)
    ]
    traced = whole.first.traced
    for emit, term in zip(traced.terms, terms, strict=True):
        emits[emit] = emits[emit] + term
    grads = jax.tree.unflatten(jax.tree.structure(params), totals)
    new_state = jax.tree.unflatten(jax.tree.structure(state), states)
    return emits[0], traced.aux.unflatten(emits[1:]), grads, new_state


def _gradient(traced: TracedLoss, with_terms: bool) -> Any:
    """The value and gradient of a microbatch's loss; of one of them, with its terms."""
    flat = traced.flat
    jaxpr = compat.new_jaxpr([*flat.constvars, *flat.invars], flat.outvars, flat.eqns)
    ends = traced.num_emits, traced.num_emits + len(traced.state)

    def loss_of(params: Any, state: Any, part: Any) -> tuple[Any, Any]:
        values = compat.eval_jaxpr(jaxpr, [*flat.constants, *params, *state, *part])
        emits, new, terms = values[: ends[0]], values[ends[0] : ends[1]], values[ends[1] :]
        of_loss = [t for e, t in zip(traced.terms, terms, strict=True) if e == 0]
        return emits[0] + (sum(of_loss) if with_terms else 0), (emits, new, terms)

    return jax.jit(jax.value_and_grad(loss_of, has_aux=True, allow_int=True))
