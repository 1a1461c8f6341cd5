"""A profile of a model, measured on a device: what each layer's F, I, W and B really take."""

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import jax
import optax

from octojax.compat import Device
from octojax.frontends import PureLoss
from octojax.ir import LayerCost, Machine, Partition, Profile
from octojax.layers import LayeredLoss, find_layers
from octojax.profiling.layers import (
    layer_costs,
    names_of,
    programs_of,
    shapes_of,
    stages_of,
    timed_stages,
)
from octojax.profiling.links import measure_link
from octojax.profiling.runs import Prepared, Programs, Values, prepare, run_once
from octojax.profiling.timing import median_times
from octojax.rows.whole import separated
from octojax.stages.fingerprint import fingerprint
from octojax.stages.program import Ref, Role, Stage
from octojax.trace import trace_loss

KINDS_IN_TURN = "FIWB"
"""All layers' F take their turns first, then all I, ..."""


def measure(
    loss: PureLoss,
    batch: Any,
    *,
    optimizer: optax.GradientTransformation | None = None,
    devices: Sequence[Device] | None = None,
    min_layers: int = 1,
    rounds: int = 5,
    target_s: float = 0.01,
    machine: Machine | None = None,
    transport: str = "device_put",
    name: str = "measured",
    ranks: int | None = None,
    microbatches: int | None = None,
    partition: Partition | None = None,
) -> Profile:
    """Returns the measured profile of `loss` for `batch`, one microbatch.

    Every layer becomes a stage of its own, with the programs that the executor runs; equal
    layers are measured once. Inputs are those of a real forward pass where `batch` and the
    parameters are arrays; gradients are small random numbers. Times are medians of warm runs
    on `devices[0]`, bytes are read off the programs and the optimizer's real state. Links are
    measured from `devices[0]` to `devices[1]` unless a `machine` is given or there is only one.

    With a `partition` its stages take the place of the layers: the profile has one "layer" per
    stage and says so, and simulates plans of this partition alone. A stage is not quite the sum
    of its layers, so this predicts their steps more closely.

    Raises `CutError` for a partition of another number of layers.
    """
    at_hand = list(jax.devices() if devices is None else devices)
    layered = find_layers(
        separated(trace_loss(loss.fn, loss.params, shapes_of(batch), loss.state)), min_layers
    )
    timer = LayerTimer(layered, loss, batch, at_hand[0], optimizer, partition)
    costs = timer.costs(rounds, target_s)
    described = machine or measure_machine(at_hand, transport)
    extra = (
        ("costs", f"measured, median of {rounds} rounds on {at_hand[0].device_kind}"),
        ("names", timer.names),
        *stages_of(partition),
    )
    return Profile(name, costs, described, ranks, microbatches, extra)


def measure_layers(
    layered: LayeredLoss,
    loss: PureLoss,
    batch: Any,
    device: Device,
    optimizer: optax.GradientTransformation | None = None,
    rounds: int = 5,
    target_s: float = 0.01,
) -> tuple[LayerCost, ...]:
    """Returns the cost of each layer, in order; see `measure`."""
    return LayerTimer(layered, loss, batch, device, optimizer).costs(rounds, target_s)


class LayerTimer:
    """The layers of a loss (or the stages of a partition) with all their programs compiled, to be
    timed as often as wanted."""

    def __init__(
        self,
        layered: LayeredLoss,
        loss: PureLoss,
        batch: Any,
        device: Device,
        optimizer: optax.GradientTransformation | None = None,
        partition: Partition | None = None,
    ) -> None:
        self.optimizer = optimizer
        self.staged, self.stages = timed_stages(layered, partition)
        self.names = names_of(self.staged)
        values = Values(self.staged, loss.params, loss.state, batch, device)
        self.groups = [tuple(map(fingerprint, programs_of(s).values())) for s in self.stages]
        prepared = _prepare(self.stages, self.groups, values)
        # In a step W comes long after the I that kept its values: measured right after it, it would
        # find them in the cache, and a split backward would look cheaper than a whole one.
        in_turn = sorted(prepared, key=lambda key: KINDS_IN_TURN.index(key[1]))
        self.jobs = {key: prepared[key].job() for key in in_turn}

    def costs(
        self,
        rounds: int = 5,
        target_s: float = 0.01,
        clock: Callable[[], float] = time.perf_counter,
    ) -> tuple[LayerCost, ...]:
        """Returns the cost of each layer, in order; see `measure` and `median_times`."""
        times = median_times(self.jobs, rounds, target_s, clock=clock)
        by_layer = [
            {kind: times[group, kind] for kind in programs_of(stage)}
            for stage, group in zip(self.stages, self.groups, strict=True)
        ]
        return layer_costs(self.staged, self.stages, by_layer, self.optimizer)


def measure_machine(devices: Sequence[Device], transport: str = "device_put") -> Machine:
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
