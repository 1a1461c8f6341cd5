"""The unpipelined model with the same meaning, on one device, by plain JAX."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from octojax import compat
from octojax.api.whole_batch import WholeBatch
from octojax.jaxprs.shardings import names_mesh, traced_anew
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
    return changes or Kind.KEY in whole.split.kinds


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
    steps: dict[int, Any] = {}
    for m in range(cut.count):
        of_shards, new = [], states
        for shard in shards:
            size = cut.sizes[m]
            if size not in steps:
                steps[size] = _gradient(whole.traced(m), slice(0, 1))
            part = [cut.piece(i, x, m, shard) for i, x in enumerate(leaves)]
            (_, results), grads = steps[size](values, states, part)
            emits, new = results[: len(whole.joins)], results[len(whole.joins) :]
            totals = _added(totals, grads)
            of_shards.append(emits)
        states = new
        pieces.append(of_shards)
    emits: list[Any] = [
        join_results(
            [jnp.stack([x[e] for x in p]) if len(shards) > 1 else p[0][e] for p in pieces],
            cut,
            join,
            stacked=len(shards) > 1,
        )
        for e, join in enumerate(whole.joins)
    ]
    traced = whole.first.traced
    if traced.terms:
        first = traced.num_emits + len(traced.state)
        of_loss = [first + k for k, emit in enumerate(traced.terms) if emit == 0]
        part = [cut.piece(i, x, 0, 0 if cut.shards > 1 else None) for i, x in enumerate(leaves)]
        run = _gradient(traced, of_loss, slice(first, None))
        (_, terms), grads = run(values, states, part)
        totals = _added(totals, grads)
        for emit, term in zip(traced.terms, terms, strict=True):
            emits[emit] = emits[emit] + term
    grads = jax.tree.unflatten(jax.tree.structure(params), totals)
    new_state = jax.tree.unflatten(jax.tree.structure(state), states)
    return emits[0], traced.aux.unflatten(emits[1:]), grads, new_state


def _added(totals: list[Any], grads: list[Any]) -> list[Any]:
    return [
        t + g if compat.is_float(jnp.asarray(t)) else g for t, g in zip(totals, grads, strict=True)
    ]


def _sum(values: list[Any]) -> Any:
    return sum(values[1:], start=values[0]) if values else np.float32(0)


def _gradient(traced: TracedLoss, of: Any, results: Any = None) -> Any:
    """Returns the gradient of some outputs of a microbatch's loss, and other outputs; jitted."""
    flat = traced.flat
    results = slice(0, traced.num_emits + len(traced.state)) if results is None else results
    every = list(range(len(flat.outvars)))
    terms = every[of] if isinstance(of, slice) else of
    others = every[results]
    outvars = [flat.outvars[k] for k in (*terms, *others)]
    jaxpr = compat.new_jaxpr([*flat.constvars, *flat.invars], outvars, flat.eqns)

    def loss_of(params: Any, state: Any, part: Any) -> tuple[Any, Any]:
        values = compat.eval_jaxpr(jaxpr, [*flat.constants, *params, *state, *part])
        return _sum(values[: len(terms)]), values[len(terms) :]

    run = jax.value_and_grad(loss_of, has_aux=True, allow_int=True)
    return jax.jit(traced_anew(run) if names_mesh(jaxpr) else run)
