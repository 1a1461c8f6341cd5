"""Splits a backward scan into one that propagates and what is left of its weight gradients.

    carry (dw, dh), step: da = f(dh, res); dw += dot(x, da); dh = dot(da, w')
      becomes
    carry dh, step: da = f(dh, res); dh = dot(da, w')            stacks da
    dw = dw0 + dot(stacked x, stacked da), over steps and tokens at once

Where the rest is no plain sum of contractions it stays a scan, with the accumulators in its
carry and the crossing values as its inputs.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from jax.extend.core import JaxprEqn, Var

from octojax.compat import new_jaxpr, scan_counts, scan_params
from octojax.jaxprs.batch_contraction import sum_over_steps
from octojax.jaxprs.choose_residuals import choose_residuals
from octojax.jaxprs.dataflow import (
    Atom,
    free_vars,
    needed_for,
    stacked_aval,
)
from octojax.jaxprs.partition_backward import partition_backward


@dataclass(frozen=True)
class Loop:
    """A scan equation taken apart: body variables beside the outer atoms they stand for."""

    eqn: JaxprEqn
    body: tuple[JaxprEqn, ...]
    consts: dict[Var, Atom]
    carry: tuple[tuple[Var, Atom], ...]  # (variable at the start of a step, initial value)
    xs: dict[Var, Atom]
    ends: tuple[Atom, ...]  # carries at the end of a step, then what is stacked
    outs: tuple[Var, ...]

    @property
    def length(self) -> int:
        return self.eqn.params["length"]


def open_loop(eqn: JaxprEqn) -> Loop:
    """Returns the parts of a scan equation."""
    body, params = eqn.params["jaxpr"].jaxpr, eqn.params
    n, carried = scan_counts(params)
    c = n + carried
    pairs = list(zip(body.invars, eqn.invars, strict=True))
    return Loop(
        eqn,
        tuple(body.eqns),
        dict(pairs[:n]),
        tuple(pairs[n:c]),
        dict(pairs[c:]),
        tuple(body.outvars),
        tuple(eqn.outvars),
    )


def close_loop(loop: Loop) -> JaxprEqn:
    """Returns the scan equation made of these parts; unread constants and inputs are left out."""
    pairs = [*loop.consts.items(), *loop.carry, *loop.xs.items()]
    body = new_jaxpr([v for v, _ in pairs], loop.ends, loop.body)
    counts = len(loop.consts), len(loop.carry), len(loop.xs), len(loop.ends) - len(loop.carry)
    params = scan_params({**loop.eqn.params, "jaxpr": body}, *counts)
    effects = frozenset(x for e in loop.body for x in e.effects)
    return loop.eqn.replace(
        invars=[a for _, a in pairs], outvars=list(loop.outs), params=params, effects=effects
    )


def settle_late(eqn: JaxprEqn, late: set[int]) -> set[int]:
    """Returns the late outputs that no step's other outputs depend on through the carry."""
    loop = open_loop(eqn)
    while True:
        early = [v for i, v in enumerate(loop.ends) if i not in late]
        needed = [loop.body[at] for at in sorted(needed_for(loop.body, early))]
        read = set(free_vars(needed, early))
        wrong = {i for i in late if i < len(loop.carry) and loop.carry[i][0] in read}
        if not wrong:
            return late
        late = late - wrong


def fission_scan(eqn: JaxprEqn, late: set[int]) -> list[JaxprEqn]:
    """Returns equations that bind the same outputs, the `late` ones apart where that pays.

    `late` must be settled: no early output may depend on a late carry.
    """
    loop = open_loop(eqn)
    order = sorted(late)
    early = [i for i in range(len(loop.ends)) if i not in late]
    accumulators = {loop.carry[i][0] for i in late if i < len(loop.carry)}
    at_hand = set(loop.consts) | accumulators
    cut = partition_backward(
        loop.body, [loop.ends[i] for i in early], [loop.ends[i] for i in order], at_hand
    )
    moved = {order[i] for i in cut.second_outputs}
    if not moved or settle_late(eqn, moved) != moved:
        return [eqn]
    first = [loop.body[at] for at in cut.first]
    second = [loop.body[at] for at in cut.second]
    crossing = [v for v in free_vars(second) if v not in accumulators]
    kept = choose_residuals(first, crossing, set(loop.consts), existing=frozenset(loop.xs))
    second = [*(first[at] for at in kept.repeated), *second]
    stacks = {v: Var(stacked_aval(loop.length, v)) for v in kept.values if v not in loop.xs}
    propagate = _part(loop, first, [i for i in range(len(loop.ends)) if i not in moved], {}, stacks)
    rest = _part(loop, second, sorted(moved), stacks, {})
    return [close_loop(propagate), *_finish(rest)]


def _part(
    loop: Loop,
    body: Sequence[JaxprEqn],
    outputs: Sequence[int],
    given: dict[Var, Var],
    stacks: dict[Var, Var],
) -> Loop:
    """Returns the loop over `body` that makes some of the outputs and stacks more values.

    `given` are body values that come in stacked, under the names of their stacks.
    """
    carries = len(loop.carry)
    carry = tuple(loop.carry[i] for i in outputs if i < carries)
    ends = [loop.ends[i] for i in outputs] + list(stacks)
    needed = [body[at] for at in sorted(needed_for(body, ends))]
    read = set(free_vars(needed, ends))
    return replace(
        loop,
        body=tuple(needed),
        consts={v: a for v, a in loop.consts.items() if v in read},
        carry=carry,
        xs={v: a for v, a in (loop.xs | given).items() if v in read},
        ends=tuple(ends),
        outs=(*(loop.outs[i] for i in outputs), *stacks.values()),
    )


def _finish(rest: Loop) -> list[JaxprEqn]:
    """Returns the rest as contractions over all steps, and as a scan where that cannot be."""
    found: list[JaxprEqn] = []
    left: list[int] = []
    for at, (end, out) in enumerate(zip(rest.ends, rest.outs, strict=True)):
        carry = rest.carry[at] if at < len(rest.carry) else None
        part = sum_over_steps(rest.body, end, carry, rest.xs, rest.consts, out)
        if part is None:
            left.append(at)
        else:
            found += part
    return found + ([close_loop(_part(rest, rest.body, left, {}, {}))] if left else [])
