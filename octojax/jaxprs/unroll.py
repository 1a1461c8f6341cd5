"""Scans written out iteration by iteration."""

from collections.abc import Sequence

import jax
from jax.extend.core import DropVar, JaxprEqn

from octojax import compat
from octojax.compat import JIT_NAMES, Atom, aval_of
from octojax.jaxprs.flat import Builder
from octojax.jaxprs.inline import call_inlined
from octojax.jaxprs.rows import expand_row, slice_row, squeeze_row


def unroll_scan(builder: Builder, eqn: JaxprEqn, args: Sequence[Atom]) -> list[Atom]:
    """Appends every iteration of a scan; returns its final carry and stacked outputs.

        c, ys = scan[body, length=2] consts c0 xs
          becomes
        c1, y0 = body consts c0 xs[0]
        c2, y1 = body consts c1 xs[1];  ys = concatenate y0 y1

    A reverse scan runs from the last row to the first; its outputs stand in row order.
    """
    num_consts, num_carry = compat.scan_counts(eqn.params)
    consts, carry = args[:num_consts], list(args[num_consts : num_consts + num_carry])
    xs = args[num_consts + num_carry :]
    length = eqn.params["length"]
    rows: list[list[Atom]] = [[] for _ in eqn.outvars[num_carry:]]
    order = range(length)
    for i in reversed(order) if eqn.params["reverse"] else order:
        at = [squeeze_row(builder, slice_row(builder, x, i)) for x in xs]
        results = call_inlined(builder, eqn.params["jaxpr"], [*consts, *carry, *at], JIT_NAMES)
        carry = results[:num_carry]
        for row, y in zip(rows, results[num_carry:]):
            row.append(y)
    stacked = [
        _stack(builder, row[::-1] if eqn.params["reverse"] else row, out)
        for row, out in zip(rows, eqn.outvars[num_carry:])
    ]
    return [*carry, *stacked]


def _stack(builder: Builder, rows: Sequence[Atom], out: Atom) -> Atom:
    if isinstance(out, DropVar):
        return out  # nobody reads it
    wide = [expand_row(builder, row) for row in rows]
    return builder.append(jax.lax.concatenate_p, wide, {"dimension": 0}, aval_of(out))
