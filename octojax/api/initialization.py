"""Parameters made where they live: one program per kind of leaf, from the trace of a constructor.

    key = random_seed 0                 run once, operation by operation: integers are exact
    key3 = random_fold_in key 3
    w3 = normal(key3) * 0.02            the program of leaf w3; w7's is the same, with key7

The trace of a deep model has a leaf of each kind many times, with another key, so that it takes a
few programs. A leaf is bit-equal to that of the whole initialization, jitted: the same operations,
and threefry gives each element the same bits however the array is sharded. Made at once is one
leaf, sharded as its rank keeps it.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, JaxprEqn, Literal, Var
from jax.sharding import NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

from octojax import compat
from octojax.api.leaf_sources import Part
from octojax.api.state_layout import fresh
from octojax.arrays import put
from octojax.errors import ExecutionError
from octojax.jaxprs.flat import Builder, FlatJaxpr, flatten, rewrite
from octojax.jaxprs.inline import CALLS, inline_jits
from octojax.jaxprs.shardings import equations, evaluate
from octojax.programs.recipe import raw, stored, unstored
from octojax.stages.fingerprint import digest, portable

SEED_BYTES = 1 << 16
"""Integers and keys of up to so many bytes are inputs of the programs that read them."""

VECTOR = 16
"""Elements of the widest vectors of today's processors, of float32."""


class Initialization:
    """The leaves that `make()` makes, a tree, each by itself. `names` are for messages."""

    def __init__(self, make: Callable[[], Any], names: Sequence[str]) -> None:
        self.names = names
        closed, _ = compat.trace(lambda: jax.tree.leaves(make()))
        self._flat = _without_constraints(inline_jits(flatten(closed), CALLS))
        self._closed = closed
        self._producer = {v: at for at, eqn in enumerate(self._flat.eqns) for v in eqn.outvars}
        self._values: dict[Var, Any] = dict(
            zip(self._flat.constvars, self._flat.constants, strict=True)
        )
        self._functions: dict[Any, Callable[..., jax.Array]] = {}
        self._homes: dict[Any, Sharding] = {}

    @property
    def num_programs(self) -> int:
        """How many programs were compiled."""
        return len(self._functions)

    @cached_property
    def fact(self) -> str:
        """Names the computation, seeds and all, alike in every process."""
        return portable(self._closed)

    def place(self, parts: Sequence[Part]) -> list[jax.Array]:
        """Returns the parts, leaf by leaf. Raises `ExecutionError` naming a leaf that fails."""
        by_leaf: dict[int, list[int]] = {}
        for k, part in enumerate(parts):
            by_leaf.setdefault(part.leaf, []).append(k)
        placed: list[Any] = [None] * len(parts)
        with compat.jit_enabled():
            for leaf, mine in by_leaf.items():
                try:
                    values = self._leaf(leaf, [parts[k] for k in mine])
                except Exception as error:
                    raise ExecutionError(
                        f"leaf {self.names[leaf] or 'at the root'} could not be made: "
                        f"{type(error).__name__}: {_last_line(error)}"
                    ) from error
                for k, value in zip(mine, values, strict=True):
                    placed[k] = value
        return placed

    # ------------------------------------------------------------------ one leaf

    def _leaf(self, leaf: int, parts: Sequence[Part]) -> list[jax.Array]:
        atom = self._flat.outvars[leaf]
        if isinstance(atom, Literal) or self._is_seed(atom) or atom in self._values:
            value = self._value(atom)
            rows = [value if p.row is None else value[p.row] for p in parts]
            return [fresh(raw(x), p.where) for x, p in zip(rows, parts, strict=True)]
        wholes: dict[Sharding, jax.Array] = {}
        placed = []
        for part in parts:
            home = self._home(part.where)
            whole = home if part.row is None else _of_stack(home)
            if whole not in wholes:
                wholes[whole] = self._whole_leaf(atom, whole)
            value = wholes[whole] if part.row is None else self._take(home)(wholes[whole], part.row)
            own = home == part.where and (part.row is not None or len(parts) == 1)
            placed.append(value if own else fresh(value, part.where))
        return placed

    def _home(self, where: Sharding) -> Sharding:
        """Where the leaf is made: of equal ranks of this process, on one, so that its program is
        compiled once."""
        if not where.is_fully_addressable:
            return where
        form: Any = len(where.device_set)
        if isinstance(where, NamedSharding):
            form = (tuple(where.mesh.shape.items()), tuple(where.spec))
        return self._homes.setdefault(form, where)

    def _whole_leaf(self, atom: Var, where: Sharding) -> jax.Array:
        if _is_narrow(stored(atom.aval).shape, where):
            assert isinstance(where, NamedSharding)
            whole = self._whole_leaf(atom, NamedSharding(where.mesh, PartitionSpec()))
            return put(whole, where)
        inputs, closed = self._program(atom)
        name = digest(closed), where
        if name not in self._functions:
            avals = [v.aval for v in inputs]

            def function(*values: Any) -> jax.Array:
                operands = [unstored(x, a) for x, a in zip(values, avals, strict=True)]
                return raw(evaluate(closed, operands, None)[0])

            self._functions[name] = jax.jit(function, out_shardings=where)
        value = self._functions[name](*(np.asarray(raw(self._value(v))) for v in inputs))
        # One at a time: a program's own values take memory, too.
        return jax.block_until_ready(value)

    def _take(self, where: Sharding) -> Callable[[jax.Array, int], jax.Array]:
        """The program that takes a row of a stacked leaf."""
        name = "row", where
        if name not in self._functions:

            def row(leaf: jax.Array, index: Any) -> jax.Array:
                return jax.lax.dynamic_index_in_dim(leaf, index, keepdims=False)

            self._functions[name] = jax.jit(row, out_shardings=where)
        return self._functions[name]

    def _program(self, atom: Var) -> tuple[list[Var], ClosedJaxpr]:
        """The equations behind a leaf, from seeds on, and the seeds in the order of their use."""
        needed: set[int] = set()
        todo = [atom]
        while todo:
            at = self._producer.get(todo.pop())
            if at is None or at in needed:
                continue
            needed.add(at)
            reads = self._flat.eqns[at].invars
            todo += [v for v in reads if isinstance(v, Var) and not self._is_seed(v)]
        eqns = [self._flat.eqns[at] for at in sorted(needed)]
        outputs = {v for eqn in eqns for v in eqn.outvars}
        reads = [v for eqn in eqns for v in eqn.invars if isinstance(v, Var)]
        inputs = list(dict.fromkeys(v for v in reads if v not in outputs))
        return inputs, compat.new_jaxpr(inputs, [atom], eqns)

    # ------------------------------------------------------------------ seeds

    @cached_property
    def _exact(self) -> frozenset[Var]:
        """The variables that integers alone lead to, which are the same in any program."""
        exact: set[Var] = {v for v in self._flat.constvars if _is_whole(v.aval)}
        for eqn in self._flat.eqns:
            literals_exact = all(
                _is_whole(x.aval) for x in eqn.invars if isinstance(x, Literal)
            ) and all(x in exact for x in eqn.invars if isinstance(x, Var))
            if literals_exact and not eqn.effects and all(map(_is_whole, _avals(eqn))):
                exact.update(eqn.outvars)
        return frozenset(exact)

    def _is_seed(self, var: Var) -> bool:
        return var in self._exact and compat.num_bytes(var.aval) <= (
            SEED_BYTES if compat.is_key(var.aval) else 64
        )

    def _value(self, atom: compat.Atom) -> Any:
        """The value of a seed, a constant or a literal."""
        if isinstance(atom, Literal):
            return jnp.asarray(atom.val, compat.aval_of(atom).dtype)
        todo = [atom]
        while todo:
            var = todo[-1]
            if var in self._values:
                todo.pop()
                continue
            eqn = self._flat.eqns[self._producer[var]]
            missing = [v for v in eqn.invars if isinstance(v, Var) and v not in self._values]
            if missing:
                todo += missing
                continue
            operands = [x.val if isinstance(x, Literal) else self._values[x] for x in eqn.invars]
            results = compat.bind_here(eqn, operands, eqn.params)
            self._values.update(zip(eqn.outvars, results, strict=True))
        return self._values[atom]


