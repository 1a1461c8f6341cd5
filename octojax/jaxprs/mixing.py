"""Which values of a backward pass are not sums over the rows of a batch.

What JAX derives is linear in the cotangents, and a parameter's gradient a sum over rows. A
derivative rule of the user's may do other things with them:

    row        x = g * h              each row by itself, also g / |g|, clip(g)
    sum        w = h.T @ g            added up over the rows
    mixed      max(|g|), clip(w)      a nonlinear function of all rows, or of a sum of them

The first axis of a value is taken for that of its rows.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

from jax.extend.core import JaxprEqn, Var

from octojax import compat
from octojax.jaxprs.count import sub_jaxprs
from octojax.jaxprs.dataflow import Atom, aval_of, is_var

_FUNCTIONS = frozenset(
    {
        "abs", "sign", "exp", "exp2", "expm1", "log", "log1p", "sqrt", "rsqrt", "cbrt", "tanh",
        "logistic", "sin", "cos", "tan", "asin", "acos", "atan", "atan2", "sinh", "cosh", "asinh",
        "acosh", "atanh", "erf", "erfc", "erf_inv", "pow", "integer_pow", "square", "max", "min",
        "clamp", "round", "floor", "ceil", "rem", "nextafter", "is_finite", "eq", "ne", "gt", "ge",
        "lt", "le",
    }
)  # fmt: skip
_NONLINEAR_REDUCTIONS = frozenset(
    {
        "reduce_max", "reduce_min", "reduce_prod", "reduce_and", "reduce_or", "argmax", "argmin",
        "cummax", "cummin", "cumprod", "cumlogsumexp", "sort", "approx_top_k", "top_k",
    }
)  # fmt: skip


class Rows(IntEnum):
    """What a value is of the rows of the cotangents."""

    NONE = 0
    ROW = 1
    SUM = 2
    MIXED = 3


@dataclass(frozen=True)
class Mixing:
    """What is known of values; `causes` are the equations that mixed first."""

    rows: dict[Var, Rows] = field(default_factory=dict)
    causes: dict[Var, JaxprEqn] = field(default_factory=dict)

    def of(self, atom: Atom) -> Rows:
        return self.rows.get(atom, Rows.NONE) if is_var(atom) else Rows.NONE

    def cause(self, atom: Atom) -> JaxprEqn | None:
        return self.causes.get(atom) if is_var(atom) else None


def mixing_of(eqns: Sequence[JaxprEqn], sources: Mapping[Var, Rows]) -> Mixing:
    """Returns what every value is of the rows of `sources`."""
    known = Mixing(dict(sources))
    for eqn in eqns:
        operands = [known.of(x) for x in eqn.invars]
        if not any(operands):
            continue
        results, cause = _of_equation(eqn, operands)
        inherited = next(filter(None, map(known.cause, eqn.invars)), None)
        for value, rows in zip(eqn.outvars, results, strict=True):
            known.rows[value] = rows
            if rows is Rows.MIXED and (inherited or cause or Rows.MIXED not in operands):
                known.causes[value] = inherited or cause or eqn
    return known


def _of_equation(eqn: JaxprEqn, operands: Sequence[Rows]) -> tuple[Sequence[Rows], JaxprEqn | None]:
    """Returns what the results are, and the equation within that mixed, if one did."""
    bodies = list(sub_jaxprs(eqn))
    if bodies:
        inner = _of_bodies(eqn, bodies, operands)
        if inner is not None:
            return inner
    return [_joined(eqn, operands)] * len(eqn.outvars), None


def _joined(eqn: JaxprEqn, operands: Sequence[Rows]) -> Rows:
    name, most = eqn.primitive.name, max(operands)
    if most is Rows.MIXED:
        return most
    touched = [k for k, rows in enumerate(operands) if rows]
    nonlinear = (
        name in _FUNCTIONS
        or (name in ("mul", "dot_general") and len(touched) > 1)
        or (name == "div" and operands[1] > Rows.NONE)
        or (name == "select_n" and operands[0] > Rows.NONE)
    )
    if name in _NONLINEAR_REDUCTIONS:
        return Rows.MIXED if most is Rows.SUM or _over_rows(eqn) else most
    if nonlinear and most is Rows.SUM:
        return Rows.MIXED
    if name == "dot_general":
        contracted, _ = eqn.params["dimension_numbers"]
        return Rows.SUM if any(0 in contracted[k] for k in touched) else most
    if name == "conv_general_dilated":
        feature = eqn.params["dimension_numbers"].lhs_spec[1]
        return Rows.SUM if feature == 0 or operands[1] else most
    if name.startswith("scatter"):
        return Rows.SUM if operands[2] else most
    if name == "reduce_sum" and _over_rows(eqn):
        return Rows.SUM
    return most


def _over_rows(eqn: JaxprEqn) -> bool:
    """Whether an equation goes along the first axis."""
    params = eqn.params
    if "axes" in params:
        return 0 in params["axes"]
    last = len(_shape(eqn.invars[0])) - 1
    axis = params.get("axis", params.get("dimension", params.get("reduction_dimension", last)))
    return axis == 0


def _of_bodies(
    eqn: JaxprEqn, bodies: Sequence[Any], operands: Sequence[Rows]
) -> tuple[Sequence[Rows], JaxprEqn | None] | None:
    """Returns what the results are, by the equation's bodies; None where it is not known how the
    operands enter these."""
    name = eqn.primitive.name
    if name == "cond":
        each = [_of_body(body, operands[1:]) for body in bodies]
        results = [max(rows) for rows in zip(*(rows for rows, _ in each), strict=True)]
        if operands[0] >= Rows.SUM:
            results = [Rows.MIXED] * len(results)
        return results, next((cause for _, cause in each if cause is not None), None)
    if name == "scan":
        first, carried = compat.scan_counts(eqn.params)
        return _of_loop(bodies[0], operands, first, carried)
    if name == "while":
        skipped, first = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
        _, body = eqn.params["cond_jaxpr"], eqn.params["body_jaxpr"]
        inside = compat.split_consts(body)[0]
        return _of_loop(inside, operands[skipped:], first, len(operands) - skipped - first)
    if len(bodies) == 1 and len(bodies[0].invars) == len(operands):
        return _of_body(bodies[0], operands)
    return None


def _of_loop(
    body: Any, operands: Sequence[Rows], first: int, carried: int
) -> tuple[Sequence[Rows], JaxprEqn | None]:
    """Repeats the body until what is carried no longer changes."""
    now, first_cause = list(operands), None
    while True:
        results, cause = _of_body(body, now)
        first_cause = first_cause or cause
        after = [max(a, b) for a, b in zip(now[first : first + carried], results, strict=False)]
        if after == now[first : first + carried]:
            return results, first_cause
        now[first : first + carried] = after


def _of_body(body: Any, operands: Iterable[Rows]) -> tuple[Sequence[Rows], JaxprEqn | None]:
    known = mixing_of(body.eqns, dict(zip(body.invars, operands, strict=True)))
    cause = next(filter(None, map(known.cause, body.outvars)), None)
    return [known.of(x) for x in body.outvars], cause


def _shape(atom: Atom) -> tuple[int, ...]:
    return tuple(getattr(aval_of(atom), "shape", ()))
