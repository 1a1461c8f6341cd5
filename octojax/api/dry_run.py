"""`octopipe.dry_run`: everything that `compile` decides, from shapes and a described machine.

    shapes ──trace──▶ layers ──cost model──▶ profile ──tune──▶ sizes of the mesh, plan
    layers + plan ──cut, differentiate, lower──▶ stages, update ──▶ bytes on each device

No parameter is made and no program compiled. Parameters, gradients and optimizer state are counted
leaf by leaf as their specs divide them, activations are those of the stages' programs under the
simulated order; over a tensor axis, which XLA divides as it sees fit, as `mesh_costs` says.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np
import optax
from jax.sharding import Mesh, PartitionSpec

from octojax import compat
from octojax.api.options import Options, options_of
from octojax.api.param_specs import bytes_per_device
from octojax.api.pipelined import PipelinedLoss
from octojax.api.report import unit_bytes
from octojax.api.step import TrainStep
from octojax.costs import Device, estimate
from octojax.errors import CapacityError, MeshError
from octojax.frontends import PureLoss, adapt
from octojax.frontends.specs import partition_specs
from octojax.ir import LayerCost, Machine, Plan, Profile, Timeline
from octojax.layers import find_layers
from octojax.mesh import DATA_AXIS
from octojax.processes import call
from octojax.programs.accumulator import accumulator_dtype
from octojax.rows.whole import separated
from octojax.simulate import simulate
from octojax.stages.sizes import input_bytes, kept_bytes, residual_bytes
from octojax.trace import trace_loss
from octojax.tune import tune_devices
from octojax.tune.mesh_costs import STREAMS, MeshSizes, on_mesh
from octojax.tune.sizes_table import DevicesResult
from octojax.update.state import piece_aval

TENSOR_AXIS = "tensor"
GIB = 2**30
SEARCHES = 3
"""At most so many, each with less room than the one before, until what is counted fits."""


@dataclass(frozen=True)
class DeviceMemory:
    """What each device of one rank keeps, in bytes: what stays, and the most of what microbatches
    in flight keep (values on their way included)."""

    rank: int
    layers: int
    params: int
    gradients: int
    optimizer: int
    activations: int

    @property
    def peak(self) -> int:
        return self.params + self.gradients + self.optimizer + self.activations


@dataclass(frozen=True)
class DryRun:
    """A plan for a model that was never made. Times are simulated, from the cost model.

    `profile` has one "layer" per stage, for one rank. `choice` is the table of sizes that were
    weighed, where they were not given. `assumed_specs`: the model says nothing of the tensor axis,
    and its matrices were taken to be divided along their largest dimension.
    """

    plan: Plan
    mesh: dict[str, int]
    profile: Profile
    timeline: Timeline
    memory: tuple[DeviceMemory, ...]
    num_parameters: int
    choice: DevicesResult | None = None
    assumed_specs: bool = False

    @property
    def fits(self) -> bool:
        """Whether every device has room for its peak."""
        return self.lacking <= 0

    @property
    def lacking(self) -> float:
        """Bytes that the fullest device lacks; of what is left there, the negative."""
        capacity = self.profile.machine.capacity
        return max(m.peak - capacity(m.rank) for m in self.memory)

    def __str__(self) -> str:
        capacity = self.profile.machine.capacity_bytes
        room = f"of {capacity / GIB:.4g} GiB" if math.isfinite(capacity) else "capacity unknown"
        shape = " x ".join(f"{name} {size}" for name, size in self.mesh.items())
        lines = [] if self.choice is None else [str(self.choice), ""]
        lines += [
            f"{self.num_parameters:,} parameters on {math.prod(self.mesh.values())} devices "
            f"({shape}), {self.plan.num_microbatches} microbatches, {self.plan.num_stages} stages "
            f"of {self.plan.partition.num_layers} layers",
            f"step {self.timeline.makespan_s:.4g} s without what ends it, bubbles "
            f"{self.timeline.bubble_ratio:.1%} (simulated, cost model)",
            f"GiB on each device ({room}):",
            " rank  layers   params    grads    optim    activ     peak",
        ]
        lines += [
            f"{m.rank:5d}{m.layers:8d}"
            + "".join(
                f"{n / GIB:9.3f}"
                for n in (m.params, m.gradients, m.optimizer, m.activations, m.peak)
            )
            for m in self.memory
        ]
        if not self.fits:
            ranks = [m.rank for m in self.memory if m.peak > self.profile.machine.capacity(m.rank)]
            lines.append(
                f"DOES NOT FIT: {self.lacking / GIB:.3g} GiB are lacking on rank "
                f"{', '.join(map(str, ranks))}; more devices, a larger tensor axis, zero=3 or "
                f"smaller microbatches need less"
            )
        if self.assumed_specs:
            lines.append(
                "the model has no specs for the tensor axis: matrices were taken as divided "
                "along their largest dimension (param_specs= says other)"
            )
        return "\n".join(lines)


def dry_run(
    model: Any,
    loss_fn: Any,
    optimizer: optax.GradientTransformation,
    batch: Any,
    *,
    machine: Machine,
    device: Device,
    devices: int | None = None,
    params: Any = None,
    mesh: Any = None,
    trainable: Any = None,
    state: Any = None,
    kinds: Sequence[str] = (),
    max_tensor: int | None = None,
    **options: Any,
) -> DryRun:
    """Returns plan and memory of a step for `batch`, the shapes of a whole step, without a device.

    Arguments are those of `octopipe.compile`; `machine` describes devices and links
    (`ranks_per_node`: devices of a node), `device` what one of them computes. With `devices` and
    without a mesh, sizes of the mesh, microbatches and plan are chosen together, as by
    `octopipe tune --devices`; JAX must show as many devices, which may be emulated
    (`XLA_FLAGS=--xla_force_host_platform_device_count=64`). `kinds` name the layers for the cost
    model, which counts the collectives of `mamba+moe`, say.

    Raises what `compile` raises, and `CapacityError` where no plan fits.
    """
    with call("dry run"), compat.jit_enabled(), compat.without_mesh() as callers:
        pure = adapt(model, loss_fn, params, trainable=trainable, state=state)
        settings = options_of(pure.example(model), **{"progress": False, **options})
        if devices is not None and mesh is None:
            profile = _profile(pure, batch, 1, device, machine, kinds)
            return _chosen(
                pure, batch, settings, devices, optimizer, machine, device, profile, max_tensor
            )
        if mesh is None:
            mesh = callers
        if not isinstance(mesh, Mesh):
            raise MeshError("a dry run needs devices=, or the mesh= that would be used")
        return _run(pure, batch, settings, mesh, optimizer, machine, device, kinds)


def _chosen(
    pure: PureLoss,
    batch: Any,
    options: Options,
    devices: int,
    optimizer: optax.GradientTransformation,
    machine: Machine,
    device: Device,
    profile: Profile,
    max_tensor: int | None,
) -> DryRun:
    """Returns the quickest sizes and plan found whose devices have room for what is counted.

    The search knows the layers' estimates; what the stages' programs keep may be more. The next
    search leaves as much room free as the one before lacked of it, and half of that where no plan
    is so lean.
    """
    room = too_much = machine.capacity_bytes
    result = None
    for _ in range(SEARCHES):
        try:
            choice = tune_devices(
                profile,
                devices,
                _rows(batch),
                max_tensor=max_tensor,
                zero=(options.zero,) if options.zero else (0, 1),
                capacity_bytes=room,
                seconds=options.tune_seconds,
                seed=options.seed,
            )
        except CapacityError:
            if result is None:
                raise
            room = (room + too_much) / 2
            continue
        mesh = _mesh_of(choice.best.sizes, devices, options.axis)
        planned = replace(options, plan=choice.result.plan, microbatches=choice.best.microbatches)
        kinds = profile.kinds
        dry = _run(pure, batch, planned, mesh, optimizer, machine, device, kinds, choice)
        if result is None or dry.lacking < result.lacking:
            result = dry
        if dry.fits:
            break
        too_much = room
        room -= max(
            memory.peak - estimate
            for memory, estimate in zip(dry.memory, choice.result.peak_bytes, strict=True)
        )
    assert result is not None
    return result


def _run(
    pure: PureLoss,
    batch: Any,
    options: Options,
    mesh: Mesh,
    optimizer: optax.GradientTransformation,
    machine: Machine,
    device: Device,
    kinds: Sequence[str],
    choice: DevicesResult | None = None,
) -> DryRun:
    shape: dict[str, int] = dict(mesh.shape)
    data, tensor = shape.get(DATA_AXIS, 1), shape.get(TENSOR_AXIS, 1)
    count = options.microbatches or 1
    sizes = MeshSizes(shape.get(options.axis, 1), tensor, data)
    layers = _profile(pure, batch, max(1, _rows(batch) // count // data), device, machine, kinds)
    layers = replace(on_mesh(layers, sizes), microbatches=count)
    assumed = tensor > 1 and options.param_specs is None and not _says(pure, mesh)
    if assumed:
        options = replace(options, param_specs=largest_dimension(tensor))
    loss = PipelinedLoss(pure, batch, replace(options, profile=layers), mesh, optimizer)
    step = TrainStep(loss, optimizer)
    profile = _stage_profile(loss, layers, tensor)
    timeline = simulate(loss.plan, profile)
    return DryRun(
        loss.plan,
        shape,
        profile,
        timeline,
        _memory(step, timeline),
        sum(int(np.prod(a.shape, dtype=np.int64)) for a in loss.staged.traced.params.avals),
        choice,
        assumed,
    )


def largest_dimension(size: int, axis: str = TENSOR_AXIS) -> Any:
    """Returns a function for `param_specs=` that divides matrices along their largest dimension
    that `size` divides, and leaves vectors whole."""

    def spec(path: str, shape: tuple[int, ...]) -> PartitionSpec:
        fitting = [k for k, n in enumerate(shape) if n % size == 0 and n >= size]
        if len(shape) < 2 or not fitting:
            return PartitionSpec()
        at = max(fitting, key=lambda k: (shape[k], k))
        return PartitionSpec(*(axis if k == at else None for k in range(at + 1)))

    return spec


def _says(pure: PureLoss, mesh: Mesh) -> bool:
    """Whether the model's metadata divide anything."""
    return any(spec is not None and any(spec) for spec in partition_specs(pure.params, mesh))


