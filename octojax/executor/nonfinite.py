"""Where a NaN came from, for `jax.debug_nans` and `jax.debug_infs`.

JAX looks at the results of a compiled program and knows no more than that one of them is bad. Here
the program's actions are run again, operation by operation, on the arguments that it had.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, JaxprEqn, Literal

from octojax import compat
from octojax.errors import NonFiniteError
from octojax.executor.instructions import Do
from octojax.executor.lower import Lowered
from octojax.executor.run import Walk
from octojax.ir import Run
from octojax.jaxprs.inline import CALLS, body_of
from octojax.jaxprs.shardings import apply, evaluate
from octojax.programs.accumulator import widened
from octojax.programs.recipe import Layout, Recipe, raw, unstored


def non_finite(
    lowered: Lowered, walk: Walk, slots: Sequence[Any], shards: int = 1
) -> NonFiniteError:
    """Returns the error that names rank, action, operation and the user's line.

    `walk` stands at the operation whose results JAX refused; `slots` are as it read them, on
    a rank whose rows lie in `shards` on its data axis.
    """
    infinite, begin = _beginning(walk)
    if walk.at < 0:
        return NonFiniteError(f"{begin}: the batch itself has it")
    body = walk.program.body
    if walk.at >= len(body) or not isinstance(body[walk.at].of, Run):
        return NonFiniteError(begin)
    operation = body[walk.at]
    assert isinstance(operation.of, Run)
    recipe = lowered.step.recipes[operation.target][1]
    arguments = [slots[i] for i in operation.reads]
    if not _is_here(arguments):
        return NonFiniteError(f"{begin}{_ELSEWHERE}")
    with jax.debug_nans(False), jax.debug_infs(False):
        bad = any_non_finite(infinite)
        for shard in _shards(recipe, arguments, shards):
            calls = _calls(recipe, lowered.jaxprs, shard)
            for call, action in zip(calls, operation.of.actions, strict=False):
                jaxpr, values = call
                if any(map(bad, values)):
                    return NonFiniteError(
                        f"{begin}: what {action} reads has it already. Look at the parameters, "
                        f"the module state and the batch"
                    )
                eqn = first_bad(jaxpr, values, bad)
                if eqn is not None:
                    return NonFiniteError(f"{begin}: {action} made it by {_named(eqn)}")
    return NonFiniteError(
        f"{begin}. Run again operation by operation it has none: sums over microbatches or XLA's "
        f"optimizations make it"
    )


def non_finite_phase(routine: Any, walk: Walk, slots: Sequence[Any]) -> NonFiniteError:
    """Like `non_finite`, where `walk` stands in the end of a step (an executor's `Routine`)."""
    infinite, begin = _beginning(walk)
    operation = routine.body[walk.at] if 0 <= walk.at < len(routine.body) else None
    if operation is None or operation.do is not Do.RUN:
        return NonFiniteError(begin)
    arguments = [slots[i] for i in operation.reads]
    if any(x.is_deleted() for x in arguments):
        return NonFiniteError(begin)
    if not _is_here(arguments):
        return NonFiniteError(f"{begin}{_ELSEWHERE}")
    with jax.debug_nans(False), jax.debug_infs(False):
        bad = any_non_finite(infinite)
        values = [jax.device_get(x) if compat.is_float(x) else x for x in arguments]
        if any(map(bad, values)):
            return NonFiniteError(
                f"{begin}: what it reads has it already. Look at the gradients, the parameters and "
                f"the optimizer state"
            )
        eqn = first_bad(routine.programs[operation.target].jaxpr, values, bad)
    return NonFiniteError(begin if eqn is None else f"{begin}: made by {_named(eqn)}")


_ELSEWHERE = (
    ". Which operation made it is not looked for where a rank has devices of several processes"
)


def _is_here(arguments: Sequence[Any]) -> bool:
    """Whether this process has all parts of the arguments."""
    return all(getattr(x, "is_fully_addressable", True) for x in arguments)


def _beginning(walk: Walk) -> tuple[bool, str]:
    """Whether infinities are looked for too, and what an error says first."""
    infinite = bool(jax.config.jax_debug_infs)  # type: ignore[attr-defined]
    what = "a NaN or an infinity" if infinite else "a NaN"
    return infinite, f"rank {walk.program.rank}: {what} in the results of {walk}"


def _named(eqn: JaxprEqn) -> str:
    return f"{eqn.primitive} at {compat.source_line(eqn) or 'a line that is not known'}"


def any_non_finite(infinite: bool) -> Callable[[Any], bool]:
    """Returns the test of one value: for NaNs, or also for infinities."""

    def bad(value: Any) -> bool:
        if not jnp.issubdtype(value.dtype, jnp.inexact):
            return False
        return bool((~jnp.isfinite(value) if infinite else jnp.isnan(value)).any())

    return bad


def first_bad(
    closed: ClosedJaxpr, arguments: Sequence[Any], bad: Callable[[Any], bool]
) -> JaxprEqn | None:
    """Returns the innermost equation that first makes a bad value of good ones."""
    try:
        _evaluate(closed, arguments, bad)
    except _Bad as fault:
        return fault.eqn
    return None


class _Bad(Exception):
    def __init__(self, eqn: JaxprEqn) -> None:
        super().__init__(eqn)
        self.eqn = eqn


def _evaluate(closed: Any, arguments: Sequence[Any], bad: Callable[[Any], bool]) -> list[Any]:
    jaxpr, consts = compat.split_consts(closed)
    env = dict(zip(jaxpr.constvars, consts, strict=True))
    env.update(zip(jaxpr.invars, arguments, strict=True))

    def read(atom: Any) -> Any:
        return jnp.asarray(atom.val) if isinstance(atom, Literal) else env[atom]

    for eqn in jaxpr.eqns:
        values = [read(atom) for atom in eqn.invars]
        results = _results(eqn, values, bad)
        if any(map(bad, results)):
            raise _Bad(eqn)
        env.update(zip(eqn.outvars, results, strict=True))
    return [read(atom) for atom in jaxpr.outvars]


def _results(eqn: JaxprEqn, values: list[Any], bad: Callable[[Any], bool]) -> Sequence[Any]:
    """What an equation makes; calls and scans are entered."""
    name, params = eqn.primitive.name, eqn.params
    inner = body_of(eqn) if name in CALLS else None
    if inner is not None:
        return _evaluate(inner, values, bad)
    if name == "scan" and len(params["jaxpr"].in_avals) == len(values):
        return _scan(params, values, bad)
    return apply(eqn, values, None)


def _scan(params: Any, values: list[Any], bad: Callable[[Any], bool]) -> list[Any]:
    num_consts, num_carry = compat.scan_counts(params)
    consts, carry = values[:num_consts], values[num_consts : num_consts + num_carry]
    xs, length = values[num_consts + num_carry :], params["length"]
    rows: list[list[Any]] = []
    for i in reversed(range(length)) if params["reverse"] else range(length):
        results = _evaluate(params["jaxpr"], [*consts, *carry, *(x[i] for x in xs)], bad)
        carry = results[:num_carry]
        rows.append(results[num_carry:])
    rows = rows[::-1] if params["reverse"] else rows
    return [*carry, *(jnp.stack(column) for column in zip(*rows, strict=True))]


def _shards(recipe: Recipe, arguments: Sequence[Any], shards: int) -> list[list[Any]]:
    """The arguments of each data shard; accumulators may have been given away and are None."""
    alive = [None if x.is_deleted() else jax.device_get(x) for x in arguments]
    stacked = [
        x for x, layout in zip(arguments, recipe.layouts, strict=True) if layout is Layout.STACKED
    ]
    if shards == 1 or not stacked:
        return [alive]

    def piece(value: Any, layout: Layout, shard: int) -> Any:
        if value is None or layout is Layout.WHOLE:
            return value
        if layout is Layout.STACKED:
            return value[shard]
        rows = value.shape[0] // shards
        return value[shard * rows : (shard + 1) * rows]

    return [
        [piece(x, layout, s) for x, layout in zip(alive, recipe.layouts, strict=True)]
        for s in range(shards)
    ]


def _calls(
    recipe: Recipe, jaxprs: Sequence[ClosedJaxpr], arguments: Sequence[Any]
) -> Iterator[tuple[ClosedJaxpr, list[Any]]]:
    """Yields each call of a recipe with its arguments, and runs it."""
    env = dict(enumerate(arguments))
    for call in recipe.calls:
        closed = jaxprs[call.program]
        values = [
            unstored(jnp.asarray(env[i]), aval)
            for i, aval in zip(call.reads, closed.in_avals, strict=True)
        ]
        yield closed, values
        results = evaluate(closed, values, None)
        for i, total, value in zip(call.writes, call.adds, results, strict=True):
            if i >= 0 and total < 0:
                env[i] = raw(value)
            elif i >= 0:
                env[i] = widened(value)
