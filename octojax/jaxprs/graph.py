"""A traced function as a flat list of operations over numbered values, each to be placed by itself.

Calls are inlined and every `cond` becomes its branches followed by selects. A skipped branch
cannot leak: `select_n` takes the chosen operand bit by bit, a NaN in the other one is not
multiplied in.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, JaxprEqn, Literal, Var

from octojax import compat
from octojax.jaxprs.dataflow import is_var
from octojax.jaxprs.flat import Builder, Emit, LiteralBuilder, without_dead
from octojax.jaxprs.inline import CALLS, calls, within

Atom = int | Literal
"""The number of a value, or a constant."""


@dataclass(frozen=True, eq=False)
class Op:
    """One operation: `outputs = primitive(inputs, params)`; `source` is the equation it was."""

    primitive: Any
    params: Mapping[str, Any]
    inputs: tuple[Atom, ...]
    outputs: tuple[int, ...]
    source: JaxprEqn


@dataclass(frozen=True)
class Graph:
    """Operations in dependence order. Values are numbers; the first ones are the inputs."""

    num_inputs: int
    ops: tuple[Op, ...]
    outputs: tuple[Atom, ...]
    avals: tuple[Any, ...]
    """Per value, its shape and type."""

    def producers(self) -> dict[int, int]:
        """Returns for every computed value the position of its operation."""
        return {value: at for at, op in enumerate(self.ops) for value in op.outputs}


def graph_of(closed: ClosedJaxpr) -> Graph:
    """Returns the operations that the outputs and side effects of `closed` need: calls inlined,
    conds as selects, equal ones merged."""
    invars = closed.jaxpr.invars
    builder = _MergingBuilder(invars)
    outputs = builder.call(closed, invars, within(builder, _rule))
    flat = without_dead(builder.finish(outputs))  # dead ones would ask for exchanges too
    numbers: dict[Any, int] = {var: number for number, var in enumerate(invars)}
    avals = [var.aval for var in invars]

    def read(atom: Any) -> Atom:
        return numbers[atom] if is_var(atom) else atom

    ops = []
    for eqn in flat.eqns:
        inputs = tuple(map(read, eqn.invars))
        results = tuple(range(len(avals), len(avals) + len(eqn.outvars)))
        numbers.update(zip(eqn.outvars, results, strict=True))
        avals += [var.aval for var in eqn.outvars]
        ops.append(Op(eqn.primitive, eqn.params, inputs, results, eqn))
    return Graph(len(invars), tuple(ops), tuple(map(read, flat.outvars)), tuple(avals))


def bind(op: Op, params: Mapping[str, Any], operands: Sequence[Any]) -> Sequence[Any]:
    """Returns the results of an operation, with `params` in the place of its own, under the source
    line and settings of its equation."""
    return compat.bind_here(op.source, operands, params)


class _MergingBuilder(LiteralBuilder):
    """A builder that has every equation once: of equal ones without effects, the first."""

    def __init__(self, invars: Sequence[Var]) -> None:
        super().__init__(invars)
        self._results: dict[Any, Sequence[Any]] = {}

    def constant(self, value: Any, var: Var) -> Any:
        """Returns a literal, free of devices, so that any rank may use it; PRNG keys stay."""
        is_key = hasattr(value, "dtype") and compat.is_key(value)
        return Literal(value if is_key else np.asarray(value), var.aval)

    def output(self, var: Var) -> Var:
        """Returns a named variable: a dropped output may be read of an equation merged with it."""
        return compat.new_var(var.aval)

    def copy(self, eqn: JaxprEqn, args: Sequence[Any]) -> Sequence[Any]:
        try:
            key = (eqn.primitive, tuple(sorted(eqn.params.items())), tuple(map(_key, args)))
            results = None if eqn.effects else self._results.get(key)
        except TypeError:  # a parameter that has no hash or no order: never merged
            return super().copy(eqn, args)
        return results or self._results.setdefault(key, super().copy(eqn, args))


def _rule(
    builder: Builder, eqn: JaxprEqn, args: list[Any], emit: Emit
) -> Sequence[compat.Atom] | None:
    name = eqn.primitive.name
    if name == "cond":
        return _selects(builder, eqn, args, emit)
    if name == "optimization_barrier":  # orders the work of one program, which is cut up here
        return args
    return calls(CALLS)(builder, eqn, args, emit)


def _selects(builder: Builder, eqn: JaxprEqn, args: list[Any], emit: Emit) -> list[compat.Atom]:
    index, *rest = args
    branches = eqn.params["branches"]
    if isinstance(index, Literal):
        at = min(max(int(index.val), 0), len(branches) - 1)
        return builder.call(branches[at], rest, emit)
    results = [builder.call(branch, rest, emit) for branch in branches]
    outputs: list[compat.Atom] = []
    for var, *cases in zip(eqn.outvars, *results, strict=True):
        if all(_key(case) == _key(cases[0]) for case in cases):
            outputs.append(cases[0])
            continue
        operands = [index, *(_full(builder, case, var.aval, emit) for case in cases)]
        select = compat.new_eqn(jax.lax.select_n_p, operands, [var], {})
        outputs += builder.copy(select.replace(source_info=eqn.source_info), operands)
    return outputs


def _full(builder: Builder, case: Any, aval: Any, emit: Emit) -> compat.Atom:
    """Returns a constant result of a branch as a value: `select_n` wants operands of one type."""
    if not isinstance(case, Literal):
        return case
    value = np.asarray(case.val, aval.dtype)
    spread = jax.make_jaxpr(lambda: jnp.broadcast_to(value, aval.shape))()
    return builder.call(spread, [], emit)[0]


def _key(atom: Any) -> Any:
    """Returns a hashable identity: a variable, or type and bits of a constant."""
    if not isinstance(atom, Literal):
        return atom
    value = np.asarray(atom.val)
    return (str(atom.aval), value.dtype.str, value.shape, value.tobytes())
