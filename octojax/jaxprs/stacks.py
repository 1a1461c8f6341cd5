"""Inputs that are read row by row only, replaced by one input per row.

State that comes back comes apart on both sides:

    m = slice[2:3] s;  ...;  s2 = concatenate a b n d         one row per layer, read and written
      becomes
    m = s.2;  ...;  returned: a b n d
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from jax.extend.core import JaxprEqn, Var

from octojax import compat
from octojax.compat import Atom, aval_of
from octojax.jaxprs.flat import Builder, FlatJaxpr, read, rewrite, without_dead
from octojax.jaxprs.rows import expand_row, push_rows, row_index, slice_row, squeeze_row

MOST_ROWS = 1024

Rows = tuple[tuple[int, Var], ...]


def split_stacks(flat: FlatJaxpr, inputs: Sequence[Var]) -> tuple[FlatJaxpr, Mapping[Var, Rows]]:
    """Returns the jaxpr reading `(index, variable)` rows instead of the inputs that come apart.

    An input comes apart if it has at least two rows, each is read, and nothing else of it is.
    The new variables are free in the equations: `flat.invars` stays as it is.
    """
    return _by_rows(flat, _stacks(flat, inputs))


def _by_rows(flat: FlatJaxpr, stacks: Sequence[Var]) -> tuple[FlatJaxpr, Mapping[Var, Rows]]:
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


def split_carried(
    flat: FlatJaxpr, carried: Sequence[tuple[Var, int]]
) -> tuple[FlatJaxpr, Mapping[Var, Rows]]:
    """Returns the jaxpr reading and returning rows of the state that comes apart.

    `carried` pairs an input with the position of the output that takes its place. Where it comes
    apart, `(index, variable)` rows are read instead of the input, and that output becomes one
    per row, in order, in the same place.
    """
    wide = flat
    pairs = [pair for pair in carried if _may_come_apart(flat, *pair)]
    while pairs:
        wide = _with_row_outputs(flat, pairs)
        stays = [(v, at) for v, at in pairs if not _is_read_whole(wide, v)]
        if stays == pairs:
            break
        pairs = stays
    if not pairs:
        return flat, {}
    count = len(flat.outvars)
    split, rows = _by_rows(wide, [v for v, _ in pairs])
    returned = list(split.outvars[count:])
    ends: list[Atom] = []
    places = {at: len(rows[v]) for v, at in pairs}
    for at, end in enumerate(split.outvars[:count]):
        ends += [end] if at not in places else [returned.pop(0) for _ in range(places[at])]
    return without_dead(replace(split, outvars=tuple(ends))), rows


def _may_come_apart(flat: FlatJaxpr, var: Var, at: int) -> bool:
    """Whether equations read rows of the input, or its new value is a stack of rows."""
    if not 2 <= (aval_of(var).shape or (0,))[0] <= MOST_ROWS:
        return False
    makers = {v: eqn.primitive.name for eqn in flat.eqns for v in eqn.outvars}
    end = flat.outvars[at]
    stacked = isinstance(end, Var) and makers.get(end) in ("concatenate", "stack")
    return stacked or any(row_index(e) is not None for e in flat.eqns if var in e.invars)


def _is_read_whole(flat: FlatJaxpr, var: Var) -> bool:
    readers = [eqn for eqn in flat.eqns if var in eqn.invars]
    return var in flat.outvars or any(row_index(eqn) is None for eqn in readers)


def _with_row_outputs(flat: FlatJaxpr, pairs: Sequence[tuple[Var, int]]) -> FlatJaxpr:
    """Returns the jaxpr that returns rows, after its other outputs, for the outputs in `pairs`."""
    builder = Builder(flat)
    env: dict[Var, Atom] = {}
    for eqn in flat.eqns:
        builder.emit(eqn, env)
    ends = [read(env, x) for x in flat.outvars]
    rows: list[Atom] = []
    for _, at in pairs:
        for i in range(aval_of(ends[at]).shape[0]):
            rows.append(squeeze_row(builder, slice_row(builder, ends[at], i)))
        ends[at] = rows[-1]
    return without_dead(push_rows(builder.finish([*ends, *rows])))


def _stacks(flat: FlatJaxpr, inputs: Sequence[Var]) -> list[Var]:
    candidates = {v for v in inputs if 2 <= (aval_of(v).shape or (0,))[0] <= MOST_ROWS}
    whole = {v for v in flat.outvars if isinstance(v, Var)}
    read: dict[Var, set[int]] = {}
    for eqn in flat.eqns:
        index = row_index(eqn)
        for var in eqn.invars:
            if not isinstance(var, Var) or var not in candidates:
                continue
            if index is None:
                whole.add(var)
            else:
                read.setdefault(var, set()).add(index)
    return [
        v for v in inputs if v in read and v not in whole and len(read[v]) == aval_of(v).shape[0]
    ]
