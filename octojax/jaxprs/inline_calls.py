"""Returns a jaxpr whose calls are written out, so that a cut can pass through their bodies.

    before    a = jit[silu] x;  b = remat2[{c = dot a w; tanh c}] a w
    after     s = logistic x;  a = mul x s;  c = dot a w;  b = tanh c

Bodies of `scan` and branches of `cond` are written out too. A call with its own shardings, a
`shard_map`, a `while` and a callback stay as they are.
"""

from collections.abc import Sequence

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var

from octojax.compat import new_jaxpr
from octojax.jaxprs.dataflow import Atom, is_dropped, is_var, rename, shape_of

_CALLS = {
    "jit": "jaxpr",
    "closed_call": "call_jaxpr",
    "remat2": "jaxpr",
    "custom_jvp_call": "call_jaxpr",
    "custom_vjp_call": "call_jaxpr",
}


def inline_calls(closed: ClosedJaxpr) -> ClosedJaxpr:
    """Returns the same computation without call equations; constants become literals.

    Only for jaxprs that are not differentiated again: custom derivative rules are gone. The
    barrier that keeps XLA from merging a `jax.checkpoint` recomputation stays, as an equation.
    """
    jaxpr = closed.jaxpr
    names: dict[Var, Atom] = dict(zip(jaxpr.constvars, map(_literal, closed.consts), strict=True))
    eqns = _inline(jaxpr.eqns, names)
    return new_jaxpr(jaxpr.invars, rename(jaxpr.outvars, names), eqns)


def barrier_equation(value: Var) -> JaxprEqn:
    """Returns an equation that passes the value on, and that XLA does not look through."""
    template = jax.make_jaxpr(jax.lax.optimization_barrier)(shape_of(value)).jaxpr.eqns[0]
    return template.replace(invars=[value], outvars=[Var(value.aval)])


def _inline(eqns: Sequence[JaxprEqn], names: dict[Var, Atom]) -> list[JaxprEqn]:
    """Returns the equations written out under `names`, to which inlined results are added."""
    out: list[JaxprEqn] = []
    for eqn in eqns:
        body = _body(eqn)
        if body is None:
            kept = eqn.replace(invars=rename(eqn.invars, names), params=_inline_params(eqn))
            fresh = [v if is_dropped(v) else Var(v.aval) for v in eqn.outvars]
            names.update(zip(eqn.outvars, fresh, strict=True))
            out.append(kept.replace(outvars=fresh))
            continue
        jaxpr, consts = body
        given = rename(eqn.invars, names)
        if eqn.params.get("differentiated") and eqn.params.get("prevent_cse") is True:
            given = _behind_barrier(given, out)
        inner: dict[Var, Atom] = dict(zip(jaxpr.constvars, map(_literal, consts), strict=True))
        inner.update(zip(jaxpr.invars, given, strict=True))
        out += _inline(jaxpr.eqns, inner)
        names.update(zip(eqn.outvars, rename(jaxpr.outvars, inner), strict=True))
    return out


def _behind_barrier(given: list[Atom], out: list[JaxprEqn]) -> list[Atom]:
    """Returns the atoms passed through barriers, one each so that a cut may look at them singly."""
    variables = list(dict.fromkeys(filter(is_var, given)))
    barriers = [barrier_equation(v) for v in variables]
    out += barriers
    return rename(given, dict(zip(variables, (e.outvars[0] for e in barriers), strict=True)))


def _body(eqn: JaxprEqn) -> tuple[Jaxpr, Sequence] | None:
    param = _CALLS.get(eqn.primitive.name)
    if param is None or param not in eqn.params:
        return None
    shardings = (*eqn.params.get("in_shardings", ()), *eqn.params.get("out_shardings", ()))
    if any(type(s).__name__ != "UnspecifiedValue" for s in shardings):
        return None
    body = eqn.params[param]
    return (body.jaxpr, body.consts) if hasattr(body, "consts") else (body, ())


def _inline_params(eqn: JaxprEqn) -> dict:
    if eqn.primitive.name == "scan":
        return {**eqn.params, "jaxpr": inline_calls(eqn.params["jaxpr"])}
    if eqn.primitive.name == "cond":
        return {**eqn.params, "branches": tuple(map(inline_calls, eqn.params["branches"]))}
    return eqn.params


def _literal(value) -> Literal:
    return Literal(value, jax.typeof(value))
