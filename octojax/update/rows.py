"""Which operations act on every row of a stack alone, and how each looks on one row.

    mul a:f32[4,8] b:f32[4,8]                      becomes   mul a:f32[1,8] b:f32[1,8]
    reshape[new_sizes=(4, 2, 4)] a:f32[4,8]        becomes   reshape[new_sizes=(1, 2, 4)] a
    reduce_sum[axes=(0, 1)] a:f32[4,8]             becomes   the same on each row, then a sum
    dot_general[batch=0] a:f32[4,8,8] b:f32[4,8,8] becomes   the same on each row

What is not listed here (a sort along the stack, a convolution, a gather) needs the whole array.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr, Literal

from octojax import compat
from octojax.jaxprs.graph import Atom, Graph, Op, bind, graph_of
from octojax.update.layout import Layout, Partial, Rows, Stack


def _names(words: str) -> frozenset[str]:
    return frozenset(words.split())


ELEMENTWISE = _names("""
    abs acos acosh add add_any and asin asinh atan atan2 atanh bessel_i0e bessel_i1e cbrt ceil
    clamp clz complex conj convert_element_type copy cos cosh digamma div eq eq_to erf
    erf_inv erfc exp exp2 expm1 floor ge gt igamma igammac imag integer_pow is_finite le le_to
    lgamma log log1p logistic lt lt_to max min mul name ne neg nextafter not or polygamma
    population_count pow real reduce_precision regularized_incomplete_beta rem round rsqrt
    select_n shift_left shift_right_arithmetic shift_right_logical sign sin sinh sqrt square
    stop_gradient sub tan tanh xor zeta
""")
_REDUCTIONS = {
    "reduce_sum": "add",
    "reduce_max": "max",
    "reduce_min": "min",
    "reduce_and": "and",
    "reduce_or": "or",
    "reduce_prod": "mul",
}
_ALONG_AXIS = {
    "cumsum": "axis",
    "cumprod": "axis",
    "cummax": "axis",
    "cummin": "axis",
    "cumlogsumexp": "axis",
    "sort": "dimension",
    "concatenate": "dimension",
    "split": "axis",
}
"""Operations along one axis, each row alone where the stack is another axis."""

_MATRICES = _names("""
    svd eigh eig qr geqrf householder_product cholesky lu triangular_solve schur hessenberg
""")
"""Operations on the last two axes, batched over those before."""


@dataclass(frozen=True)
class RowRule:
    """How one operation acts row by row: the rows that it reads of each operand (None: the
    whole value, the same for every row), the layouts of its results, its row's parameters."""

    operands: tuple[Rows | None, ...]
    outputs: tuple[Rows | Partial, ...]
    params: Mapping[str, Any]


def row_rule(op: Op, layouts: Sequence[Layout], avals: Sequence[Any]) -> RowRule | None:
    """Returns how `op` acts on rows, or None where it needs the whole of a stacked operand.

    `layouts` are those of the operands (what is not `Rows` counts as whole), `avals` the whole
    shapes by value. At least one operand has rows.
    """
    call = _Call(op, [x if isinstance(x, Rows) else None for x in layouts], avals)
    name = op.primitive.name
    if name in ELEMENTWISE:
        return _elementwise(call)
    if name in _REDUCTIONS:
        return _reduction(call, _REDUCTIONS[name])
    if name in _ALONG_AXIS:
        return _along_axis(call, _ALONG_AXIS[name])
    if name in _MATRICES:
        return _matrices(call)
    rule = _RULES.get(name)
    return None if rule is None else rule(call)


def broadcast_rows(op: Op, rows: Rows, avals: Sequence[Any]) -> RowRule | None:
    """Returns how to make only one row of what a broadcast or elementwise operation makes for
    every rank; None where the whole must be made and a row of it read."""
    if op.primitive.multiple_results:
        return None
    (output,) = op.outputs
    shape = avals[output].shape
    if op.primitive.name in ELEMENTWISE:
        operands = _elements(rows, [_shape(x, avals) for x in op.inputs], shape)
        return None if operands is None else RowRule(operands, (rows,), op.params)
    if op.primitive.name != "broadcast_in_dim" or len(op.inputs) != 1:
        return None
    dims = op.params["broadcast_dimensions"]
    source = _shape(op.inputs[0], avals)
    params = {**op.params, "shape": rows.row_shape(shape)}
    if rows.axis not in dims or source[dims.index(rows.axis)] == 1 != shape[rows.axis]:
        return RowRule((None,), (rows,), params)
    inner = Rows(rows.stack, dims.index(rows.axis), rows.block)
    return RowRule((inner,), (rows,), params)


