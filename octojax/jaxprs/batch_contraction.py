"""Returns one contraction over all steps of a loop for a sum of contractions, one per step.

    dw = dw0; for t: dw += transpose(dot(x[t], da[t]))      x[t]: [N, K], da[t]: [N, M]
      becomes
    dw = dw0 + transpose(dot(x, da))                         contracting steps and N at once

A value stacked by the loop (`dw[t] = dot(x[t], da[t])`) gets the steps as a batch dimension.
"""

from collections.abc import Mapping, Sequence

import jax
from jax.extend.core import ClosedJaxpr, JaxprEqn, Var, jaxpr_as_fun

from octojax.compat import new_jaxpr
from octojax.jaxprs.dataflow import Atom, free_vars, is_var, makers, shape_of, substitute
from octojax.jaxprs.inline import inline_calls

_LAYOUT = frozenset(["transpose", "reshape", "convert_element_type", "squeeze"])


def sum_over_steps(
    body: Sequence[JaxprEqn],
    end: Atom,
    carry: tuple[Var, Atom] | None,
    xs: Mapping[Var, Atom],
    consts: Mapping[Var, Atom],
    out: Var,
) -> list[JaxprEqn] | None:
    """Returns equations that bind `out` without a loop, or None where the form is another.

    `end` is the body's result: the carry plus the contraction, or the contraction alone to be
    stacked. Both operands of the contraction must differ from step to step.
    """
    producer = makers(body)
    summed = end if carry is None else _added(body, producer, end, carry[0])
    layout: list[JaxprEqn] = []
    while (
        is_var(summed) and summed in producer and body[producer[summed]].primitive.name in _LAYOUT
    ):
        layout.append(body[producer[summed]])
        summed = layout[-1].invars[0]
    if not is_var(summed) or summed not in producer:
        return None
    dot = body[producer[summed]]
    if dot.primitive.name != "dot_general":
        return None
    before = [body[at] for at in _before(body, producer, dot)]
    inputs = free_vars(before, dot.invars)
    if any(v not in xs and v not in consts for v in inputs) or not all(
        is_var(v) and _varies(before, v, xs) for v in dot.invars
    ):
        return None
    result = layout[0].outvars if layout else dot.outvars
    after = new_jaxpr(dot.outvars, result, layout[::-1])
    return _traced(
        new_jaxpr(inputs, dot.invars, before), dot, after, carry, inputs, xs, consts, out
    )


def _added(body, producer, end: Atom, start: Var) -> Atom | None:
    """Returns what a step adds to its carry, if all it does is add, and nothing else reads it."""
    if not is_var(end) or end not in producer:
        return None
    eqn = body[producer[end]]
    readers = sum(v is start for e in body for v in e.invars)
    if eqn.primitive.name not in ("add", "add_any") or readers != 1 or start not in eqn.invars:
        return None
    return eqn.invars[1] if eqn.invars[0] is start else eqn.invars[0]


def _before(body, producer, dot: JaxprEqn) -> list[int]:
    indices: set[int] = set()
    todo = [v for v in dot.invars if is_var(v)]
    while todo:
        at = producer.get(todo.pop())
        if at is not None and at not in indices:
            indices.add(at)
            todo += [v for v in body[at].invars if is_var(v)]
    return sorted(indices)


def _varies(before: Sequence[JaxprEqn], value: Var, xs: Mapping[Var, Atom]) -> bool:
    reached = set(xs)
    for eqn in before:
        if any(is_var(v) and v in reached for v in eqn.invars):
            reached.update(eqn.outvars)
    return value in reached


def _traced(
    before: ClosedJaxpr,
    dot: JaxprEqn,
    after: ClosedJaxpr,
    carry: tuple[Var, Atom] | None,
    inputs: Sequence[Var],
    xs: Mapping[Var, Atom],
    consts: Mapping[Var, Atom],
    out: Var,
) -> list[JaxprEqn]:
    """Traces the batched form, and returns its equations on the loop's outer atoms."""
    (lhs_c, rhs_c), (lhs_b, rhs_b) = dot.params["dimension_numbers"]
    sums = carry is not None
    shifted = [tuple(d + 1 for d in dims) for dims in (lhs_c, rhs_c, lhs_b, rhs_b)]
    steps = (0,)
    if sums:
        numbers = ((steps + shifted[0], steps + shifted[1]), (shifted[2], shifted[3]))
    else:
        numbers = ((shifted[0], shifted[1]), (steps + shifted[2], steps + shifted[3]))
    axes = [0 if v in xs else None for v in inputs]

    def batched(start, *values):
        lhs, rhs = jax.vmap(jaxpr_as_fun(before), axes)(*values)
        total = jax.lax.dot_general(
            lhs,
            rhs,
            numbers,
            precision=dot.params["precision"],
            preferred_element_type=dot.params["preferred_element_type"],
        )
        run = jaxpr_as_fun(after)
        if not sums:
            return jax.vmap(run)(total)
        return [start[0] + run(total)[0]]

    outer = [xs[v] if v in xs else consts[v] for v in inputs]
    start = [] if carry is None else [carry[1]]
    shapes = [shape_of(a) for a in (*start, *outer)]
    closed = inline_calls(jax.make_jaxpr(batched)(shapes[: len(start)], *shapes[len(start) :]))
    jaxpr = closed.jaxpr
    names = dict(zip(jaxpr.invars, (*start, *outer), strict=True))
    eqns = substitute(jaxpr.eqns, names)
    (result,) = jaxpr.outvars
    at = next(i for i, e in enumerate(eqns) if result in e.outvars)
    eqns[at] = eqns[at].replace(outvars=[out])
    return eqns
