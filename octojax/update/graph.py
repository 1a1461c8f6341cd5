"""A traced function as a flat list of operations over numbered values.

Calls are inlined and every `cond` becomes its branches followed by selects, so that each
operation can be placed on a rank by itself. A skipped branch cannot leak: `select_n` takes
the chosen operand bit by bit, a NaN in the other one is not multiplied in.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Literal

from octojax import compat
from octojax.jaxprs.inline import body_of

Atom = int | Literal
"""The number of a value, or a constant."""

_CALLS = compat.JIT_NAMES | compat.REMAT_NAMES | compat.CUSTOM_NAMES
"""Primitives that only group operations: an update is not differentiated again."""


@dataclass(frozen=True, eq=False)
class Op:
    """One operation: `outputs = primitive(inputs, params)`; `source` is the equation it was."""

    primitive: Any
    params: Mapping[str, Any]
    inputs: tuple[Atom, ...]
    outputs: tuple[int, ...]
    source: Any = None

    @property
    def effectful(self) -> bool:
        return bool(getattr(self.source, "effects", None))


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


def flatten(closed: ClosedJaxpr) -> Graph:
    """Returns the operations of `closed`, calls inlined, conds as selects, equal ones merged."""
    builder = _Builder()
    jaxpr, consts = compat.split_consts(closed)
    inputs = [builder.value(var.aval) for var in jaxpr.invars]
    outputs = builder.run(jaxpr, consts, inputs)
    ops = _live(builder.ops, outputs)
    return Graph(len(inputs), tuple(ops), tuple(outputs), tuple(builder.avals))


def _live(ops: Sequence[Op], outputs: Sequence[Atom]) -> list[Op]:
    """The operations that the outputs need: others would ask for exchanges too."""
    needed = {x for x in outputs if not isinstance(x, Literal)}
    live = []
    for op in reversed(ops):
        if op.effectful or not needed.isdisjoint(op.outputs):
            live.append(op)
            needed.update(x for x in op.inputs if not isinstance(x, Literal))
    return live[::-1]


def bind(op: Op, params: Mapping[str, Any], operands: Sequence[Any]) -> Sequence[Any]:
    """Returns the results of an operation, with `params` in the place of its own."""
    results = op.primitive.bind(*operands, **op.primitive.get_bind_params(params))
    return results if op.primitive.multiple_results else [results]


class _Builder:
    """Collects operations while walking nested jaxprs; lives for one call of `flatten`."""

    def __init__(self) -> None:
        self.ops: list[Op] = []
        self.avals: list[Any] = []
        self._seen: dict[Any, tuple[int, ...]] = {}

    def value(self, aval: Any) -> int:
        self.avals.append(aval)
        return len(self.avals) - 1

    def run(self, jaxpr: Any, consts: Sequence[Any], inputs: Sequence[Atom]) -> list[Atom]:
        """Appends the operations of `jaxpr` and returns its outputs."""
        env: dict[Any, Atom] = dict(zip(jaxpr.invars, inputs, strict=True))
        for var, const in zip(getattr(jaxpr, "constvars", ()), consts, strict=True):
            env[var] = Literal(_host(const), var.aval)

        def read(atom: Any) -> Atom:
            return atom if isinstance(atom, Literal) else env[atom]

        for eqn in jaxpr.eqns:
            operands = [read(x) for x in eqn.invars]
            env.update(zip(eqn.outvars, self._equation(eqn, operands), strict=True))
        return [read(x) for x in jaxpr.outvars]

    def _equation(self, eqn: Any, operands: list[Atom]) -> Sequence[Atom]:
        name = eqn.primitive.name
        if name == "cond":
            return self._cond(eqn, operands)
        if name == "optimization_barrier":  # orders the work of one program, which is cut up here
            return operands
        body = body_of(eqn) if name in _CALLS else None
        if body is not None:
            return self._body(body, operands)
        outputs = [var.aval for var in eqn.outvars]
        return self._append(eqn.primitive, eqn.params, operands, outputs, eqn)

    def _body(self, body: Any, operands: Sequence[Atom]) -> list[Atom]:
        return self.run(*compat.split_consts(body), operands)

    def _cond(self, eqn: Any, operands: list[Atom]) -> list[Atom]:
        index, *rest = operands
        branches = eqn.params["branches"]
        if isinstance(index, Literal):
            at = min(max(int(index.val), 0), len(branches) - 1)
            return self._body(branches[at], rest)
        results = [self._body(branch, rest) for branch in branches]
        chosen: list[Atom] = []
        for var, *cases in zip(eqn.outvars, *results, strict=True):
            if all(_key(case) == _key(cases[0]) for case in cases):
                chosen.append(cases[0])
            else:
                chosen.append(self._select(index, cases, var.aval, eqn))
        return chosen

    def _select(self, index: int, cases: list[Atom], aval: Any, eqn: Any) -> int:
        spread = [self._full(case, aval) for case in cases]
        (output,) = self._append(jax.lax.select_n_p, {}, [index, *spread], [aval], eqn)
        return output

    def _full(self, case: Atom, aval: Any) -> Atom:
        """A constant result of a branch as a value: `select_n` wants operands of one type."""
        if not isinstance(case, Literal):
            return case
        value = np.asarray(case.val, aval.dtype)
        return self._body(jax.make_jaxpr(lambda: jnp.broadcast_to(value, aval.shape))(), [])[0]

    def _append(
        self, primitive: Any, params: Any, inputs: list[Atom], avals: list[Any], source: Any
    ) -> tuple[int, ...]:
        op_effects = getattr(source, "effects", None)
        try:
            key = (primitive, tuple(sorted(params.items())), tuple(map(_key, inputs)))
            known = None if op_effects else self._seen.get(key)
        except TypeError:  # a parameter that has no hash or no order: never merged
            key, known = None, None
        if known is not None:
            return known
        outputs = tuple(self.value(aval) for aval in avals)
        self.ops.append(Op(primitive, params, tuple(inputs), outputs, source))
        if key is not None:
            self._seen[key] = outputs
        return outputs


def _host(const: Any) -> Any:
    """A constant free of devices, so that any rank may use it; PRNG keys stay as they are."""
    return const if hasattr(const, "dtype") and compat.is_key(const) else np.asarray(const)


def _key(atom: Atom) -> Any:
    """A hashable identity: the number of a value, or type and bits of a constant."""
    if not isinstance(atom, Literal):
        return atom
    value = np.asarray(atom.val)
    return (str(atom.aval), value.dtype.str, value.shape, value.tobytes())
