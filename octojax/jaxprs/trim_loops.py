"""Takes out of loops and branches what nobody reads: dead code, but within scan and cond."""

from collections.abc import Iterable, Sequence

from jax.extend.core import JaxprEqn

from octojax.compat import new_jaxpr
from octojax.jaxprs.dataflow import Atom, is_var
from octojax.jaxprs.loop import close_cond, close_loop, open_loop, restrict_loop, settle_late


def trim_loops(
    eqns: Sequence[JaxprEqn], outputs: Iterable[Atom], keep_effects: bool = False
) -> list[JaxprEqn]:
    """Returns the equations that the outputs need, their loops and branches without the rest.

    With `keep_effects` those that print or call back for their effect stay too, whole.
    """
    live = {v for v in outputs if is_var(v)}
    out: list[JaxprEqn] = []
    for eqn in reversed(eqns):
        effectful = keep_effects and bool(eqn.effects)
        if not effectful and not any(v in live for v in eqn.outvars):
            continue
        unread = {at for at, v in enumerate(eqn.outvars) if v not in live}
        trimmed = eqn if eqn.effects else _trim(eqn, unread)
        out.append(trimmed)
        live.update(filter(is_var, trimmed.invars))
    return out[::-1]


def _trim(eqn: JaxprEqn, unread: set[int]) -> JaxprEqn:
    if eqn.primitive.name == "scan":
        unread = settle_late(eqn, unread)
        loop = open_loop(eqn)
        positions = [at for at in range(len(loop.ends)) if at not in unread]
        inner = trim_loops(loop.body, [loop.ends[at] for at in positions])
        return close_loop(restrict_loop(loop, inner, positions))
    if eqn.primitive.name == "cond":
        positions = [at for at in range(len(eqn.outvars)) if at not in unread]
        branches = []
        for branch in (b.jaxpr for b in eqn.params["branches"]):
            ends = [branch.outvars[at] for at in positions]
            branches.append(new_jaxpr(branch.invars, ends, trim_loops(branch.eqns, ends)))
        return close_cond(eqn, branches, eqn.invars, [eqn.outvars[at] for at in positions])
    return eqn
