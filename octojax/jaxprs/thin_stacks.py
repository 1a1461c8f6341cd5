"""Makes a scan stack no value twice, nor one that follows cheaply from the other stacks.

    hs, hs2, gs = scan {h = tanh(...); g = 1 - h; stack h, h, g}
      becomes
    hs = scan {h = tanh(...); stack h};  gs = 1 - hs          and hs2 is read as hs

Reverse differentiation stacks what each step's derivative reads, one stack per use.
"""

from collections.abc import Iterator, Sequence

import jax
from jax.extend.core import JaxprEqn, Var, jaxpr_as_fun

from octojax.compat import new_jaxpr
from octojax.jaxprs.choose_residuals import choose_residuals
from octojax.jaxprs.dataflow import (
    Atom,
    free_vars,
    is_var,
    rename,
    shape_of,
    stacked_aval,
    substitute,
)
from octojax.jaxprs.inline import inline_calls
from octojax.jaxprs.loop import Loop, close_loop, open_loop, restrict_loop


def thin_stacks(eqns: Sequence[JaxprEqn]) -> tuple[list[JaxprEqn], dict[Var, Atom]]:
    """Returns the equations with thinner scans, and what to read instead of the stacks dropped.

    The equations themselves read the new names already.
    """
    out: list[JaxprEqn] = []
    names: dict[Var, Atom] = {}
    for eqn in _renamed(eqns, names):
        if eqn.primitive.name != "scan" or eqn.effects:
            out.append(eqn)
            continue
        replacement, changed = _thin(eqn)
        out += replacement
        names.update(changed)
    return out, names


def _renamed(eqns: Sequence[JaxprEqn], names: dict[Var, Atom]) -> Iterator[JaxprEqn]:
    """Yields the equations under `names`, which may grow meanwhile."""
    for eqn in eqns:
        yield substitute([eqn], names)[0]


def _thin(eqn: JaxprEqn) -> tuple[list[JaxprEqn], dict[Var, Atom]]:
    loop = open_loop(eqn)
    carries = len(loop.carry)
    inside = {v for e in loop.body for v in e.outvars}
    ends = zip(loop.ends[carries:], loop.outs[carries:], strict=True)
    stacks = [(v, out) for v, out in ends if is_var(v) and v in inside]
    values = list(dict.fromkeys(v for v, _ in stacks))
    stored = choose_residuals(loop.body, values, set(loop.consts) | set(loop.xs))
    if len(stored.values) >= len(stacks):
        return [eqn], {}
    old = dict(reversed(stacks))
    stack_of = {v: old.get(v) or Var(stacked_aval(loop.length, v)) for v in stored.values}
    new_stacks = set(stack_of.values())
    dropped = [(v, out) for v, out in stacks if out not in new_stacks]
    gone = {out for _, out in dropped}
    remaining = [at for at, out in enumerate(loop.outs) if out not in gone]
    extra = {v: name for v, name in stack_of.items() if v not in old}
    thinner = close_loop(restrict_loop(loop, loop.body, remaining, stacks=extra))
    after, changed = _after(loop, dropped, stored.repeated, stack_of)
    return [thinner, *after], changed


def _after(
    loop: Loop,
    dropped: Sequence[tuple[Var, Var]],
    repeated: Sequence[int],
    stack_of: dict[Var, Var],
) -> tuple[list[JaxprEqn], dict[Var, Atom]]:
    """Returns equations that make the dropped stacks from those stored, and where they are."""
    ends = [v for v, _ in dropped]
    body = [loop.body[at] for at in repeated]
    read = free_vars(body, ends)
    outer = [stack_of[v] if v in stack_of else {**loop.xs, **loop.consts}[v] for v in read]
    axes = tuple(None if v in loop.consts else 0 for v in read)
    steps = jaxpr_as_fun(new_jaxpr(read, ends, body))
    shapes = [shape_of(v) for v in outer]
    run = jax.vmap(steps, axes, axis_size=loop.length)
    jaxpr = inline_calls(jax.make_jaxpr(run)(*shapes)).jaxpr
    names = dict(zip(jaxpr.invars, outer, strict=True))
    results = rename(jaxpr.outvars, names)
    changed = {out: name for (_, out), name in zip(dropped, results, strict=True)}
    return substitute(jaxpr.eqns, names), changed