def _shape(atom: Atom, avals: Sequence[Any]) -> tuple[int, ...]:
    return tuple(np.shape(atom.val) if isinstance(atom, Literal) else avals[atom].shape)


@dataclass(frozen=True)
class _Call:
    """An operation with the rows of its operands."""

    op: Op
    rows: list[Rows | None]
    avals: Sequence[Any]

    def shape(self, k: int) -> tuple[int, ...]:
        return _shape(self.op.inputs[k], self.avals)

    def out_shape(self, k: int = 0) -> tuple[int, ...]:
        return tuple(self.avals[self.op.outputs[k]].shape)

    @property
    def common(self) -> Rows | None:
        """The rows of all operands that have any; None where they differ."""
        every = [x for x in self.rows if x is not None]
        return every[0] if all(x == every[0] for x in every) else None

    @property
    def common_stack(self) -> Stack | None:
        """The stack of all operands with rows; None where they differ."""
        stacks = {x.stack for x in self.rows if x is not None}
        return stacks.pop() if len(stacks) == 1 else None

    def unary(self, axis: int | None, **params: Any) -> RowRule | None:
        """Returns the rule of an operation whose first operand has the rows, on `axis` after it."""
        source = self.rows[0]
        if axis is None or source is None or any(self.rows[1:]):
            return None
        rows = Rows(source.stack, axis, source.block)
        operands = (source, *(None for _ in self.rows[1:]))
        outputs = tuple(rows for _ in self.op.outputs)
        return RowRule(operands, outputs, {**self.op.params, **params})


def _elementwise(call: _Call) -> RowRule | None:
    rows = call.common
    sizes = [call.shape(k) for k in range(len(call.rows))]
    operands = rows and _elements(rows, sizes, call.out_shape())
    if rows is None or operands is None:
        return None
    if any(x is not None and need is None for x, need in zip(call.rows, operands, strict=True)):
        return None
    return RowRule(operands, tuple(rows for _ in call.op.outputs), call.op.params)


def _elements(
    rows: Rows, sizes: Sequence[tuple[int, ...]], shape: tuple[int, ...]
) -> tuple[Rows | None, ...] | None:
    """What one row of an elementwise operation reads of operands of these shapes: a row, or the
    whole of a scalar and of what is broadcast along the rows; None where shapes do not fit."""
    if any(size and len(size) != len(shape) for size in sizes):
        return None
    return tuple(rows if size and size[rows.axis] == shape[rows.axis] else None for size in sizes)


def _reduction(call: _Call, how: str) -> RowRule | None:
    source, axes = call.rows[0], call.op.params["axes"]
    assert source is not None, "a reduction has one operand"
    if source.axis not in axes:
        return call.unary(source.axis - sum(x < source.axis for x in axes))
    if how in ("and", "or") and call.avals[call.op.outputs[0]].dtype != np.bool_:
        return None
    return RowRule((source,), (Partial(source.stack, how),), call.op.params)


def _arg_reduction(call: _Call) -> RowRule | None:
    source, axes = call.rows[0], call.op.params["axes"]
    if source is None or source.axis in axes:
        return None
    return call.unary(source.axis - sum(x < source.axis for x in axes))


def _along_axis(call: _Call, name: str) -> RowRule | None:
    rows = call.common
    if rows is None or call.op.params[name] == rows.axis:
        return None
    return RowRule(
        tuple(rows for _ in call.rows), tuple(rows for _ in call.op.outputs), call.op.params
    )


def _matrices(call: _Call) -> RowRule | None:
    rows = call.common
    ranks = {len(call.shape(k)) for k in range(len(call.rows))}
    if rows is None or rows.axis >= min(ranks) - 2 or len(ranks) > 1:
        return None
    return RowRule(
        tuple(rows for _ in call.rows), tuple(rows for _ in call.op.outputs), call.op.params
    )


def _broadcast(call: _Call) -> RowRule | None:
    source, shape = call.rows[0], call.out_shape()
    if source is None:
        return None
    axis = call.op.params["broadcast_dimensions"][source.axis]
    if shape[axis] != call.shape(0)[source.axis]:
        return None
    return call.unary(axis, shape=Rows(source.stack, axis, source.block).row_shape(shape))


def _reshape(call: _Call) -> RowRule | None:
    source, old, new = call.rows[0], call.shape(0), call.out_shape()
    if source is None or call.op.params.get("dimensions") is not None:
        return None
    rows = _reshaped(source, old, new)
    if rows is None:
        return None
    params = {**call.op.params, "new_sizes": rows.row_shape(new)}
    return RowRule((source, *(None for _ in call.rows[1:])), (rows,), params)


