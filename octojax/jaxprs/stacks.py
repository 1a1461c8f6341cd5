"""Inputs that are read row by row only, replaced by one input per row."""

from collections.abc import Mapping, Sequence

from jax.extend.core import JaxprEqn, Var

from octojax import compat
from octojax.compat import Atom, aval_of
from octojax.jaxprs.dead import without_dead
from octojax.jaxprs.flat import Builder, FlatJaxpr, rewrite
from octojax.jaxprs.rows import expand_row, push_rows, row_index

MOST_ROWS = 1024

Rows = tuple[tuple[int, Var], ...]


def split_stacks(flat: FlatJaxpr, inputs: Sequence[Var]) -> tuple[FlatJaxpr, Mapping[Var, Rows]]:
    """The jaxpr reading `(index, variable)` rows instead of the inputs that come apart.

    An input comes apart if it has at least two rows, each is read, and nothing else of it is.
    The new variables are free in the equations: `flat.invars` stays as it is.
    """
    stacks = _stacks(flat, inputs)
    rows = {
        var: tuple(
            (i, compat.new_var(aval_of(var).update(shape=aval_of(var).shape[1:])))
            for i in range(aval_of(var).shape[0])
        )
        for var in stacks
    }

    def rule(builder: Builder, eqn: JaxprEqn, args: list[Atom]) -> list[Atom] | None:
        index = row_index(eqn)
        if index is None or eqn.invars[0] not in rows:
            return None
        return [expand_row(builder, rows[eqn.invars[0]][index][1])]

    return without_dead(push_rows(rewrite(flat, rule))), rows


def _stacks(flat: FlatJaxpr, inputs: Sequence[Var]) -> list[Var]:
    wanted = {v for v in inputs if 2 <= (aval_of(v).shape or (0,))[0] <= MOST_ROWS}
    whole = {v for v in flat.outvars if isinstance(v, Var)}
    read: dict[Var, set[int]] = {}
    for eqn in flat.eqns:
        index = row_index(eqn)
        for var in eqn.invars:
            if not isinstance(var, Var) or var not in wanted:
                continue
            if index is None:
                whole.add(var)
            else:
                read.setdefault(var, set()).add(index)
    return [
        v for v in inputs if v in read and v not in whole and len(read[v]) == aval_of(v).shape[0]
    ]
