"""Profiles of presets on described machines: from shapes alone, for ranks of several devices."""

import math
from dataclasses import replace

import jax
import jax.numpy as jnp

from octojax.costs import blocks_of, estimate
from octojax.errors import CutError
from octojax.frontends import adapt
from octojax.ir import Profile
from octojax.layers import find_layers
from octojax.machines import Device, Hardware
from octojax.profiling.presets import Preset, pattern_of
from octojax.rows.whole import separated
from octojax.trace import trace_loss
from octojax.tune.mesh_costs import MeshSizes, on_mesh

GRADIENT_BYTES = 4  # summed in float32
ADAM_BYTES = 8  # two moments in float32
COPY_BYTES = 4  # a float32 copy of weights that are shorter


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
    parameter: Rajbhandari et al., "ZeRO" (2020), section 3.1, gradients in float32).

    Raises `ValueError` for a machine without a device, and sizes that `tensor` does not divide.
    """
    for name, value in (
        ("sequence", sequence), ("microbatch_size", microbatch_size), ("tensor", tensor)
    ):  # fmt: skip
        if value < 1:
            raise ValueError(f"{name} = {value}, expected a number >= 1")
    if hardware.device is None:
        raise ValueError(
            f"machine {hardware.machine.name!r} says nothing of its devices, which the cost model "
            f"needs: add [device] with flops_per_s and bandwidth_bytes_per_s"
        )
    preset.expect_divisible(tensor)
    device = _at_dtype(hardware.device, preset)
    one = _one_device(preset, hardware, device, sequence, microbatch_size)
    sizes = MeshSizes(
        ranks or 1, tensor, samples=microbatch_size, sequence=sequence_parallel and tensor > 1
    )
    return replace(on_mesh(one, sizes), ranks=ranks, microbatches=microbatches)


def _one_device(
    preset: Preset, hardware: Hardware, device: Device, sequence: int, microbatch_size: int
) -> Profile:
    pure = adapt(preset.make, preset.loss, None)
    batch = {"tokens": jax.ShapeDtypeStruct((microbatch_size, sequence + 1), jnp.int32)}
    traced = separated(trace_loss(pure.fn, pure.params, batch, pure.state))
    layered, kinds = blocks_of(find_layers(traced)), preset.kinds()
    if layered.graph.num_layers != len(kinds):
        raise CutError(
            f"{preset.name}: its trace has {layered.graph.num_layers} layers, its configuration "
            f"{len(kinds)}, embedding and head included: {layered.graph}"
        )
    itemsize = jnp.dtype(preset.config.param_dtype).itemsize
    state = itemsize + GRADIENT_BYTES + ADAM_BYTES + (COPY_BYTES if itemsize < 4 else 0)
    moe = getattr(preset.config, "moe", None)
    extra = {
        "costs": "roofline",
        "pattern": pattern_of(preset.config),
        "hidden": preset.config.width,
        "vocab": preset.config.vocabulary,
        "sequence": sequence,
        "dtype": str(jnp.dtype(preset.config.dtype)),
        "microbatch_size": microbatch_size,
        "gradient_ratio": GRADIENT_BYTES / itemsize,
        "exchange_bytes": microbatch_size
        * sequence
        * preset.config.width
        * jnp.dtype(preset.config.dtype).itemsize,
        **({} if moe is None else {"experts_per_token": moe.chosen}),
    }
    profile = estimate(layered, device, hardware.machine, name=preset.name, kinds=kinds)
    return replace(
        profile,
        layers=tuple(
            replace(layer, state_bytes=math.ceil(layer.param_bytes * state / itemsize))
            for layer in profile.layers
        ),
        extra=tuple(extra.items()),
    )


def _at_dtype(device: Device, preset: Preset) -> Device:
    """The device at its rate for the preset's arithmetic."""
    wide = jnp.dtype(preset.config.dtype).itemsize >= 4 and device.float32_flops_per_s
    return replace(device, flops_per_s=device.float32_flops_per_s) if wide else device
