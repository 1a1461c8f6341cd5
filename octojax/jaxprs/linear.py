"""Whether equations are linear in some of their inputs, and which values are zeros written out."""

from collections.abc import Collection, Iterable, Sequence

import jax.numpy as jnp
import numpy as np
from jax.extend.core import JaxprEqn, Var

from octojax.jaxprs.dataflow import Atom, aval_of, is_var, needed_for
from octojax.jaxprs.operations import VIEWS

_SUMS = VIEWS | {"add", "add_any", "sub", "neg", "reduce_sum", "concatenate", "cumsum", "slice"}
_PRODUCTS = frozenset(["mul", "dot_general", "conv_general_dilated"])
_PICKS = frozenset(["dynamic_slice", "gather", "split"])
_ZERO_OF_ZEROS = VIEWS | {"add", "add_any", "neg", "mul", "reduce_sum"}


def is_linear(eqns: Sequence[JaxprEqn], sources: Iterable[Var], outputs: Sequence[Atom]) -> bool:
    """Returns whether the outputs are linear in the sources; False where that is not plain.

    A sum with something that does not depend on the sources is not linear, nor is such a value
    by itself, unless it is zero.
    """
    zeros = zero_values(eqns)
    touched = set(sources)

    def depends(atom: Atom) -> bool:
        return is_var(atom) and atom in touched

    def keeps(atom: Atom) -> bool:
        return depends(atom) or is_zero(atom, zeros)

    needed = needed_for(eqns, outputs)
    for eqn in (eqns[at] for at in sorted(needed)):
        if not any(map(depends, eqn.invars)):
            continue
        name = eqn.primitive.name
        first, *rest = eqn.invars
        linear = (
            (name in _SUMS and all(map(keeps, eqn.invars)))
            or (name in _PRODUCTS and sum(map(depends, eqn.invars)) == 1)
            or (name in _PICKS | {"div"} and not any(map(depends, rest)))
            or (name == "select_n" and not depends(first) and all(map(keeps, rest)))
        )
        if not linear:
            return False
        touched.update(eqn.outvars)
    return all(map(keeps, outputs))


def zero_values(eqns: Sequence[JaxprEqn]) -> set[Var]:
    """Returns the values that are zeros written out: what JAX makes of a gradient it never met."""
    zeros: set[Var] = set()
    for eqn in eqns:
        if eqn.primitive.name in _ZERO_OF_ZEROS and all(is_zero(x, zeros) for x in eqn.invars):
            zeros.update(eqn.outvars)
    return zeros


def is_zero(atom: Atom, zeros: Collection[Var]) -> bool:
    """Returns whether the atom is one of `zeros` or a literal of zeros."""
    if is_var(atom):
        return atom in zeros
    number = jnp.issubdtype(aval_of(atom).dtype, jnp.inexact)
    return number and not np.any(np.asarray(atom.val))  # pyright: ignore[reportAttributeAccessIssue]