def _reshaped(source: Rows, old: tuple[int, ...], new: tuple[int, ...]) -> Rows | None:
    """Returns the rows after a reshape: merged with axes after them, or in whole parts."""
    count, size = len(source.stack.owners), old[source.axis]
    before = prod(old[: source.axis])
    fits = [k for k, there in enumerate(new) if prod(new[:k]) == before and there % count == 0]
    if not fits:
        return None
    axis = next((k for k in fits if new[k] == size), fits[-1])
    return Rows(source.stack, axis, new[axis] // count)


def _transpose(call: _Call) -> RowRule | None:
    source = call.rows[0]
    return source and call.unary(tuple(call.op.params["permutation"]).index(source.axis))


def _squeeze(call: _Call) -> RowRule | None:
    source, dims = call.rows[0], call.op.params["dimensions"]
    if source is None or source.axis in dims:
        return None
    return call.unary(source.axis - sum(d < source.axis for d in dims))


def _reverse(call: _Call) -> RowRule | None:
    source = call.rows[0]
    if source is None or source.axis in call.op.params["dimensions"]:
        return None
    return call.unary(source.axis)


def _pad(call: _Call) -> RowRule | None:
    source = call.rows[0]
    if source is None or tuple(call.op.params["padding_config"][source.axis]) != (0, 0, 0):
        return None
    return call.unary(source.axis)


def _slice(call: _Call) -> RowRule | None:
    source, params = call.rows[0], call.op.params
    if source is None or call.out_shape()[source.axis] != call.shape(0)[source.axis]:
        return None
    return call.unary(source.axis, limit_indices=source.row_shape(params["limit_indices"]))


def _dynamic_slice(call: _Call) -> RowRule | None:
    source, sizes = call.rows[0], call.op.params["slice_sizes"]
    if source is None or sizes[source.axis] != call.shape(0)[source.axis]:
        return None
    return call.unary(source.axis, slice_sizes=source.row_shape(sizes))


def _dynamic_update_slice(call: _Call) -> RowRule | None:
    rows = call.common
    if rows is None or any(call.rows[2:]):
        return None
    if call.shape(1)[rows.axis] != call.shape(0)[rows.axis]:
        return None
    operands = (rows, rows, *(None for _ in call.rows[2:]))
    return RowRule(operands, (rows,), call.op.params)


def _top_k(call: _Call) -> RowRule | None:
    source = call.rows[0]
    axis = call.op.params.get("axis", call.op.params.get("operand_axis", -1))
    if source is None or source.axis == axis % len(call.shape(0)):
        return None
    return call.unary(source.axis)


def _stack_new_axis(call: _Call) -> RowRule | None:
    rows, axis = call.common, call.op.params["axis"]
    if rows is None:
        return None
    out = Rows(rows.stack, rows.axis + (axis <= rows.axis), rows.block)
    return RowRule(tuple(rows for _ in call.rows), (out,), call.op.params)


def _unstack(call: _Call) -> RowRule | None:
    source, axis = call.rows[0], call.op.params["axis"]
    if source is None or axis == source.axis:
        return None
    return call.unary(source.axis - (axis < source.axis))


def _dot_general(call: _Call) -> RowRule | None:
    (contract, batch) = call.op.params["dimension_numbers"]
    side = 0 if call.rows[0] is not None else 1
    mine, other = call.rows[side], call.rows[1 - side]
    assert mine is not None, "one operand has rows"
    for dims, batched in ((batch, True), (contract, False)):
        if mine.axis not in dims[side]:
            continue
        at = tuple(dims[side]).index(mine.axis)
        twin = Rows(mine.stack, dims[1 - side][at], mine.block)
        if other is not None and other != twin:
            return None
        output = Rows(mine.stack, at, mine.block) if batched else Partial(mine.stack, "add")
        operands = (mine, twin) if side == 0 else (twin, mine)
        return RowRule(operands, (output,), call.op.params)
    if other is not None:
        return None
    free = [
        [d for d in range(len(call.shape(k))) if d not in (*contract[k], *batch[k])] for k in (0, 1)
    ]
    axis = len(batch[0]) + free[side].index(mine.axis) + (len(free[0]) if side else 0)
    rows = Rows(mine.stack, axis, mine.block)
    return RowRule((call.rows[0], call.rows[1]), (rows,), call.op.params)


def _scan(call: _Call) -> RowRule | None:
    """Returns a loop whose body acts on every row alone: the same loop over the bodies of a row."""
    params, every = call.op.params, call.common_stack
    num_consts, num_carry = compat.scan_counts(params)
    consts, carry, xs = (
        call.rows[:num_consts],
        call.rows[num_consts : num_consts + num_carry],
        call.rows[num_consts + num_carry :],
    )
    if every is None or any(x is not None and x.axis == 0 for x in xs):
        return None
    steps = [x and Rows(x.stack, x.axis - 1, x.block) for x in xs]
    body = graph_of(params["jaxpr"])
    while True:
        rows = body_rows(body, [*consts, *carry, *steps])
        if rows is None:
            return None
        outputs = [None if isinstance(x, Literal) else rows[x] for x in body.outputs]
        pairs = list(zip(carry, outputs, strict=False))
        if any(old and new and old != new for old, new in pairs):
            return None
        grown = [old or new for old, new in pairs]
        if grown == carry:
            break
        carry = grown
    stacked = [x and Rows(x.stack, x.axis + 1, x.block) for x in outputs[num_carry:]]
    local = row_body(body, [*consts, *carry, *steps], [*carry, *outputs[num_carry:]])
    if local is None:
        return None
    same = Partial(every, "same")
    return RowRule(
        (*consts, *carry, *xs),
        tuple(x or same for x in (*carry, *stacked)),
        {**params, "jaxpr": local},
    )


def body_rows(graph: Graph, inputs: Sequence[Rows | None]) -> list[Rows | None] | None:
    """Returns the rows of every value of a loop's body, or None where it needs a stacked array
    whole."""
    rows: list[Rows | None] = [None] * len(graph.avals)
    rows[: graph.num_inputs] = inputs
    for op in graph.ops:
        mine = [None if isinstance(x, Literal) else rows[x] for x in op.inputs]
        if not any(mine):
            continue
        rule = row_rule(op, mine, graph.avals)
        if rule is None or any(isinstance(x, Partial) for x in rule.outputs):
            return None
        for value, layout in zip(op.outputs, rule.outputs, strict=True):
            rows[value] = layout if isinstance(layout, Rows) else None
    return rows


class _WholeNeededError(Exception):
    """A loop's body reads, for its row, of an array that only the whole stack has."""


def row_body(
    graph: Graph, inputs: Sequence[Rows | None], outputs: Sequence[Rows | None]
) -> ClosedJaxpr | None:
    """Returns a loop's body for one row, or None where a row cannot be told from the others."""
    rows = body_rows(graph, inputs)
    assert rows is not None, "checked by the caller"
    producers = graph.producers()

    def run(*arguments: Any) -> list[Any]:
        env: dict[int, Any] = dict(enumerate(arguments))

        def read(atom: Atom, want: Rows | None) -> Any:
            if want is None or (not isinstance(atom, Literal) and rows[atom] is not None):
                return atom.val if isinstance(atom, Literal) else env[atom]
            op = None if isinstance(atom, Literal) else graph.ops[producers.get(atom, 0)]
            rule = op and atom in op.outputs and broadcast_rows(op, want, graph.avals)
            if not (op and rule):
                raise _WholeNeededError
            operands = [read(x, r) for x, r in zip(op.inputs, rule.operands, strict=True)]
            return bind(op, rule.params, operands)[0]

        for op in graph.ops:
            mine = [None if isinstance(x, Literal) else rows[x] for x in op.inputs]
            rule = row_rule(op, mine, graph.avals) if any(mine) else None
            wants = [None] * len(mine) if rule is None else rule.operands
            operands = [read(x, r) for x, r in zip(op.inputs, wants, strict=True)]
            params = op.params if rule is None else rule.params
            env.update(zip(op.outputs, bind(op, params, operands), strict=True))
        return [read(x, r) for x, r in zip(graph.outputs, outputs, strict=True)]

    shapes = [
        jax.ShapeDtypeStruct(a.shape if r is None else r.row_shape(a.shape), a.dtype)
        for a, r in zip(graph.avals, inputs, strict=False)
    ]
    try:
        return jax.make_jaxpr(run)(*shapes)
    except _WholeNeededError:
        return None


_RULES: dict[str, Callable[[_Call], RowRule | None]] = {
    "argmax": _arg_reduction,
    "argmin": _arg_reduction,
    "broadcast_in_dim": _broadcast,
    "dot_general": _dot_general,
    "dynamic_slice": _dynamic_slice,
    "dynamic_update_slice": _dynamic_update_slice,
    "pad": _pad,
    "reshape": _reshape,
    "rev": _reverse,
    "scan": _scan,
    "slice": _slice,
    "squeeze": _squeeze,
    "stack": _stack_new_axis,
    "top_k": _top_k,
    "transpose": _transpose,
    "unstack": _unstack,
}
