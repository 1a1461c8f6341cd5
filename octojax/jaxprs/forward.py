"""Outputs of calls and scans that are their inputs, unchanged."""

from dataclasses import replace

from jax.extend.core import JaxprEqn, Literal, Var

from octojax import compat
from octojax.compat import JIT_NAMES, REMAT_NAMES, Atom
from octojax.jaxprs.flat import FlatJaxpr, flatten
from octojax.jaxprs.inline import body_of


def forward_outputs(flat: FlatJaxpr) -> FlatJaxpr:
    """Returns the jaxpr whose outputs name inputs wherever they pass through unchanged.

    Frameworks hand all variables of a module through `jit`, `jax.checkpoint` and `scan`, also
    those that nobody writes to.

        b = remat[{ in x, out x }] a;  return b      becomes      return a
    """
    producer = {v: (eqn, k) for eqn in flat.eqns for k, v in enumerate(eqn.outvars)}
    return replace(flat, outvars=tuple(_source(x, producer) for x in flat.outvars))


def _source(atom: Atom, producer: dict[Var, tuple[JaxprEqn, int]]) -> Atom:
    """Returns the value that an atom is, seen through calls that pass it on."""
    while not isinstance(atom, Literal) and atom in producer:
        eqn, output = producer[atom]
        operand = passed_through(eqn).get(output)
        if operand is None:
            return atom
        atom = eqn.invars[operand]
    return atom


def passed_through(eqn: JaxprEqn) -> dict[int, int]:
    """Returns, for outputs of a call or scan that equal an operand, which operand."""
    name = eqn.primitive.name
    if name not in JIT_NAMES | REMAT_NAMES | {"scan"} or body_of(eqn) is None:
        return {}
    body = forward_outputs(flatten(body_of(eqn)))
    operands = {v: k for k, v in enumerate(body.invars)}
    sources = {
        k: operands[x]
        for k, x in enumerate(body.outvars)
        if not isinstance(x, Literal) and x in operands
    }
    return _of_scan(eqn, sources) if name == "scan" else sources


def _of_scan(eqn: JaxprEqn, sources: dict[int, int]) -> dict[int, int]:
    """Returns carries that come back in their place, and rows stacked again as they were."""
    consts, carry = compat.scan_counts(eqn.params)
    return {
        output: operand
        for output, operand in sources.items()
        if (output < carry and operand == consts + output)
        or (output >= carry and operand >= consts + carry)
    }
