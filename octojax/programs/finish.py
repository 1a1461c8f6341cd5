"""What happens once per step and rank: sums of gradients, and results of all microbatches."""

import functools
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import jaxpr_as_fun
from jax.sharding import PartitionSpec

from octojax.jaxprs.shardings import names_mesh, traced_anew
from octojax.mesh import DATA_AXIS, Rank
from octojax.programs.accumulator import widened
from octojax.programs.microbatch import Microbatches
from octojax.programs.recipe import unstored
from octojax.rows.join import Join
from octojax.stages.program import OwnTerm

_REDUCTIONS = {"max": jnp.max, "min": jnp.min, "all": jnp.all, "any": jnp.any}


def join_results(pieces: Sequence[Any], batch: Microbatches, join: Join, *, stacked: bool) -> Any:
    """Returns one leaf of what the loss returns, for the whole batch.

    `pieces[m]` is the leaf of microbatch m; if `stacked`, with one more leading axis, over
    the data shards. Sums of integers narrower than 32 bits are int32 or uint32.
    """
    if join.rule == "rows":
        return _concatenated(pieces, join, stacked)
    if join.rule in ("first", "last"):
        piece = pieces[0 if join.rule == "first" else -1]
        return piece[-1 if join.rule == "last" else 0] if stacked else piece
    every = jnp.stack(pieces)  # of all microbatches, and of their shards: as one array, since
    axes = (0, 1) if stacked else (0,)  # a sum of a thousand terms takes seconds to compile
    if join.rule in _REDUCTIONS:
        return _REDUCTIONS[join.rule](every, axis=axes)
    dtype, wide = every.dtype, widened(every)
    if not jnp.issubdtype(dtype, jnp.inexact):
        if join.rule == "sum":
            return wide.sum(axis=axes, dtype=wide.dtype)
        dtype, wide = jnp.dtype(jnp.float32), wide.astype(jnp.float32)
    if join.rule == "mean":
        shares = np.asarray(batch.shares, wide.dtype) / (every.shape[1] if stacked else 1)
        wide = wide * shares.reshape(-1, *(1,) * (wide.ndim - 1))
    return wide.sum(axis=axes).astype(dtype)


def _concatenated(pieces: Sequence[Any], join: Join, stacked: bool) -> Any:
    """Returns the rows of all pieces; each block of rows in a piece is joined to its own."""
    flat = [x for p in pieces for x in (p if stacked else [p])]
    if join.over:
        return _dealt_out(flat, join)
    if join.outer == 1:
        return jnp.concatenate(flat, axis=join.axis)
    at = join.axis
    blocks = [
        x.reshape(*x.shape[:at], join.outer, x.shape[at] // join.outer, *x.shape[at + 1 :])
        for x in flat
    ]
    whole = jnp.concatenate(blocks, axis=at + 1)
    return whole.reshape(*whole.shape[:at], -1, *whole.shape[at + 2 :])


def _dealt_out(pieces: Sequence[Any], join: Join) -> Any:
    """Returns the rows of all pieces in one line, dealt out to the chunks of the whole batch."""
    over, front = join.over, range(len(join.over))
    first = [jnp.moveaxis(x, over, front) for x in pieces]
    sizes = list(first[0].shape[: len(over)])
    lines = [x.reshape(-1, *x.shape[len(over) :]) for x in first]
    whole = _concatenated(lines, Join("rows", 0, join.outer), stacked=False)
    sizes[over.index(join.axis)] = -1
    return jnp.moveaxis(whole.reshape(*sizes, *whole.shape[1:]), front, over)


def sum_gradients(
    sums: Sequence[Any], dtype: Any, over_data: Callable[[Any], Any] | None, more: Any = None
) -> Any:
    """Returns the gradient of one parameter from the sums of all its holders.

    `over_data` (see `reduction`) is the step's only reduction over the data axis, if there is
    one. `more` is the gradient of terms that are no part of any stage.
    """
    parts = [s if over_data is None else over_data(s) for s in sums]
    if more is not None:
        parts.append(widened(more))
    total = functools.reduce(operator.add, parts)
    return total if total.dtype == dtype else total.astype(dtype)


def reduction(
    rank: Rank, spec: PartitionSpec, result: PartitionSpec
) -> Callable[[Any], Any] | None:
    """Returns how sums of gradients are reduced over the data axis, stacked along axis 0 with
    `spec` inside; None: the rank has no such axis.

    They are summed; where `result` names the data axis, each device gets its part alone (a
    reduce-scatter).
    """
    if rank.data_size == 1:
        return None
    if result == spec:
        return lambda stacked: stacked.sum(axis=0)
    entries = [entry if isinstance(entry, tuple) else (entry,) for entry in result]
    dimension = next(at for at, entry in enumerate(entries) if DATA_AXIS in entry)

    def scatter(part: Any) -> Any:
        return jax.lax.psum_scatter(part[0], DATA_AXIS, scatter_dimension=dimension, tiled=True)

    return jax.shard_map(
        scatter,
        mesh=rank.mesh,
        in_specs=PartitionSpec(DATA_AXIS, *spec),
        out_specs=result,
        check_vma=False,
    )


def add_terms(
    terms: Sequence[OwnTerm], params: Mapping[int, Any], trained: Sequence[int]
) -> tuple[list[Any], dict[int, Any]]:
    """Returns the sum of a rank's terms for each result they belong to, and the gradients of
    those of the loss by parameter unit. `params` are kept values by unit."""

    def values(floating: Mapping[int, Any], params: Mapping[int, Any]) -> tuple[Any, list[Any]]:
        sums: dict[int, Any] = {}
        for term in terms:
            reads = zip(term.units, term.jaxpr.in_avals, strict=True)
            args = [floating[u] if u in floating else unstored(params[u], a) for u, a in reads]
            (value,) = jaxpr_as_fun(term.jaxpr)(*args)
            sums[term.emit] = sums[term.emit] + value if term.emit in sums else value
        return sums.get(0, jnp.float32(0)), list(sums.values())

    read = {u for term in terms if term.emit == 0 for u in term.units}
    floating = {u: params[u] for u in trained if u in read}
    if not floating:
        return _anew(terms, values)({}, dict(params))[1], {}
    gradients, added = _anew(terms, jax.grad(values, has_aux=True))(floating, dict(params))
    return added, gradients


def _anew(terms: Sequence[OwnTerm], function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function of terms, traced anew where the model names a mesh."""
    return traced_anew(function) if any(names_mesh(t.jaxpr) for t in terms) else function


def zeros(shapes: Sequence[jax.ShapeDtypeStruct]) -> tuple[jax.Array, ...]:
    return tuple(jax.lax.full(s.shape, 0, s.dtype) for s in shapes)
