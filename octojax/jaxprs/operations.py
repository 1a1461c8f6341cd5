"""What an equation costs: which primitives are contractions, which only move or rename data."""

import math

from jax.extend.core import Jaxpr, JaxprEqn

from octojax.jaxprs.dataflow import Atom, aval_of


def _names(words: str) -> frozenset[str]:
    return frozenset(words.split())


VIEWS = _names("""
    reshape transpose squeeze broadcast_in_dim convert_element_type rev copy
    reduce_precision optimization_barrier
""")
"""One array in, one out, no arithmetic: cheaper to repeat than to store the result."""

ARITHMETIC = VIEWS | _names("""
    add add_any sub mul neg one_minus_square sign max min square integer_pow abs and or not xor
    eq ne lt le gt ge select_n iota
""")
"""One instruction per element: cheaper to repeat than to store, where the operands are there."""

CHEAP = ARITHMETIC | _names("""
    div exp exp2 log log1p expm1 tanh logistic sin cos sqrt rsqrt pow floor ceil round erf clamp
    is_finite stop_gradient concatenate pad slice dynamic_slice gather rem shift_left
    shift_right_logical shift_right_arithmetic cumsum reduce_sum reduce_max reduce_min
    reduce_and reduce_or argmax argmin split nextafter
""")
"""Linear in the size of what they touch; worth repeating where inputs alone are read."""

CONTRACTIONS = _names("""
    dot_general conv_general_dilated ragged_dot_general scatter-add
""")
"""What a weight gradient ends in."""


def elements(atom: Atom) -> int:
    """Returns how many numbers the value holds."""
    return math.prod(getattr(aval_of(atom), "shape", ()))


def is_contraction(eqn: JaxprEqn) -> bool:
    """Whether the equation may form the end of a weight gradient, itself or in its body."""
    return eqn.primitive.name in CONTRACTIONS or any(
        any(map(is_contraction, body.eqns)) for body in bodies(eqn)
    )


def is_opaque(eqn: JaxprEqn) -> bool:
    """Whether the equation holds work that this package does not look into."""
    name = eqn.primitive.name
    has_callable = any(
        hasattr(p, "eqns") or hasattr(p, "jaxpr") or callable(p) for p in eqn.params.values()
    )
    return bool(bodies(eqn)) or has_callable or "callback" in name or bool(eqn.effects)


def bodies(eqn: JaxprEqn) -> list[Jaxpr]:
    """Returns the body of a scan, or the branches of a cond, as open jaxprs; else nothing."""
    if eqn.primitive.name == "scan":
        return [eqn.params["jaxpr"].jaxpr]
    if eqn.primitive.name == "cond":
        return [b.jaxpr for b in eqn.params["branches"]]
    return []


def contraction_work(eqn: JaxprEqn) -> int:
    """Returns the operations of a contraction; of a scatter, the elements it touches.

    A scan counts its steps, a cond its heaviest branch; what is no contraction counts nothing.
    """
    if inner := bodies(eqn):
        work = max(sum(map(contraction_work, body.eqns)) for body in inner)
        return work * eqn.params.get("length", 1)
    return _own_work(eqn) if eqn.primitive.name in CONTRACTIONS else 0


def _own_work(eqn: JaxprEqn) -> int:
    name, out = eqn.primitive.name, elements(eqn.outvars[0])
    if name == "dot_general":
        (lhs_dims, _), _ = eqn.params["dimension_numbers"]
        return 2 * out * math.prod(aval_of(eqn.invars[0]).shape[d] for d in lhs_dims)
    if name == "conv_general_dilated":
        kernel = aval_of(eqn.invars[1]).shape
        spec = eqn.params["dimension_numbers"].rhs_spec
        return 2 * out * math.prod(kernel) // max(1, kernel[spec[0]])
    if name.startswith("ragged_dot"):
        rows = aval_of(eqn.invars[0]).shape
        return 2 * elements(eqn.invars[0]) * max(1, out // max(1, math.prod(rows[:-1])))
    return out + elements(eqn.invars[-1])
