"""How a few stage programs are joined into one compiled program, as plain data.

    calls      0F3 then 0B3               one XLA program, residuals stay inside
    arguments  weights, batch rows, the gradient from stage 1, accumulators (donated)
    results    accumulators, and what another program or rank reads

Two places of a plan with equal recipes share one compiled program per rank.
"""

import enum
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr
from jax.sharding import PartitionSpec

from octojax import compat
from octojax.jaxprs.shardings import Axes, evaluate
from octojax.mesh import DATA_AXIS, Rank
from octojax.programs.accumulator import accumulator_dtype, add_term

WHOLE = PartitionSpec()


class Layout(enum.Enum):
    """How a value lies on the devices of one rank."""

    WHOLE = "whole"  # the same on every device: weights, scalars
    ROWS = "rows"  # batch rows, axis 0 spread over the data axis
    STACKED = "stacked"  # one value per data shard, stacked along a new axis 0


@dataclass(frozen=True, slots=True)
class Call:
    """One stage program inside a recipe. Numbers are values local to the recipe.

    `writes[i]` is -1 where nobody reads the output. `adds[i]` is the accumulator to which
    output i is added (the sum becomes value `writes[i]`), or -1.
    """

    program: int
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    adds: tuple[int, ...]


Spec = PartitionSpec | int
"""How a value of one data shard lies over the further axes of a rank: as a partition spec says,
or (a number) as XLA makes it, which is the same for all values of that number."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """Calls in order; values 0 to `len(layouts) - 1` are the arguments.

    `specs` are those of the arguments, `output_specs` those of the outputs; empty: all are whole.
    """

    calls: tuple[Call, ...]
    layouts: tuple[Layout, ...]
    outputs: tuple[int, ...]
    donated: tuple[int, ...]
    specs: tuple[Spec, ...] = ()
    output_specs: tuple[Spec, ...] = ()

    @property
    def argument_specs(self) -> tuple[Spec, ...]:
        return self.specs or (WHOLE,) * len(self.layouts)

    @property
    def result_specs(self) -> tuple[Spec, ...]:
        return self.output_specs or (WHOLE,) * len(self.outputs)


def is_key(aval: Any) -> bool:
    return jnp.issubdtype(aval.dtype, jax.dtypes.prng_key)


def stored(aval: Any) -> jax.ShapeDtypeStruct:
    """Returns the shape and dtype in which a value is kept between programs.

    PRNG keys are kept as the integers they consist of, which dispatch faster; types of less than
    a byte in a wider one, since what reads them packed and what writes them do not always agree.
    """
    if is_key(aval):
        return jax.eval_shape(jax.random.key_data, jax.ShapeDtypeStruct(aval.shape, aval.dtype))
    return jax.ShapeDtypeStruct(aval.shape, _stored_dtype(aval.dtype))


def is_packed(aval: Any) -> bool:
    """Whether values of this type take less than a byte: int4, uint2, float4_e2m1fn, ..."""
    return not is_key(aval) and _stored_dtype(aval.dtype) != aval.dtype


def _stored_dtype(dtype: Any) -> Any:
    if jnp.issubdtype(dtype, jnp.integer) and jnp.iinfo(dtype).bits < 8:
        wide = jnp.uint8 if jnp.issubdtype(dtype, jnp.unsignedinteger) else jnp.int8
    elif jnp.issubdtype(dtype, jnp.floating) and jnp.finfo(dtype).bits < 8:
        wide = jnp.bfloat16
    else:
        return dtype
    return jnp.dtype(wide)


def arguments(recipe: Recipe, programs: Sequence[ClosedJaxpr]) -> tuple[Any, ...]:
    """Returns the abstract value of each argument, as one data shard sees it."""
    avals: dict[int, Any] = {}
    for call in recipe.calls:
        closed = programs[call.program]
        for value, aval in zip(call.reads, closed.in_avals, strict=True):
            avals.setdefault(value, stored(aval))
        for value, aval in zip(call.adds, closed.out_avals, strict=True):
            if value >= 0:
                dtype = accumulator_dtype(aval.dtype)
                avals.setdefault(value, jax.ShapeDtypeStruct(aval.shape, dtype))
    return tuple(avals[i] for i in range(len(recipe.layouts)))


def function(
    recipe: Recipe, programs: Sequence[ClosedJaxpr], axes: Axes | None = None
) -> Callable[..., tuple[Any, ...]]:
    """Returns the recipe as a Python function of its arguments, for one data shard.

    Shardings that the model names hold over `axes`.
    """

    def run(*values: Any) -> tuple[Any, ...]:
        env = dict(enumerate(values))
        for call in recipe.calls:
            closed = programs[call.program]
            read = [
                unstored(env[i], aval) for i, aval in zip(call.reads, closed.in_avals, strict=True)
            ]
            results = evaluate(closed, read, axes)
            for i, total, value in zip(call.writes, call.adds, results, strict=True):
                if i < 0:
                    continue
                if total >= 0:
                    env[i] = add_term(env[total], value)
                else:
                    env[i] = raw(value)
        return tuple(env[i] for i in recipe.outputs)

    return run


def raw(value: Any) -> Any:
    """Returns the value as it is kept between programs."""
    if is_key(value):
        return jax.random.key_data(value)
    return value.astype(_stored_dtype(value.dtype)) if is_packed(value) else value


def unstored(value: Any, aval: Any) -> Any:
    """Returns what `raw` made of a value of this type, as it was."""
    if is_key(aval):
        return jax.random.wrap_key_data(value, impl=compat.key_impl(aval))
    return value.astype(aval.dtype) if is_packed(aval) else value


def on_rank(
    recipe: Recipe,
    programs: Sequence[ClosedJaxpr],
    rank: Rank,
    specs: Mapping[int, PartitionSpec] | None = None,
) -> tuple[Callable[..., tuple[Any, ...]], tuple[jax.ShapeDtypeStruct, ...]]:
    """Returns the recipe as a function over the devices of `rank`, and its arguments.

    `specs` are those that XLA has made of the numbers in `Recipe.specs`.

    With a data axis it is a `shard_map`, manual over that axis alone; values that outlive
    the program are stacked, so that nothing is reduced before the end of the step. Over further
    axes XLA partitions it, as parameters lie and as the model's constraints say. Results lie as
    `result_places` says.
    """
    axes = Axes(rank.mesh, rank.automatic_axes)
    run, shard = function(recipe, programs, axes), arguments(recipe, programs)
    size, offloaded = rank.data_size, _offloaded(recipe, programs)
    placed = tuple(
        on_devices(aval, layout, rank, spec_of(spec, specs), offloaded=k in offloaded)
        for k, (aval, layout, spec) in enumerate(
            zip(shard, recipe.layouts, recipe.argument_specs, strict=True)
        )
    )
    if size == 1:
        return run, placed

    def stacked(*values: Any) -> tuple[Any, ...]:
        inside = [
            v[0] if layout is Layout.STACKED else v
            for v, layout in zip(values, recipe.layouts, strict=True)
        ]
        return tuple(v[None] for v in run(*inside))

    mapped = jax.shard_map(
        stacked,
        mesh=rank.mesh,
        in_specs=tuple(
            PartitionSpec() if layout is Layout.WHOLE else PartitionSpec(DATA_AXIS)
            for layout in recipe.layouts
        ),
        out_specs=PartitionSpec(DATA_AXIS),
        axis_names={DATA_AXIS},
        check_vma=False,
    )
    return mapped, placed


def result_places(
    recipe: Recipe,
    programs: Sequence[ClosedJaxpr],
    rank: Rank,
    specs: Mapping[int, PartitionSpec] | None = None,
) -> tuple[jax.sharding.Sharding | None, ...]:
    """Returns where each result of the recipe lies; None: where XLA wants it, until in `specs`."""
    offloaded = _offloaded(recipe, programs)
    places: list[jax.sharding.Sharding | None] = []
    for value, spec in zip(recipe.outputs, recipe.result_specs, strict=True):
        where = rank.stacked(spec_of(spec, specs))
        if value in offloaded:
            places.append(on_host(where))
        else:
            open_ = isinstance(spec, int) and rank.spreads and spec not in (specs or {})
            places.append(None if open_ else where)
    return tuple(places)


def spec_of(spec: Spec, specs: Mapping[int, PartitionSpec] | None) -> PartitionSpec:
    """Returns the spec that a number stands for: whole, where XLA has not said."""
    if isinstance(spec, PartitionSpec):
        return spec
    return (specs or {}).get(spec, WHOLE)


def _offloaded(recipe: Recipe, programs: Sequence[ClosedJaxpr]) -> set[int]:
    """Returns the values that lie in the host's memory, by a policy of `jax.checkpoint`."""
    return {
        value
        for call in recipe.calls
        for values, avals in (
            (call.reads, programs[call.program].in_avals),
            (call.writes, programs[call.program].out_avals),
        )
        for value, aval in zip(values, avals, strict=True)
        if compat.is_offloaded(aval)
    }


def on_host(where: jax.sharding.Sharding) -> jax.sharding.Sharding:
    """Returns the same place in the pinned memory of the devices' host."""
    return where.with_memory_kind("pinned_host")


def on_devices(
    aval: Any,
    layout: Layout,
    rank: Rank,
    spec: PartitionSpec = WHOLE,
    *,
    offloaded: bool = False,
) -> jax.ShapeDtypeStruct:
    """Returns how a value that one data shard sees as `aval`, with `spec` over further axes, lies
    on all devices of `rank`, or `offloaded` in the memory of their host."""
    size, shape = rank.data_size, tuple(aval.shape)
    if size > 1 and layout is Layout.ROWS:
        shape = (shape[0] * size, *shape[1:])
    if size > 1 and layout is Layout.STACKED:
        shape = (size, *shape)
    match layout:
        case Layout.WHOLE:
            where = rank.sharding(spec)
        case Layout.ROWS:
            where = rank.along_data
        case Layout.STACKED:
            where = rank.stacked(spec)
    where = on_host(where) if offloaded else where
    return jax.ShapeDtypeStruct(shape, aval.dtype, sharding=where)
