"""Slices of stacked arrays traced back to where each row comes from.

    c = convert_element_type a           r = slice[2:3] a
    s = slice[2:3] c             becomes s = convert_element_type r
    w = squeeze s                        w = squeeze s

so that layer 2 reads row 2 of the parameter `a` and nothing else of it. Through a stack of
results it leads to the result itself: the skips of an unrolled encoder reach its decoder one by
one.
"""

from collections.abc import Sequence
from typing import Any

import jax
from jax.extend.core import JaxprEqn, Literal, Var

from octojax.compat import Atom, aval_of
from octojax.jaxprs.flat import Builder, FlatJaxpr, read
from octojax.jaxprs.fold import slice_static

_ELEMENTWISE = frozenset(
    {
        "convert_element_type", "copy", "name", "stop_gradient", "neg", "sign", "abs",
        "add", "sub", "mul", "div", "max", "min", "pow", "integer_pow", "square", "sqrt", "rsqrt",
        "exp", "exp2", "expm1", "log", "log1p", "tanh", "logistic", "sin", "cos", "select_n",
    }
)  # fmt: skip


def push_rows(flat: FlatJaxpr) -> FlatJaxpr:
    """Returns the jaxpr with every slice of one row along axis 0 taken as early as possible."""
    return _Rows(flat).run()


def row_index(eqn: JaxprEqn) -> int | None:
    """Returns the row that `slice[i:i+1, :, ...]` takes; None for any other equation."""
    if eqn.primitive.name != "slice":
        return None
    shape = aval_of(eqn.invars[0]).shape
    starts, limits = eqn.params["start_indices"], eqn.params["limit_indices"]
    plain = not eqn.params["strides"] or all(s == 1 for s in eqn.params["strides"])
    whole = all(s == 0 for s in starts[1:]) and tuple(limits[1:]) == tuple(shape[1:])
    if not shape or limits[0] - starts[0] != 1 or not plain or not whole:
        return None
    return starts[0]


def slice_row(builder: Builder, operand: Atom, index: int) -> Atom:
    """Appends the slice of one row along axis 0, which keeps its axis of size 1."""
    _, *rest = aval_of(operand).shape
    return slice_static(builder, operand, (index, *(0 for _ in rest)), (1, *rest))


def expand_row(builder: Builder, row: Atom) -> Atom:
    """Appends an axis of size 1 in front."""
    shape = (1, *aval_of(row).shape)
    dims = tuple(range(1, len(shape)))
    params = {"shape": shape, "broadcast_dimensions": dims, "sharding": None}
    return builder.append(
        jax.lax.broadcast_in_dim_p, [row], params, aval_of(row).update(shape=shape)
    )


def squeeze_row(builder: Builder, row: Atom) -> Atom:
    """Appends the removal of the axis of size 1 in front."""
    aval = aval_of(row).update(shape=aval_of(row).shape[1:])
    return builder.append(jax.lax.squeeze_p, [row], {"dimensions": (0,)}, aval)


