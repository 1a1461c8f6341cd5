"""The one inliner: equations of calls written out in their place, at any depth.

inline_jits      nested `jit` alone: what is differentiated later keeps its other calls
inline_calls     every call, and those in the bodies of `scan` and `cond`; constants are literals
written_out      calls by name, each equation with the line of the user's that it is run from
"""

from collections.abc import Callable, Collection, Sequence
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, JaxprEqn, Var

from octojax import compat
from octojax.compat import CUSTOM_NAMES, JIT_NAMES, REMAT_NAMES, Atom
from octojax.jaxprs.dataflow import is_var, rename, shape_of
from octojax.jaxprs.flat import Builder, Emit, FlatJaxpr, LiteralBuilder, read, rewrite

CALLS = JIT_NAMES | REMAT_NAMES | CUSTOM_NAMES
"""Primitives that only group operations, once nothing is differentiated any more."""

Rule = Callable[[Builder, JaxprEqn, list[Atom], Emit], Sequence[Atom] | None]
"""What is written in the place of an equation: `rule(builder, eqn, args, emit)` appends it and
returns the outputs, or None to keep the equation. `emit` goes on with the rule within."""


def body_of(eqn: JaxprEqn) -> Any:
    """Returns the one jaxpr that a call equation (jit, remat, custom_jvp, ...) runs, or None."""
    for name in ("jaxpr", "call_jaxpr", "fun_jaxpr"):
        body = eqn.params.get(name)
        if hasattr(body, "eqns") or hasattr(body, "jaxpr"):
            return body
    return None


def within(builder: Builder, rule: Rule) -> Emit:
    """Returns how a builder takes equations under a rule."""

    def emit(eqn: JaxprEqn, env: dict[Var, Atom]) -> None:
        args = [read(env, x) for x in eqn.invars]
        outputs = rule(builder, eqn, args, emit)
        if outputs is None:
            outputs = builder.copy(eqn, args)
        env.update(zip(eqn.outvars, outputs, strict=True))

    return emit


def calls(names: Collection[str]) -> Rule:
    """Returns the rule that writes out the calls by these names."""

    def rule(
        builder: Builder, eqn: JaxprEqn, args: list[Atom], emit: Emit
    ) -> Sequence[Atom] | None:
        body = body_of(eqn) if eqn.primitive.name in names else None
        return None if body is None else builder.call(body, args, emit)

    return rule


def inline_call(
    builder: Builder, eqn: JaxprEqn, args: Sequence[Atom], names: Collection[str] = JIT_NAMES
) -> list[Atom]:
    """Appends the body of a call, and of every call by one of `names` in it."""
    return call_inlined(builder, body_of(eqn), args, names)


def call_inlined(
    builder: Builder, body: Any, args: Sequence[Atom], names: Collection[str] = JIT_NAMES
) -> list[Atom]:
    """Appends a jaxpr with the calls by `names` in it written out; returns its outputs."""
    return builder.call(body, args, within(builder, calls(names)))


def inline_jits(flat: FlatJaxpr, names: Collection[str] = JIT_NAMES) -> FlatJaxpr:
    """Returns the jaxpr without nested `jit` at its top level. Other calls stay whole.

    c = jit[f] a b          x = mul a b
    d = tanh c      becomes c = add x b
                            d = tanh c
    """
    return _rewritten(flat, calls(names))


def written_out(flat: FlatJaxpr, names: Collection[str] = JIT_NAMES) -> FlatJaxpr:
    """Like `inline_jits`, each equation with the user's line it is run from.

    A nested `jit` that was traced before keeps the lines of its first caller.
    """
    plain = calls(names)

    def rule(
        builder: Builder, eqn: JaxprEqn, args: list[Atom], emit: Emit
    ) -> Sequence[Atom] | None:
        lines = compat.user_lines(eqn) if eqn.primitive.name in names else ()

        def labelled(inner: JaxprEqn, env: dict[Var, Atom]) -> None:
            if lines and lines[0] not in compat.user_lines(inner):
                inner = inner.replace(source_info=eqn.source_info)
            emit(inner, env)

        return plain(builder, eqn, args, labelled)

    return _rewritten(flat, rule)


def inline_calls(closed: ClosedJaxpr) -> ClosedJaxpr:
    """Returns the same computation without call equations; constants become literals.

        before    a = jit[silu] x;  b = remat2[{c = dot a w; tanh c}] a w
        after     s = logistic x;  a = mul x s;  c = dot a w;  b = tanh c

    Only for jaxprs that are not differentiated again: custom derivative rules are gone. Bodies of
    `scan` and branches of `cond` are written out too. A call with its own shardings, a `shard_map`,
    a `while` and a callback stay as they are. The barrier that keeps XLA from merging a
    `jax.checkpoint` recomputation stays, as an equation.
    """
    builder = LiteralBuilder(closed.jaxpr.invars)
    outputs = builder.call(closed, closed.jaxpr.invars, within(builder, _all_calls))
    return compat.new_jaxpr(closed.jaxpr.invars, outputs, builder.eqns)


def barrier_equation(value: Var) -> JaxprEqn:
    """Returns an equation that passes the value on, and that XLA does not look through."""
    template = jax.make_jaxpr(jax.lax.optimization_barrier)(shape_of(value)).jaxpr.eqns[0]
    return template.replace(invars=[value], outvars=[Var(value.aval)])


def _rewritten(flat: FlatJaxpr, rule: Rule) -> FlatJaxpr:
    return rewrite(flat, lambda b, eqn, args: rule(b, eqn, args, within(b, rule)))


def _all_calls(
    builder: Builder, eqn: JaxprEqn, args: list[Atom], emit: Emit
) -> Sequence[Atom] | None:
    name, params = eqn.primitive.name, eqn.params
    if name == "scan":
        body = inline_calls(params["jaxpr"])
        return builder.copy(eqn.replace(params={**params, "jaxpr": body}), args)
    if name == "cond":
        branches = tuple(map(inline_calls, params["branches"]))
        return builder.copy(eqn.replace(params={**params, "branches": branches}), args)
    shardings = (*params.get("in_shardings", ()), *params.get("out_shardings", ()))
    if any(type(s).__name__ != "UnspecifiedValue" for s in shardings):
        return None
    if params.get("differentiated") and params.get("prevent_cse") is True:
        args = _behind_barriers(builder, args)
    return calls(CALLS)(builder, eqn, args, emit)


def _behind_barriers(builder: Builder, args: list[Atom]) -> list[Atom]:
    """Returns the atoms passed through barriers, one each so that a cut may look at them singly."""
    variables = list(dict.fromkeys(filter(is_var, args)))
    barriers = [barrier_equation(v) for v in variables]
    builder.eqns += barriers
    return rename(args, dict(zip(variables, (e.outvars[0] for e in barriers), strict=True)))
