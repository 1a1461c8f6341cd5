"""Scans whose iterations do not depend on each other, run at once.

total, ys = scan {y = f(x); carry total + y; stack y} zero xs
  becomes
ys = vmap(f)(xs);  total = zero + sum(ys)
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax.extend.core import JaxprEqn, Literal, Var, jaxpr_as_fun

from octojax import compat
from octojax.compat import JIT_NAMES, Atom, aval_of
from octojax.jaxprs.dataflow import free_vars, is_var, needed_for, shape_of
from octojax.jaxprs.flat import Builder, FlatJaxpr, flatten, rewrite
from octojax.jaxprs.inline import call_inlined, inline_jits


@dataclass(frozen=True)
class _Map:
    """A scan's body and, per carried value, what an iteration adds to it: None if nothing.

    `counters` are carried integers to which each iteration adds the same literal.
    """

    body: FlatJaxpr
    added: tuple[Atom | None, ...]
    counters: Mapping[Var, Literal]


_WITHOUT_BATCHES = frozenset({"ragged_dot_general"})
"""What `jax.vmap` refuses along an axis of its groups (JAX 0.10 to 0.12)."""


def is_map(eqn: JaxprEqn) -> bool:
    """Whether a scan carries nothing from one iteration to the next but sums."""
    return _as_map(eqn) is not None


def open_map(builder: Builder, eqn: JaxprEqn, args: Sequence[Atom]) -> list[Atom]:
    """Appends all iterations of a map at once; returns the scan's outputs."""
    loop = _as_map(eqn)
    assert loop is not None, "a scan that is no map"
    num_consts, num_carry = compat.scan_counts(eqn.params)
    body, length = loop.body, eqn.params["length"]
    carried = body.invars[num_consts : num_consts + num_carry]
    summands = [x for x in loop.added if x is not None]
    ends = [*summands, *body.outvars[num_carry:]]
    needed = needed_for(body.eqns, ends, keep_effects=True)
    eqns = [body.eqns[at] for at in sorted(needed)]
    once = {*body.invars[: num_consts + num_carry], *body.constvars} - set(loop.counters)
    env = dict(zip(body.invars, args, strict=True))
    env |= {v: builder.constant(c, v) for v, c in zip(body.constvars, body.constants)}
    reads = free_vars(eqns, ends)
    step = jaxpr_as_fun(compat.new_jaxpr(reads, ends, eqns))
    axes = tuple(None if v in once else 0 for v in reads)

    def every(*values: jax.Array) -> list[jax.Array]:
        start = values[len(reads) :]
        rows = [
            x + jnp.arange(length, dtype=x.dtype) * loop.counters[v].val
            if v in loop.counters
            else x
            for v, x in zip(reads, values, strict=False)
        ]
        results = jax.vmap(step, axes, axis_size=length)(*rows)
        sums = [
            first + jnp.sum(x, axis=0, dtype=x.dtype)
            for first, x in zip(start, results, strict=False)
        ]
        return [*sums, *results[len(sums) :]]

    starts = [env[v] for v, x in zip(carried, loop.added, strict=True) if x is not None]
    operands = [*(env[v] for v in reads), *starts]
    traced = jax.make_jaxpr(every)(*map(shape_of, operands))
    outputs = call_inlined(builder, traced, operands, JIT_NAMES)
    sums = iter(outputs[: len(starts)])
    finals = [env[v] if x is None else next(sums) for v, x in zip(carried, loop.added, strict=True)]
    return [*finals, *outputs[len(starts) :]]


def _as_map(eqn: JaxprEqn) -> _Map | None:
    if eqn.primitive.name != "scan" or eqn.effects:
        return None
    num_consts, num_carry = compat.scan_counts(eqn.params)
    body = _without_casts(inline_jits(flatten(eqn.params["jaxpr"])))
    if any(e.primitive.name in _WITHOUT_BATCHES for e in body.eqns):
        return None
    carried = body.invars[num_consts : num_consts + num_carry]
    makers = {v: e for e in body.eqns for v in e.outvars}
    added: list[Atom | None] = []
    adders: list[JaxprEqn] = []
    for start, end in zip(carried, body.outvars[:num_carry], strict=True):
        if end is start:
            added.append(None)
            continue
        last = makers.get(end) if isinstance(end, Var) else None
        if last is None or last.primitive.name not in ("add", "add_any"):
            return None
        if not any(x is start for x in last.invars):
            return None
        added.append(next((x for x in last.invars if x is not start), start))
        adders.append(last)
    pairs = zip(carried, added, strict=True)
    counters = {v: x for v, x in pairs if isinstance(x, Literal) and _is_integer(v)}
    if counters and eqn.params["reverse"]:
        return None
    sums = {v for v, x in zip(carried, added, strict=True) if x is not None} - set(counters)
    ends = {id(e) for e in adders}
    rest = [e for e in body.eqns if id(e) not in ends]
    if sums & set(
        free_vars(rest, [*(x for x in added if x is not None), *body.outvars[num_carry:]])
    ):
        return None
    running_sums = {v for e in adders for v in e.outvars}
    if running_sums & {v for e in rest for v in e.invars if is_var(v)}:
        return None  # running sums are read
    if running_sums & {x for x in (*added, *body.outvars[num_carry:]) if is_var(x)}:
        return None
    return _Map(body, tuple(added), counters)


def _without_casts(body: FlatJaxpr) -> FlatJaxpr:
    """Returns the body without conversions to the same type: weakly typed first sums bring them."""

    def rule(_: Builder, eqn: JaxprEqn, args: list[Atom]) -> list[Atom] | None:
        same = eqn.primitive.name == "convert_element_type" and (
            aval_of(args[0]).dtype == eqn.params["new_dtype"] and isinstance(args[0], Var)
        )
        return args if same else None

    return rewrite(body, rule)


def _is_integer(var: Var) -> bool:
    aval = aval_of(var)
    return not aval.shape and jnp.issubdtype(aval.dtype, jnp.integer)
