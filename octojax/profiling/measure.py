"""A profile of a model, measured on a device: what each layer's F, I, W and B really take."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax
import optax

from octojax import compat
from octojax.frontends import PureLoss
from octojax.ir import LayerCost, Machine, Partition, Profile
from octojax.layers import LayeredLoss, StagedLoss, cut_stages, find_layers
from octojax.profiling.links import measure_link
from octojax.profiling.runs import Prepared, Programs, Values, prepare, programs_of, run_once
from octojax.profiling.state import state_bytes
from octojax.profiling.timing import median_times
from octojax.stages.differentiate import differentiate
from octojax.stages.fingerprint import fingerprint
from octojax.stages.program import Program, Ref, Role, Stage
from octojax.stages.sizes import input_bytes, kept_bytes, residual_bytes
from octojax.trace import trace_loss


def measure(
    loss: PureLoss,
    batch: Any,
    *,
    optimizer: optax.GradientTransformation | None = None,
    devices: Sequence[jax.Device] | None = None,
    min_layers: int = 1,
    rounds: int = 5,
    target_s: float = 0.01,
    machine: Machine | None = None,
    transport: str = "device_put",
    name: str = "measured",
    ranks: int | None = None,
    microbatches: int | None = None,
) -> Profile:
    """Returns the measured profile of `loss` for `batch`, one microbatch.

    Every layer becomes a stage of its own, with the programs that the executor runs; equal
    layers are measured once. Inputs are those of a real forward pass where `batch` and the
    parameters are arrays; gradients are small random numbers. Times are medians of warm runs
    on `devices[0]`, bytes are read off the programs and the optimizer's real state. Links are
    measured from `devices[0]` to `devices[1]` unless a `machine` is given or there is only one.
    """
    at_hand = list(jax.devices() if devices is None else devices)
    layered = find_layers(trace_loss(loss.fn, loss.params, _shapes(batch), loss.state), min_layers)
    costs = measure_layers(layered, loss, batch, at_hand[0], optimizer, rounds, target_s)
    found = machine or measure_machine(at_hand, transport)
    extra = (
        ("costs", f"measured, median of {rounds} rounds on {at_hand[0].device_kind}"),
        ("names", [layer.name for layer in layered.graph.layers]),
    )
    return Profile(name, costs, found, ranks, microbatches, extra)


def measure_layers(
    layered: LayeredLoss,
    loss: PureLoss,
    batch: Any,
    device: jax.Device,
    optimizer: optax.GradientTransformation | None = None,
    rounds: int = 5,
    target_s: float = 0.01,
) -> tuple[LayerCost, ...]:
    """Returns the cost of each layer, in order; see `measure`."""
    staged = cut_stages(layered, Partition((1,) * layered.graph.num_layers))
    stages = differentiate(staged.forwards, _trainable(staged))
    owned = state_bytes(staged, stages, optimizer)
    values = Values(staged, loss.params, loss.state, batch, device)
    groups = [tuple(map(fingerprint, programs_of(stage).values())) for stage in stages]
    jobs = _prepare(stages, groups, values)
    times = median_times({key: job.job() for key, job in jobs.items()}, rounds, target_s)
    layers = layered.graph.layers
    return tuple(
        LayerCost(
            kind=layer.kind,
            forward_s=times[group, "F"],
            input_grad_s=times[group, "I"],
            weight_grad_s=times.get((group, "W"), 0.0),
            backward_s=times[group, "B"],
            param_bytes=layer.param_bytes,
            state_bytes=state,
            residual_bytes=residual_bytes(stage) + input_bytes(stage),
            weight_residual_bytes=kept_bytes(stage) + _inputs_of_weight_grad(stage),
            output_bytes=layer.output_bytes,
        )
        for layer, stage, group, state in zip(layers, stages, groups, owned, strict=True)
    )


def measure_machine(devices: Sequence[jax.Device], transport: str = "device_put") -> Machine:
    """Returns the machine that `devices` form: capacity as they report it, links as measured.

    Each device is a rank. With a single device there is no link to measure: transfers are free.
    """
    first = devices[0]
    stats = first.memory_stats() or {}
    machine = Machine(name=f"{len(devices)} x {first.device_kind} ({first.platform}), measured")
    if "bytes_limit" in stats:
        machine = replace(machine, capacity_bytes=float(stats["bytes_limit"]))
    if len(devices) < 2:
        return machine
    link = measure_link(first, devices[1], transport=transport)
    return replace(
        machine,
        latency_s=link.latency_s,
        bandwidth_bytes_per_s=link.bandwidth_bytes_per_s,
        host_cost_s=link.host_cost_s,
    )


def _trainable(staged: StagedLoss) -> frozenset[int]:
    num = len(staged.traced.params)
    return frozenset(
        u
        for u, unit in enumerate(staged.units)
        if unit.leaf < num and compat.is_float(staged.unit_avals[u])
    )


def _prepare(
    stages: Sequence[Stage], groups: Sequence[Any], values: Values
) -> dict[tuple[Any, str], Prepared]:
    """Runs all forwards once, in order; the first layer of each group is kept for timing."""
    compiled = Programs()
    jobs: dict[tuple[Any, str], Prepared] = {}
    sent: dict[Ref, Any] = {}
    for stage, group in zip(stages, groups, strict=True):
        known = {Ref(Role.INPUT, ref.index): x for ref, x in sent.items()}
        forward = prepare(stage.forward, values, known, compiled)
        written = run_once(forward)
        sent = {ref: x for ref, x in written.items() if ref.role is Role.OUTPUT}
        if (group, "F") in jobs:
            continue
        jobs[group, "F"] = forward
        known.update(written)
        for kind, program in programs_of(stage).items():
            if kind == "F":
                continue
            jobs[group, kind] = prepare(program, values, known, compiled)
            if kind == "I":
                known.update(run_once(jobs[group, kind]))
    return jobs


def _inputs_of_weight_grad(stage: Stage) -> int:
    program: Program | None = stage.weight_grad
    if program is None:
        return 0
    return sum(
        compat.num_bytes(aval)
        for ref, aval in zip(program.reads, program.jaxpr.in_avals, strict=True)
        if ref.role is Role.INPUT
    )


def _shapes(batch: Any) -> Any:
    return jax.tree.map(
        lambda x: (
            jax.ShapeDtypeStruct(jax.numpy.shape(x), jax.numpy.asarray(x).dtype)
            if not isinstance(x, jax.ShapeDtypeStruct)
            else x
        ),
        batch,
    )
