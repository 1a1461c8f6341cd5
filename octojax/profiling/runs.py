"""Run the layers of a loss once, in order, and keep what is needed to time them alone."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from octojax import compat
from octojax.compat import Device
from octojax.jaxprs.shardings import evaluate
from octojax.layers.cut import StagedLoss
from octojax.programs.accumulator import accumulator_dtype
from octojax.programs.recipe import is_packed, raw
from octojax.stages.fingerprint import fingerprint
from octojax.stages.program import Program, Ref, Role


@dataclass(frozen=True)
class Prepared:
    """A program with arguments to run it on: `run(sums, values)` returns `(outputs, sums)`.

    `sums` are the gradient accumulators, donated and returned as the executor does.
    """

    program: Program
    run: Callable[..., Any]
    values: tuple[Any, ...]
    sums: tuple[Any, ...]

    def job(self) -> Callable[[int], None]:
        """Returns the timed form: n runs back to back."""
        accumulators = [self.sums]

        def job(times: int) -> None:
            outputs: Any = ()
            for _ in range(times):
                outputs, accumulators[0] = self.run(accumulators[0], self.values)
            jax.block_until_ready((outputs, accumulators[0]))

        return job


class Values:
    """The values at the ends of layers: weights and batch as they are, dummy gradients.

    Weights are put on the device when asked for and not kept, so that one layer at a time is
    on it.
    """

    def __init__(
        self, staged: StagedLoss, params: Any, state: Any, batch: Any, device: Device
    ) -> None:
        self._staged, self.device = staged, device
        self._state = jax.tree.leaves(state)
        self._batch = jax.tree.leaves(batch)
        self._leaves = [*jax.tree.leaves(params), *self._state, *staged.constants]

    def of(self, ref: Ref, aval: Any, known: Mapping[Ref, Any]) -> Any:
        """Returns the value of an end of type `aval`; `known` are those of this layer."""
        if ref in known:
            return known[ref]
        if ref.role is Role.PARAM:
            unit = self._staged.units[ref.index]
            leaf = self._leaves[unit.leaf]
            return self._put(leaf if unit.index is None else leaf[unit.index], aval)
        if ref.role is Role.STATE:
            return self._put(self._staged.state[ref.index].value(self._state), aval)
        if ref.role is Role.BATCH:
            return self._put(self._batch[ref.index], aval)
        return self._put(_made_up(ref, aval), aval)

    def _put(self, value: Any, aval: Any) -> Any:
        if isinstance(value, jax.ShapeDtypeStruct):  # only its shape is known
            value = _made_up(Ref(Role.INPUT, 0), value)
        value = jnp.asarray(value)
        if not compat.is_key(value):
            value = _wide(value.astype(aval.dtype))
        return jax.device_put(value, self.device)


def _made_up(ref: Ref, aval: Any) -> Any:
    """Small random numbers; ones for the seed, zeros for integers."""
    key = jax.random.key(ref.index)
    if compat.is_key(aval):
        return jax.random.split(key, aval.shape) if aval.shape else key
    if ref.role is Role.SEED or not compat.is_float(aval):
        return jnp.full(aval.shape, 1 if ref.role is Role.SEED else 0, aval.dtype)
    return (1e-3 * jax.random.normal(key, aval.shape, jnp.float32)).astype(aval.dtype)


class Programs:
    """Compiled programs by fingerprint: equal layers share them."""

    def __init__(self) -> None:
        self._compiled: dict[str, Callable[..., Any]] = {}

    def get(self, program: Program, sums: Any, values: Any) -> Callable[..., Any]:
        name = fingerprint(program)
        if name not in self._compiled:
            jitted = jax.jit(accumulating(program), donate_argnums=0, keep_unused=True)
            self._compiled[name] = jitted.lower(sums, values).compile()
        return self._compiled[name]


def accumulating(program: Program) -> Callable[..., Any]:
    """Returns the program as a function `(sums, values) -> (outputs, sums)` that adds its
    parameter gradients to `sums`. Types of less than a byte are in wider ones on both sides, as in
    the executor's programs (`octojax.programs.recipe.stored`)."""
    added = [ref.role is Role.PARAM_GRAD for ref in program.writes]

    def run(sums: Sequence[Any], values: Sequence[Any]) -> tuple[Any, Any]:
        packed = [
            value.astype(aval.dtype) if is_packed(aval) else value
            for value, aval in zip(values, program.jaxpr.in_avals, strict=True)
        ]
        written = evaluate(program.jaxpr, packed, None)  # on one device
        grads = [x for x, is_grad in zip(written, added, strict=True) if is_grad]
        outputs = tuple(_wide(x) for x, is_grad in zip(written, added, strict=True) if not is_grad)
        totals = tuple(s + g.astype(s.dtype) for s, g in zip(sums, grads, strict=True))
        return outputs, totals

    return run


def _wide(value: Any) -> Any:
    return raw(value) if is_packed(value) else value


def prepare(
    program: Program, values: Values, known: dict[Ref, Any], compiled: Programs
) -> Prepared:
    """Returns the program with its arguments and zeroed accumulators, compiled."""
    avals = program.jaxpr.in_avals
    arguments = tuple(
        values.of(ref, aval, known) for ref, aval in zip(program.reads, avals, strict=True)
    )
    device = values.device
    sums = tuple(
        jax.device_put(jnp.zeros(a.shape, accumulator_dtype(a.dtype)), device)
        for ref, a in zip(program.writes, program.jaxpr.out_avals, strict=True)
        if ref.role is Role.PARAM_GRAD
    )
    return Prepared(program, compiled.get(program, sums, arguments), arguments, sums)


def run_once(prepared: Prepared) -> dict[Ref, Any]:
    """Returns what the program writes besides parameter gradients. Uses up its accumulators."""
    refs = [ref for ref in prepared.program.writes if ref.role is not Role.PARAM_GRAD]
    fresh = jax.tree.map(jnp.copy, prepared.sums)
    outputs, _ = prepared.run(fresh, prepared.values)
    return dict(zip(refs, outputs, strict=True))