class _Rows:
    """One rewrite: remembers the producer of each new variable, and the rows sliced already."""

    def __init__(self, flat: FlatJaxpr) -> None:
        self.flat = flat
        self.builder = Builder(flat)
        self.roots = set(flat.invars) | set(flat.constvars)
        self.producer: dict[Var, tuple[JaxprEqn, int]] = {}
        self.rows: dict[tuple[Var, int], Atom] = {}
        self.sliceable: dict[Var, bool] = {}

    def run(self) -> FlatJaxpr:
        env: dict[Var, Atom] = {}
        for eqn in self.flat.eqns:
            args = [read(env, x) for x in eqn.invars]
            outputs = self._replaced(eqn, args)
            if outputs is None:
                self.builder.emit(eqn, env)
                self._learn()
            else:
                env.update(zip(eqn.outvars, outputs, strict=True))
        return self.builder.finish([read(env, x) for x in self.flat.outvars])

    def _learn(self) -> None:
        eqn = self.builder.eqns[-1]
        self.producer.update((var, (eqn, k)) for k, var in enumerate(eqn.outvars))

    def _replaced(self, eqn: JaxprEqn, args: Sequence[Atom]) -> list[Atom] | None:
        if eqn.primitive.name == "squeeze" and tuple(eqn.params["dimensions"]) == (0,):
            inner = self._unexpanded(args[0])
            return None if inner is None else [inner]
        if eqn.primitive.name == "unstack" and eqn.params["axis"] == 0:
            return self._unstacked(args[0])
        index = row_index(eqn)
        if index is None or isinstance(args[0], Literal):
            return None
        return [self._row(args[0], index)]

    def _unexpanded(self, atom: Atom) -> Atom | None:
        """Returns the operand, where `atom` is an array with an axis of size 1 put in front."""
        if isinstance(atom, Literal) or atom not in self.producer:
            return None
        eqn, _ = self.producer[atom]
        source = eqn.invars[0] if eqn.invars else None
        if eqn.primitive.name != "broadcast_in_dim" or not isinstance(source, Var):
            return None
        shape = tuple(aval_of(atom).shape)
        same = (1, *aval_of(source).shape) == shape
        in_front = tuple(eqn.params["broadcast_dimensions"]) == tuple(range(1, len(shape)))
        return source if same and in_front else None

    def _unstacked(self, atom: Atom) -> list[Atom] | None:
        if isinstance(atom, Literal):
            return None
        rows = [self._row(atom, k) for k in range(aval_of(atom).shape[0])]
        return [self._squeezed(row) for row in rows]

    def _squeezed(self, row: Atom) -> Atom:
        inner = self._unexpanded(row)
        return self._emit(squeeze_row, row) if inner is None else inner

    def _emit(self, fn: Any, *args: Any) -> Atom:
        atom = fn(self.builder, *args)
        self._learn()
        return atom

    def _row(self, var: Var, index: int) -> Atom:
        """Returns row `index` of an array, with its axis of size 1."""
        if aval_of(var).shape[0] == 1:
            return var
        if (var, index) not in self.rows:
            self.rows[var, index] = self._make_row(var, index)
        return self.rows[var, index]

    def _make_row(self, var: Var, index: int) -> Atom:
        eqn, output = self.producer.get(var, (None, 0))
        name = eqn.primitive.name if eqn is not None else None
        if eqn is None:
            return self._emit(slice_row, var, index)
        if name == "concatenate" and eqn.params["dimension"] == 0:
            return self._row_of_pieces(eqn.invars, index)
        if name == "stack" and eqn.params["axis"] == 0:
            return self._emit(expand_row, eqn.invars[index])
        if name == "split" and eqn.params["axis"] == 0 and isinstance(eqn.invars[0], Var):
            start = sum(int(size) for size in eqn.params["sizes"][:output])
            return self._row(eqn.invars[0], start + index)
        updated = self._updated(eqn)
        if updated is not None:
            at, row = updated
            return row if at == index else self._row(eqn.invars[0], index)  # pyright: ignore[reportArgumentType]
        if name == "slice" and self._is_row_range(eqn):
            return self._row(eqn.invars[0], eqn.params["start_indices"][0] + index)  # pyright: ignore[reportArgumentType]
        if name in _ELEMENTWISE and self._is_sliceable(var):
            return self._elementwise(eqn, index)
        return self._emit(slice_row, var, index)

    def _row_of_pieces(self, pieces: Sequence[Atom], index: int) -> Atom:
        for piece in pieces:
            rows = aval_of(piece).shape[0]
            if index < rows:
                return piece if isinstance(piece, Literal) else self._row(piece, index)
            index -= rows
        raise AssertionError("a row beyond the end of its array")

    def _updated(self, eqn: JaxprEqn) -> tuple[int, Atom] | None:
        """Returns where an equation sets one row along axis 0, at a known place, and to what."""
        name = eqn.primitive.name
        if name not in ("dynamic_update_slice", "scatter") or isinstance(eqn.invars[0], Literal):
            return None
        operand, *others = eqn.invars
        shape = aval_of(operand).shape
        if name == "dynamic_update_slice":
            update, first, *rest = others
            at = self._integer(first)
            whole = tuple(aval_of(update).shape) == (1, *shape[1:])
            if at is None or not whole or any(self._integer(x) != 0 for x in rest):
                return None
            return min(max(at, 0), shape[0] - 1), update
        indices, update = others
        at = self._integer(indices)
        numbers = eqn.params["dimension_numbers"]
        whole = (
            tuple(aval_of(indices).shape) == (1,)
            and tuple(aval_of(update).shape) == tuple(shape[1:])
            and tuple(numbers.inserted_window_dims) == (0,)
            and tuple(numbers.scatter_dims_to_operand_dims) == (0,)
        )
        if at is None or not 0 <= at < shape[0] or not whole:
            return None
        return at, self._emit(expand_row, update)

    def _integer(self, atom: Atom) -> int | None:
        """Returns an integer known at trace time, also one spread over an array."""
        while not isinstance(atom, Literal):
            eqn, _ = self.producer.get(atom, (None, 0))
            if eqn is None or eqn.primitive.name != "broadcast_in_dim":
                return None
            atom = eqn.invars[0]
        return int(atom.val) if aval_of(atom).shape == () else None

    @staticmethod
    def _is_row_range(eqn: JaxprEqn) -> bool:
        (source,) = eqn.invars
        starts, limits = eqn.params["start_indices"], eqn.params["limit_indices"]
        plain = not eqn.params["strides"] or all(s == 1 for s in eqn.params["strides"])
        whole = all(s == 0 for s in starts[1:])
        shape = getattr(aval_of(source), "shape", ())
        return isinstance(source, Var) and plain and whole and limits[1:] == tuple(shape[1:])

    def _is_sliceable(self, var: Var) -> bool:
        """Whether an array is elementwise arithmetic on inputs alone: cheap to do by rows."""
        if var in self.roots:
            return True
        if var not in self.sliceable:
            eqn, _ = self.producer[var]
            self.sliceable[var] = eqn.primitive.name in _ELEMENTWISE and all(
                self._fits(x, var) for x in eqn.invars
            )
        return self.sliceable[var]

    def _fits(self, atom: Atom, out: Var) -> bool:
        if not aval_of(atom).shape:
            return True
        same = tuple(aval_of(atom).shape) == tuple(aval_of(out).shape)
        return same and isinstance(atom, Var) and self._is_sliceable(atom)

    def _elementwise(self, eqn: JaxprEqn, index: int) -> Atom:
        args = [
            x if isinstance(x, Literal) or not aval_of(x).shape else self._row(x, index)
            for x in eqn.invars
        ]
        (out,) = eqn.outvars
        aval = aval_of(out).update(shape=(1, *aval_of(out).shape[1:]))
        row = self.builder.append(eqn.primitive, args, eqn.params, aval)
        self._learn()
        return row
