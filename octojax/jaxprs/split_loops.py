"""Takes weight gradients out of the loops and branches of a backward pass.

A weight read inside a `scan` has its gradient in the carry of the backward scan, which a cut
between equations cannot reach. Walking from the last equation to the first, each scan or cond
that makes both what others wait for and weight gradients becomes two.
"""

from collections.abc import Sequence

from jax.extend.core import JaxprEqn

from octojax.compat import new_jaxpr
from octojax.jaxprs.dataflow import Atom, eqns_for, is_dropped, is_var
from octojax.jaxprs.fission_scan import fission_scan
from octojax.jaxprs.loop import settle_late
from octojax.jaxprs.operations import is_contraction, is_opaque
from octojax.jaxprs.split_cond import split_cond


def split_loops(
    eqns: Sequence[JaxprEqn], urgent: Sequence[Atom], deferrable: Sequence[Atom]
) -> list[JaxprEqn]:
    """Returns the equations that `urgent` and `deferrable` need, their loops split where it pays.

    Equations with effects stay too. An output of a loop is *late* if neither `urgent` nor a
    contraction or loop depends on it.
    """
    live = eqns_for(eqns, [*urgent, *deferrable], keep_effects=True)
    busy = {v for v in urgent if is_var(v)}
    live_values = {v for v in (*urgent, *deferrable) if is_var(v)}
    out: list[list[JaxprEqn]] = []
    for eqn in reversed(live):
        late = {
            at
            for at, v in enumerate(eqn.outvars)
            if v in live_values and v not in busy and not is_dropped(v)
        }
        out.append(_split(eqn, late))
        if is_contraction(eqn) or is_opaque(eqn) or any(v in busy for v in eqn.outvars):
            busy.update(filter(is_var, eqn.invars))
        live_values.update(filter(is_var, eqn.invars))
    return [eqn for part in reversed(out) for eqn in part]


def _split(eqn: JaxprEqn, late: set[int]) -> list[JaxprEqn]:
    if not late or eqn.effects:
        return [eqn]
    if eqn.primitive.name == "scan":
        late = settle_late(eqn, late)
        return fission_scan(_within(eqn, "jaxpr", late), late)
    if eqn.primitive.name == "cond":
        return split_cond(_within(eqn, "branches", late), late)
    return [eqn]


def _within(eqn: JaxprEqn, param: str, late: set[int]) -> JaxprEqn:
    """Returns the equation with the loops inside its body or branches split."""
    bodies = eqn.params[param]
    many = isinstance(bodies, tuple)
    jaxprs = []
    for body in bodies if many else (bodies,):
        jaxpr = body.jaxpr
        outs = list(enumerate(jaxpr.outvars))
        inner = split_loops(
            jaxpr.eqns, [v for i, v in outs if i not in late], [v for i, v in outs if i in late]
        )
        jaxprs.append(new_jaxpr(jaxpr.invars, jaxpr.outvars, inner))
    return eqn.replace(params={**eqn.params, param: tuple(jaxprs) if many else jaxprs[0]})
