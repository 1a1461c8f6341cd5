"""Operations of equations, counted from shapes alone."""

from collections.abc import Iterator
from math import prod
from typing import Any

from jax.extend.core import JaxprEqn

from octojax import compat
from octojax.compat import aval_of
from octojax.jaxprs.operations import contraction_work

# One operation per output element, whatever the function; layout changes cost none.
_FREE = frozenset(
    {
        "broadcast_in_dim", "reshape", "transpose", "squeeze", "slice", "convert_element_type",
        "concatenate", "iota", "copy", "name", "rev", "pad", "dynamic_slice", "gather",
        "dynamic_update_slice", "stop_gradient", "split", "bitcast_convert_type",
        "random_wrap", "random_unwrap", "device_put", "sharding_constraint",
    }
)  # fmt: skip
_MATMULS = frozenset({"dot_general", "conv_general_dilated", "ragged_dot_general"})
_OPAQUE = frozenset({"pallas_call", "ffi_call", "triton_kernel_call"})


def sub_jaxprs(eqn: JaxprEqn) -> Iterator[Any]:
    """Returns the jaxprs in an equation's parameters, opened."""
    for value in eqn.params.values():
        for item in value if isinstance(value, (tuple, list)) else (value,):
            if hasattr(item, "eqns") or hasattr(getattr(item, "jaxpr", None), "eqns"):
                yield compat.split_consts(item)[0]


def operations(eqn: JaxprEqn) -> float:
    """Returns forward operations of an equation: 2 per multiply-add, 1 per other output element.

    A scan counts its length times its body, a cond its dearest branch, a while loop one turn.
    """
    name = eqn.primitive.name
    if name in _FREE:
        return 0.0
    if name in _MATMULS:
        return float(contraction_work(eqn))
    bodies = [sum(map(operations, body.eqns)) for body in sub_jaxprs(eqn)]
    if bodies:
        return float(max(bodies)) * eqn.params.get("length", 1)
    if name.startswith(("reduce", "arg", "cum")):
        return float(sum(_size(x) for x in eqn.invars))
    return float(sum(_size(x) for x in eqn.outvars))


def is_heavy(eqn: JaxprEqn) -> bool:
    """Whether an equation holds a contraction, a loop or an opaque kernel, at any depth."""
    if eqn.primitive.name in _MATMULS | _OPAQUE | {"scan", "while"}:
        return True
    return any(is_heavy(inner) for body in sub_jaxprs(eqn) for inner in body.eqns)


def _size(atom: Any) -> int:
    return prod(getattr(aval_of(atom), "shape", ()))
