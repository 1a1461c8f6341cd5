"""Layers as stages of their own, and the record of what each costs."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import optax

from octojax import compat
from octojax.ir import LayerCost, Partition
from octojax.layers import LayeredLoss, StagedLoss, cut_stages
from octojax.profiling.state import state_bytes
from octojax.stages.differentiate import differentiate
from octojax.stages.program import Program, Role, Stage
from octojax.stages.sizes import input_bytes, kept_bytes, residual_bytes


def one_layer_stages(layered: LayeredLoss) -> tuple[StagedLoss, tuple[Stage, ...]]:
    """Returns every layer as a stage of its own, with the programs that an executor runs."""
    staged = cut_stages(layered, Partition((1,) * layered.graph.num_layers))
    num = len(staged.traced.params)
    trainable = frozenset(
        u
        for u, unit in enumerate(staged.units)
        if unit.leaf < num and compat.is_float(staged.unit_avals[u])
    )
    return staged, differentiate(staged.forwards, trainable)


def programs_of(stage: Stage) -> dict[str, Program]:
    """Returns the stage's programs by the kind of action that runs them."""
    found = {"F": stage.forward, "B": stage.backward, "I": stage.input_grad}
    return found if stage.weight_grad is None else {**found, "W": stage.weight_grad}


def layer_costs(
    staged: StagedLoss,
    stages: Sequence[Stage],
    seconds: Sequence[Mapping[str, float]],
    optimizer: optax.GradientTransformation | None,
) -> tuple[LayerCost, ...]:
    """Returns the cost of each layer: `seconds[i]` are its times by kind of action, bytes are
    those of its programs and of the optimizer's state."""
    owned = state_bytes(staged, stages, optimizer)
    return tuple(
        LayerCost(
            kind=layer.kind,
            forward_s=times["F"],
            input_grad_s=times["I"],
            weight_grad_s=times.get("W", 0.0),
            backward_s=times["B"],
            param_bytes=layer.param_bytes,
            state_bytes=state,
            residual_bytes=residual_bytes(stage) + input_bytes(stage),
            weight_residual_bytes=kept_bytes(stage) + _inputs_of_weight_grad(stage),
            output_bytes=layer.output_bytes,
        )
        for layer, stage, times, state in zip(
            staged.graph.layers, stages, seconds, owned, strict=True
        )
    )


def shapes_of(batch: Any) -> Any:
    """Returns the batch with every array replaced by its shape."""
    return jax.tree.map(
        lambda x: (
            x
            if isinstance(x, jax.ShapeDtypeStruct)
            else jax.ShapeDtypeStruct(jax.numpy.shape(x), jax.numpy.asarray(x).dtype)
        ),
        batch,
    )


def _inputs_of_weight_grad(stage: Stage) -> int:
    program = stage.weight_grad
    if program is None:
        return 0
    return sum(
        compat.num_bytes(aval)
        for ref, aval in zip(program.reads, program.jaxpr.in_avals, strict=True)
        if ref.role is Role.INPUT
    )
