"""Profiles of presets on described machines: from shapes alone, for ranks of several devices."""

import math
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp

from octojax.costs import blocks_of, estimate
from octojax.errors import CutError
from octojax.frontends import adapt
from octojax.ir import LayerCost, Machine, Profile
from octojax.layers import LayeredLoss, find_layers
from octojax.machines import Device, Hardware
from octojax.profiling.presets import Preset, pattern_of
from octojax.rows.whole import separated
from octojax.trace import trace_loss
from octojax.tune.mesh_costs import MeshSizes, on_mesh

GRADIENT_BYTES = 4  # summed in float32
ADAM_BYTES = 8  # two moments in float32
COPY_BYTES = 4  # a float32 copy of weights that are shorter


@dataclass(frozen=True)
class TracedPreset:
    """The layers of a preset for microbatches of one size, to be priced on many machines.

    `layered` are those of a preset with one layer of each kind, `kinds` their kinds, and
    `places[i]` which of them layer i of the preset is like.
    """

    preset: Preset
    layered: LayeredLoss
    kinds: tuple[str, ...]
    places: tuple[int, ...]
    sequence: int
    microbatch_size: int

    def price(
        self,
        hardware: Hardware,
        *,
        tensor: int = 1,
        sequence_parallel: bool = False,
        ranks: int | None = None,
        microbatches: int | None = None,
    ) -> Profile:
        """Returns what every layer costs on a rank of `tensor` devices. See `preset_profile`."""
        if hardware.device is None:
            raise ValueError(
                f"machine {hardware.machine.name!r} says nothing of its devices, which the cost "
                f"model needs: add [device] with flops_per_s and bandwidth_bytes_per_s"
            )
        if tensor < 1:
            raise ValueError(f"tensor = {tensor}, expected a number >= 1")
        self.preset.expect_divisible(tensor)
        sizes = MeshSizes(
            ranks or 1,
            tensor,
            samples=self.microbatch_size,
            sequence=sequence_parallel and tensor > 1,
        )
        device = _at_dtype(hardware.device, self.preset)
        one = _one_device(self, hardware.machine, replace(device, launch_s=0.0))
        profile = on_mesh(one, sizes)
        layers = tuple(_launched(layer, device.launch_s) for layer in profile.layers)
        return replace(profile, layers=layers, ranks=ranks, microbatches=microbatches)


def trace_preset(preset: Preset, sequence: int = 4096, microbatch_size: int = 1) -> TracedPreset:
    """Returns the layers of a preset, from shapes: one per letter of its pattern, an embedding
    before and the head with the loss behind. Layers alike are traced once.

    Raises `ValueError` for sizes below 1, and `CutError` if the trace has other layers.
    """
    for name, value in (("sequence", sequence), ("microbatch_size", microbatch_size)):
        if value < 1:
            raise ValueError(f"{name} = {value}, expected a number >= 1")
    short, places = preset.shortened()
    pure = adapt(short.make, short.loss, None)
    batch = {"tokens": jax.ShapeDtypeStruct((microbatch_size, sequence + 1), jnp.int32)}
    traced = separated(trace_loss(pure.fn, pure.params, batch, pure.state))
    layered, kinds = blocks_of(find_layers(traced)), short.kinds()
    if layered.graph.num_layers != len(kinds):
        raise CutError(
            f"{preset.name}, {pattern_of(short.config)}: its trace has "
            f"{layered.graph.num_layers} layers, its configuration {len(kinds)}, embedding and "
            f"head included:\n{layered.graph}"
        )
    everywhere = (0, *(1 + at for at in places), len(kinds) - 1)
    return TracedPreset(preset, layered, kinds, everywhere, sequence, microbatch_size)


def preset_profile(
    preset: Preset,
    hardware: Hardware,
    *,
    sequence: int = 4096,
    microbatch_size: int = 1,
    tensor: int = 1,
    sequence_parallel: bool = False,
    ranks: int | None = None,
    microbatches: int | None = None,
) -> Profile:
    """Returns what every layer of a preset costs on a rank of `tensor` devices, by the cost model.

    A microbatch is `microbatch_size` sequences of `sequence` tokens. There is a layer per letter
    of the pattern, an embedding before and the head with the loss behind. Bytes are those of one
    device; its state is weights, float32 gradients and Adam's (for bfloat16 weights 18 bytes a
    parameter: Rajbhandari et al., "ZeRO" (2020), section 3.1, gradients in float32). With
    `sequence_parallel` the tensor axis divides what passes between layers, too.

    Raises `ValueError` for a machine without a device, and sizes that `tensor` does not divide.
    """
    preset.expect_divisible(max(1, tensor))
    return trace_preset(preset, sequence, microbatch_size).price(
        hardware,
        tensor=tensor,
        sequence_parallel=sequence_parallel,
        ranks=ranks,
        microbatches=microbatches,
    )


def _one_device(traced: TracedPreset, machine: Machine, device: Device) -> Profile:
    config = traced.preset.config
    itemsize = jnp.dtype(config.param_dtype).itemsize
    state = itemsize + GRADIENT_BYTES + ADAM_BYTES + (COPY_BYTES if itemsize < 4 else 0)
    moe, pattern = getattr(config, "moe", None), pattern_of(config)
    extra = {
        "costs": "roofline",
        **({} if pattern is None else {"pattern": pattern}),
        "hidden": config.width,
        "vocab": config.vocabulary,
        "sequence": traced.sequence,
        "dtype": str(jnp.dtype(config.dtype)),
        "microbatch_size": traced.microbatch_size,
        "gradient_ratio": GRADIENT_BYTES / itemsize,
        "exchange_bytes": traced.microbatch_size
        * traced.sequence
        * config.width
        * jnp.dtype(config.dtype).itemsize,
        **({} if moe is None else {"experts_per_token": moe.chosen}),
    }
    profile = estimate(traced.layered, device, machine, name=traced.preset.name, kinds=traced.kinds)
    layers = [
        replace(layer, state_bytes=math.ceil(layer.param_bytes * state / itemsize))
        for layer in profile.layers
    ]
    return replace(
        profile,
        layers=tuple(layers[at] for at in traced.places),
        extra=tuple(extra.items()),
    )


def _launched(layer: LayerCost, launch_s: float) -> LayerCost:
    """The layer with what a launch takes, which no axis divides, on everything that takes time."""
    times = ("forward_s", "input_grad_s", "weight_grad_s", "backward_s")
    spent = {name: getattr(layer, name) for name in times}
    return replace(layer, **{name: time_s + launch_s for name, time_s in spent.items() if time_s})


def _at_dtype(device: Device, preset: Preset) -> Device:
    """The device at its rate for the preset's arithmetic."""
    wide = jnp.dtype(preset.config.dtype).itemsize >= 4 and device.float32_flops_per_s
    return replace(device, flops_per_s=device.float32_flops_per_s) if wide else device