def _rows(batch: Any) -> int:
    return max((x.shape[0] for x in jax.tree.leaves(batch) if np.ndim(x)), default=1)


def _mesh_of(sizes: MeshSizes, devices: int, axis: str) -> Mesh:
    at_hand = jax.devices()
    if len(at_hand) < devices:
        raise MeshError(
            f"a dry run for {devices} devices lays them out as JAX devices, and there are "
            f"{len(at_hand)}. Emulate them, on any machine: start Python with JAX_PLATFORMS=cpu "
            f"XLA_FLAGS=--xla_force_host_platform_device_count={devices}"
        )
    shape = (sizes.pipeline, sizes.data, sizes.tensor)
    return Mesh(np.array(at_hand[:devices]).reshape(shape), (axis, DATA_AXIS, TENSOR_AXIS))


def _profile(
    pure: PureLoss, batch: Any, rows: int, device: Device, machine: Machine, kinds: Sequence[str]
) -> Profile:
    """Returns the layers on one device, by the cost model, for so many rows of the batch."""
    whole = _rows(batch)
    part = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(
            (rows, *x.shape[1:]) if np.ndim(x) and x.shape[0] == whole else x.shape, x.dtype
        ),
        batch,
    )
    layered = find_layers(separated(trace_loss(pure.fn, pure.params, part, pure.state)))
    profile = estimate(layered, device, machine, name="dry run")
    ratio = _gradient_ratio(pure.params)
    names = kinds if len(kinds) == profile.num_layers else profile.kinds
    state_ratio = 1 + ratio + device.optimizer_slots
    return replace(
        profile,
        layers=tuple(
            replace(layer, kind=kind, state_bytes=round(layer.param_bytes * state_ratio))
            for layer, kind in zip(profile.layers, names, strict=True)
        ),
        extra=(*profile.extra, ("gradient_ratio", ratio)),
    )


