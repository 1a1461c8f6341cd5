"""Splits a backward cond per branch: what others wait for, and what is left of each branch.

    dx, dw = cond i [{dx = dot dy w1', dw = dot x dy}, {dx = dot dy w2', dw = 0}] dy x w1 w2
      becomes
    dx, kept = cond i [...]
    dw = cond i [{dot x dy}, {0}] dy x kept

Branches keep different values; they share the places of equal shape and type, and a branch
fills with zeros the places it does not need.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax.extend.core import Jaxpr, JaxprEqn, Var

from octojax.compat import new_jaxpr
from octojax.jaxprs.choose_residuals import choose_residuals
from octojax.jaxprs.dataflow import Atom, aval_of, eqns_for, free_vars
from octojax.jaxprs.loop import close_cond
from octojax.jaxprs.partition_backward import Cut, partition_backward


def split_cond(eqn: JaxprEqn, late: set[int]) -> list[JaxprEqn]:
    """Returns equations that bind the same outputs, the `late` ones apart where that pays."""
    branches = [b.jaxpr for b in eqn.params["branches"]]
    deferred_outputs = sorted({i for b in branches for i in _deferrable_outputs(b, late)})
    if not deferred_outputs:
        return [eqn]
    parts = [_split_branch(b, deferred_outputs) for b in branches]
    if any(not _has_zero(v) for _, _, residuals in parts for v in residuals):
        return [eqn]
    slots, places = _share([residuals for _, _, residuals in parts])
    early = [i for i in range(len(eqn.outvars)) if i not in deferred_outputs]
    first, second = [], []
    for branch, (before, after, residuals), place in zip(branches, parts, places, strict=True):
        value_in = dict(zip(place, residuals, strict=True))
        zeros = {s: _zeros(slot) for s, slot in enumerate(slots) if s not in value_in}
        ends = [branch.outvars[i] for i in early]
        ends += [value_in[s] if s in value_in else zeros[s][0] for s in range(len(slots))]
        live = eqns_for(before, ends)
        first.append(
            new_jaxpr(branch.invars, ends, [*live, *(e for _, es in zeros.values() for e in es)])
        )
        residual_inputs = [
            value_in[s] if s in value_in else Var(slot.aval) for s, slot in enumerate(slots)
        ]
        ends = [branch.outvars[i] for i in deferred_outputs]
        second.append(new_jaxpr([*branch.invars, *residual_inputs], ends, after))
    stacks = [Var(slot.aval) for slot in slots]
    return [
        close_cond(eqn, first, eqn.invars, [*(eqn.outvars[i] for i in early), *stacks]),
        close_cond(eqn, second, [*eqn.invars, *stacks], [eqn.outvars[i] for i in deferred_outputs]),
    ]


def _deferrable_outputs(branch: Jaxpr, late: set[int]) -> list[int]:
    order = sorted(late)
    return [order[i] for i in _cut(branch, late).second_outputs]


def _cut(branch: Jaxpr, late: set[int]) -> Cut:
    early = [v for i, v in enumerate(branch.outvars) if i not in late]
    return partition_backward(branch.eqns, early, [branch.outvars[i] for i in sorted(late)], set())


def _split_branch(
    branch: Jaxpr, deferred_outputs: Sequence[int]
) -> tuple[list[JaxprEqn], list[JaxprEqn], tuple[Var, ...]]:
    """Returns both parts of a branch and the values that cross from one to the other."""
    cut = _cut(branch, set(deferred_outputs))
    first = [branch.eqns[at] for at in cut.first]
    second = [branch.eqns[at] for at in cut.second]
    ends = [branch.outvars[i] for i in deferred_outputs]
    operands = frozenset(branch.invars)
    residuals = choose_residuals(first, free_vars(second, ends), set(), existing=operands)
    new = tuple(v for v in residuals.values if v not in operands)
    return first, [*(first[at] for at in residuals.repeated), *second], new


def _share(residuals: Sequence[Sequence[Var]]) -> tuple[list[Var], list[list[int]]]:
    """Returns one value per shared place, and per branch the places of its values."""
    slots: list[Var] = []
    places: list[list[int]] = []
    for values in residuals:
        own_places: list[int] = []
        for v in values:
            fits = (s for s, u in enumerate(slots) if _alike(u, v) and s not in own_places)
            place = next(fits, len(slots))
            if place == len(slots):
                slots.append(v)
            own_places.append(place)
        places.append(own_places)
    return slots, places


def _alike(one: Var, other: Var) -> bool:
    a, b = aval_of(one), aval_of(other)
    return (a.shape, a.dtype) == (b.shape, b.dtype)


def _has_zero(value: Var) -> bool:
    return not jnp.issubdtype(aval_of(value).dtype, jax.dtypes.extended)


def _zeros(like: Var) -> tuple[Atom, list[JaxprEqn]]:
    """Returns zeros of the value's shape and type, and the equations that make them."""
    shape, dtype = aval_of(like).shape, aval_of(like).dtype
    jaxpr = jax.make_jaxpr(lambda: jnp.zeros(shape, dtype))().jaxpr
    return jaxpr.outvars[0], list(jaxpr.eqns)
