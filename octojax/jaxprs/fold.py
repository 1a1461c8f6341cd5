"""Integer arithmetic on literals done now, so that an index known at trace time is a literal."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
from jax.extend.core import JaxprEqn, Literal

from octojax.compat import Atom, aval_of
from octojax.jaxprs.flat import Builder, FlatJaxpr, rewrite

_FOLDS: Mapping[str, Callable[..., Any]] = {
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "max": np.maximum,
    "min": np.minimum,
    "rem": np.fmod,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
    "eq": np.equal,
    "ne": np.not_equal,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "not": np.invert,
    "convert_element_type": lambda x: x,
    "select_n": lambda which, *cases: cases[int(which)],
    "clamp": lambda low, x, high: np.minimum(np.maximum(x, low), high),
}


def fold_integers(flat: FlatJaxpr) -> FlatJaxpr:
    """Returns the jaxpr with scalar integer and bool equations on literals replaced by literals.

    A dynamic slice at literal positions becomes a static one:

        i = add 0 1
        w = dynamic_slice a i 0      becomes      w = slice[1:2, 0:n] a
    """
    return rewrite(flat, _fold)


def _fold(builder: Builder, eqn: JaxprEqn, args: list[Atom]) -> list[Atom] | None:
    name = eqn.primitive.name
    if name == "dynamic_slice":
        return _static_slice(builder, eqn, args)
    if name not in _FOLDS or not all(map(_is_integer, args)):
        return None
    (out,) = eqn.outvars
    if aval_of(out).shape or aval_of(out).dtype.kind not in "iub":
        return None
    values = [np.asarray(x.val) for x in args if isinstance(x, Literal)]
    with np.errstate(all="ignore"):
        return [Literal(np.asarray(_FOLDS[name](*values), aval_of(out).dtype), aval_of(out))]


def _is_integer(atom: Atom) -> bool:
    return (
        isinstance(atom, Literal) and not aval_of(atom).shape and aval_of(atom).dtype.kind in "iub"
    )


def _static_slice(builder: Builder, eqn: JaxprEqn, args: list[Atom]) -> list[Atom] | None:
    operand, *starts = args
    if not all(map(_is_integer, starts)):
        return None
    at = [int(x.val) for x in starts if isinstance(x, Literal)]
    sizes = eqn.params["slice_sizes"]
    limits = [n - size for n, size in zip(aval_of(operand).shape, sizes)]
    at = [min(max(start, 0), most) for start, most in zip(at, limits)]
    return [slice_static(builder, operand, at, sizes)]


def slice_static(builder: Builder, operand: Atom, starts: Any, sizes: Any) -> Atom:
    """Appends a static slice of `sizes` at `starts`; returns its output."""
    starts = tuple(int(x) for x in starts)
    limits = tuple(start + int(size) for start, size in zip(starts, sizes))
    params = {"start_indices": starts, "limit_indices": limits, "strides": None}
    shape = tuple(int(size) for size in sizes)
    return builder.append(jax.lax.slice_p, [operand], params, aval_of(operand).update(shape=shape))
