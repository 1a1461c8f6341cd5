"""Outputs of calls and scans that are their inputs, unchanged."""

from dataclasses import replace

from jax.extend.core import JaxprEqn, Literal, Var

from octojax import compat
from octojax.compat import JIT_NAMES, REMAT_NAMES, Atom
from octojax.jaxprs.flat import FlatJaxpr, flatten
from octojax.jaxprs.inline import body_of


def forward_outputs(flat: FlatJaxpr) -> FlatJaxpr:
    """The jaxpr whose outputs name inputs wherever they pass through unchanged.

    Frameworks hand all variables of a module through `jit`, `jax.checkpoint` and `scan`, also
    those that nobody writes to.

        b = remat[{ in x, out x }] a;  return b      becomes      return a
    """
    made = {v: (eqn, k) for eqn in flat.eqns for k, v in enumerate(eqn.outvars)}
    return replace(flat, outvars=tuple(_source(x, made) for x in flat.outvars))


def _source(atom: Atom, made: dict[Var, tuple[JaxprEqn, int]]) -> Atom:
    """The value that an atom is, seen through calls that pass it on."""
    while not isinstance(atom, Literal) and atom in made:
        eqn, output = made[atom]
        operand = passed_through(eqn).get(output)
        if operand is None:
            return atom
        atom = eqn.invars[operand]
    return atom


def passed_through(eqn: JaxprEqn) -> dict[int, int]:
    """For outputs of a call or scan that equal one of its operands: which operand."""
    name = eqn.primitive.name
    if name not in JIT_NAMES | REMAT_NAMES | {"scan"} or body_of(eqn) is None:
        return {}
    body = forward_outputs(flatten(body_of(eqn)))
    operands = {v: k for k, v in enumerate(body.invars)}
    found = {
        k: operands[x]
        for k, x in enumerate(body.outvars)
        if not isinstance(x, Literal) and x in operands
    }
    return _of_scan(eqn, found) if name == "scan" else found


def _of_scan(eqn: JaxprEqn, found: dict[int, int]) -> dict[int, int]:
    """Carries that come back in their place, and rows that are stacked again as they were."""
    consts, carry = compat.scan_counts(eqn.params)
    return {
        output: operand
        for output, operand in found.items()
        if (output < carry and operand == consts + output)
        or (output >= carry and operand >= consts + carry)
    }