def _gradient_ratio(params: Any) -> float:
    """Bytes of gradients, which are added up in float32 at least, per byte of parameters."""
    leaves = [x for x in jax.tree.leaves(params) if compat.is_float(x)]
    return sum(map(_accumulator_bytes, leaves)) / sum(map(compat.num_bytes, leaves))


def _stage_profile(loss: PipelinedLoss, layers: Profile, tensor: int) -> Profile:
    """Returns a profile of whole stages for one rank: layers' times, programs' bytes."""
    costs = []
    for stage in loss.stages[0]:
        own = [layers.layers[at] for at in loss.plan.partition.layers(stage.index)]
        streams = STREAMS * sum(x.output_bytes for x in own)

        def share(nbytes: int, whole: int = streams) -> int:
            whole = min(nbytes, whole)
            return whole + (nbytes - whole) // tensor

        costs.append(
            LayerCost(
                "stage",
                *(
                    sum(getattr(x, name) for x in own)
                    for name in ("forward_s", "input_grad_s", "weight_grad_s")
                ),
                backward_s=sum(x.fused_backward_s for x in own),
                residual_bytes=share(residual_bytes(stage) + input_bytes(stage)),
                weight_residual_bytes=share(kept_bytes(stage)),
                output_bytes=own[-1].output_bytes,
            )
        )
    extra = (("stages_of", list(loss.plan.partition.sizes)),)
    count = loss.plan.num_microbatches
    return Profile("dry run", tuple(costs), layers.machine, loss.plan.num_ranks, count, extra)