def _last_line(error: Exception) -> str:
    """What an error says, without the traceback that JAX puts into the message."""
    lines = str(error).strip().splitlines()
    return lines[-1] if lines else ""


def _without_constraints(flat: FlatJaxpr) -> FlatJaxpr:
    """The jaxpr without what it says of shardings: where a leaf lies is for its rank to say."""

    def rule(builder: Builder, eqn: JaxprEqn, args: list[Any]) -> Sequence[Any] | None:
        return args if eqn.primitive.name == "sharding_constraint" else None

    return rewrite(flat, rule)


def _avals(eqn: JaxprEqn) -> Iterable[Any]:
    """The types of all variables in an equation, at any depth."""
    yield from (v.aval for v in eqn.outvars)
    for value in jax.tree.leaves(list(eqn.params.values()), is_leaf=lambda x: hasattr(x, "eqns")):
        if hasattr(value, "eqns") or hasattr(value, "jaxpr"):
            yield from (v.aval for inner in equations(value) for v in inner.outvars)


def _is_whole(aval: Any) -> bool:
    """Whether values of this type are integers, truth values or keys."""
    return compat.is_key(aval) or not jnp.issubdtype(aval.dtype, jnp.inexact)


def _is_narrow(shape: tuple[int, ...], where: Sharding) -> bool:
    """Whether a leaf is cut into parts whose rows are narrower than a vector, which the CPU backend
    of JAX 0.12 rounds otherwise: such a leaf is made whole, and divided then."""
    part = where.shard_shape(shape)
    return bool(shape) and part != shape and part[-1] < VECTOR


def _of_stack(where: Sharding) -> Sharding:
    """Where a leaf lies whose rows along axis 0 lie at `where`."""
    if isinstance(where, NamedSharding):
        return NamedSharding(where.mesh, PartitionSpec(None, *where.spec))
    assert isinstance(where, SingleDeviceSharding), "ranks keep their values so"
    return where
