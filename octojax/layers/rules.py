"""Values that a derivative rule of the user's makes of parameters alone, read by several stages.

    w = decayed(params)            a custom_vjp: its gradient is made from the sum over readers
    stage 0  h = x @ w             makes w and sends it on
    stage 1  y = h @ w.T           reads what came in

What parameters alone make is otherwise computed again in each stage that reads it: linear
derivatives add up. A rule need not be linear: it may clip its cotangent, or ignore it.
"""

from collections.abc import Callable, Collection, Mapping, Sequence

import jax
from jax.extend.core import JaxprEqn, Var, jaxpr_as_fun

from octojax import compat
from octojax.compat import CUSTOM_NAMES
from octojax.jaxprs.count import sub_jaxprs
from octojax.jaxprs.dataflow import shape_of
from octojax.jaxprs.inline import inline_calls
from octojax.jaxprs.linear import is_linear
from octojax.layers import classify
from octojax.layers.classify import Depends
from octojax.layers.find import LayeredLoss


def shared_values(
    layered: LayeredLoss, reads_by_stage: Sequence[Collection[Var]]
) -> Mapping[Var, range]:
    """Returns the stages that send each such value on: its first reader to the last but one.

    `reads_by_stage` are the values that a stage reads and that no stage sends as activations.
    """
    normal = layered.normal
    eqns = normal.flat.eqns
    ruled = [at for at in range(len(eqns)) if _is_ruled(layered, at)]
    values = {v for at in ruled for v in eqns[at].outvars}
    if not values:
        return {}
    readers: dict[Var, set[int]] = {v: set() for v in values}

    def read(stage: int, operands: Collection[Var]) -> None:
        reached = normal.recomputed([v for v in operands if v not in values], values)[0]
        inner = {v for at in reached for v in eqns[at].invars if v in values}
        for v in inner | (values & set(operands)):
            readers[v].add(stage)

    for stage, operands in enumerate(reads_by_stage):
        read(stage, operands)
    for at in reversed(ruled):  # what one rule makes of another's value is made where it is read
        stages = set().union(*(readers[v] for v in eqns[at].outvars))
        if stages:
            read(min(stages), [v for v in eqns[at].invars if isinstance(v, Var)])
    senders: dict[Var, range] = {}
    for at in ruled:
        stages = set().union(*(readers[v] for v in eqns[at].outvars))
        for v in eqns[at].outvars:
            if readers[v] and max(readers[v]) > min(stages):
                senders[v] = range(min(stages), max(readers[v]))
    return senders


def _is_ruled(layered: LayeredLoss, at: int) -> bool:
    """Whether an equation applies a rule that is not linear to trained parameters alone."""
    normal = layered.normal
    eqn = normal.flat.eqns[at]
    if classify.union(layered.depends, eqn.invars) != Depends.PARAM or not holds(eqn, _is_custom):
        return False
    units = normal.units_behind([v for v in eqn.invars if isinstance(v, Var)])
    return any(normal.units[u].trainable for u in units) and not _pulls_linearly(eqn)


def _pulls_linearly(eqn: JaxprEqn) -> bool:
    """Whether the gradients of an equation are linear in the cotangents of its results."""
    inputs = list(dict.fromkeys(v for v in eqn.invars if isinstance(v, Var)))
    outputs = [Var(v.aval) for v in eqn.outvars]
    run = jaxpr_as_fun(compat.new_jaxpr(inputs, outputs, [eqn.replace(outvars=outputs)]))
    floats = [k for k, v in enumerate(inputs) if compat.is_float(v.aval)]

    def pulled(values, cotangents):
        def differentiable(some):
            full = list(values)
            for k, x in zip(floats, some, strict=True):
                full[k] = x
            return [x for x in run(*full) if compat.is_float(x)]

        return jax.vjp(differentiable, [values[k] for k in floats])[1](cotangents)

    cotangents = [shape_of(v) for v in outputs if compat.is_float(v.aval)]
    jaxpr = inline_calls(jax.make_jaxpr(pulled)(list(map(shape_of, inputs)), cotangents)).jaxpr
    return is_linear(jaxpr.eqns, jaxpr.invars[len(inputs) :], jaxpr.outvars)


def _is_custom(eqn: JaxprEqn) -> bool:
    return eqn.primitive.name in CUSTOM_NAMES - {"custom_jvp_call"}


def holds(eqn: JaxprEqn, kind: Callable[[JaxprEqn], bool]) -> bool:
    """Whether the equation, or one in its bodies at any depth, is of a kind."""
    return kind(eqn) or any(holds(inner, kind) for body in sub_jaxprs(eqn) for inner in body.eqns)
