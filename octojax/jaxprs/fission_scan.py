"""Splits a backward scan into one that propagates and what is left of its weight gradients.

    carry (dw, dh), step: da = f(dh, res); dw += dot(x, da); dh = dot(da, w')
      becomes
    carry dh, step: da = f(dh, res); dh = dot(da, w')            stacks da
    dw = dw0 + dot(stacked x, stacked da), over steps and tokens at once

Where the rest is no plain sum of contractions it stays a scan, with the accumulators in its
carry and the crossing values as its inputs.
"""

from jax.extend.core import JaxprEqn, Var

from octojax.jaxprs.batch_contraction import sum_over_steps
from octojax.jaxprs.choose_residuals import choose_residuals
from octojax.jaxprs.dataflow import free_vars, stacked_aval
from octojax.jaxprs.loop import Loop, close_loop, open_loop, restrict_loop, settle_late
from octojax.jaxprs.partition_backward import partition_backward


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
    deferred_outputs = {order[i] for i in cut.second_outputs}
    if not deferred_outputs or settle_late(eqn, deferred_outputs) != deferred_outputs:
        return [eqn]
    first = [loop.body[at] for at in cut.first]
    second = [loop.body[at] for at in cut.second]
    crossing = [v for v in free_vars(second) if v not in accumulators]
    residuals = choose_residuals(first, crossing, set(loop.consts), existing=frozenset(loop.xs))
    second = [*(first[at] for at in residuals.repeated), *second]
    stacks = {v: Var(stacked_aval(loop.length, v)) for v in residuals.values if v not in loop.xs}
    propagate = restrict_loop(
        loop, first, [i for i in range(len(loop.ends)) if i not in deferred_outputs], stacks=stacks
    )
    rest = restrict_loop(loop, second, sorted(deferred_outputs), stacked_inputs=stacks)
    return [close_loop(propagate), *_finish(rest)]


def _finish(rest: Loop) -> list[JaxprEqn]:
    """Returns the rest as contractions over all steps, and as a scan where that cannot be."""
    eqns: list[JaxprEqn] = []
    remaining: list[int] = []
    for at, (end, out) in enumerate(zip(rest.ends, rest.outs, strict=True)):
        carry = rest.carry[at] if at < len(rest.carry) else None
        part = sum_over_steps(rest.body, end, carry, rest.xs, rest.consts, out)
        if part is None:
            remaining.append(at)
        else:
            eqns += part
    return eqns + ([close_loop(restrict_loop(rest, rest.body, remaining))] if remaining else [])