def _memory(step: TrainStep, timeline: Timeline) -> tuple[DeviceMemory, ...]:
    loss, plan, places = step.loss, step.update_plan, step.places
    staged = loss.staged
    sizes, holders = unit_bytes(staged), loss.lowered.step.holders
    rows = []
    for rank in loss.mesh.ranks:
        units = [u for u, ranks in enumerate(holders) if rank.index in ranks and sizes[u]]

        def on_device(unit: int, nbytes: int, mesh: Mesh = rank.mesh) -> int:
            return bytes_per_device(loss.unit_specs[unit], nbytes, mesh)

        def shared(unit: int, mesh: Mesh = rank.mesh) -> int:
            """Returns what is stored next to a parameter that is gathered for the step."""
            stored = loss.param_specs.stored[unit]
            if stored == loss.unit_specs[unit]:
                return 0
            return bytes_per_device(stored, sizes[unit], mesh)

        optimizer = 0
        for k in plan.states_on(rank.index):
            aval, where = piece_aval(plan, k), places.of_state(plan, k, rank.index)
            local = aval.shape if where is None else where.shard_shape(aval.shape)
            optimizer += compat.num_bytes(jax.ShapeDtypeStruct(local, aval.dtype))
        rows.append(
            DeviceMemory(
                rank.index,
                sum(
                    len(loss.plan.partition.layers(stage))
                    for stage, ranks in enumerate(loss.plan.placement.stages)
                    if rank.index in ranks
                ),
                sum(on_device(u, sizes[u]) + shared(u) for u in units),
                sum(
                    on_device(u, _accumulator_bytes(staged.unit_avals[u]))
                    for u in units
                    if compat.is_float(staged.unit_avals[u])
                ),
                optimizer,
                round(timeline.ranks[rank.index].peak_bytes),
            )
        )
    return tuple(rows)


def _accumulator_bytes(aval: Any) -> int:
    dtype = accumulator_dtype(aval.dtype)
    return compat.num_bytes(jax.ShapeDtypeStruct(aval.shape, dtype))
