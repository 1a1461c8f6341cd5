"""Layers (or a plan's stages) as stages to be timed, and the record of what each costs."""

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


def timed_stages(
    layered: LayeredLoss, partition: Partition | None = None
) -> tuple[StagedLoss, tuple[Stage, ...]]:
    """Returns every layer (or the stages of `partition`) with the programs an executor runs."""
    staged = cut_stages(layered, partition or Partition((1,) * layered.graph.num_layers))
    num = len(staged.traced.params)
    trainable = frozenset(
        u
        for u, unit in enumerate(staged.units)
        if unit.leaf < num and compat.is_float(staged.unit_avals[u])
    )
    return staged, differentiate(staged.forwards, trainable)


def programs_of(stage: Stage) -> dict[str, Program]:
    """Returns the stage's programs by the kind of action that runs them."""
    functions = {"F": stage.forward, "B": stage.backward, "I": stage.input_grad}
    return functions if stage.weight_grad is None else {**functions, "W": stage.weight_grad}


def layer_costs(
    staged: StagedLoss,
    stages: Sequence[Stage],
    seconds: Sequence[Mapping[str, float]],
    optimizer: optax.GradientTransformation | None,
) -> tuple[LayerCost, ...]:
    """Returns the cost of each stage: `seconds[i]` are its times by kind of action, bytes are
    those of its programs and of the optimizer's state."""
    owned = state_bytes(staged, stages, optimizer)
    layers = staged.graph.layers
    members = [[layers[at] for at in staged.partition.layers(s)] for s in range(len(stages))]
    return tuple(
        LayerCost(
            kind=own[0].kind if len(own) == 1 else "stage",
            forward_s=times["F"],
            input_grad_s=times["I"],
            weight_grad_s=times.get("W", 0.0),
            backward_s=times["B"],
            param_bytes=sum(layer.param_bytes for layer in own),
            state_bytes=state,
            residual_bytes=residual_bytes(stage) + input_bytes(stage),
            weight_residual_bytes=kept_bytes(stage) + _inputs_of_weight_grad(stage),
            output_bytes=own[-1].output_bytes,
        )
        for own, stage, times, state in zip(members, stages, seconds, owned, strict=True)
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


def names_of(staged: StagedLoss) -> list[str]:
    """Returns what each timed stage is called: its layer, or its first and last one."""
    layers, parts = staged.graph.layers, range(staged.partition.num_stages)
    ends = [staged.partition.layers(s) for s in parts]
    return [
        layers[own[0]].name if len(own) == 1 else f"{layers[own[0]].name} .. {layers[own[-1]].name}"
        for own in ends
    ]


def stages_of(partition: Partition | None) -> tuple[tuple[str, list[int]], ...]:
    """Returns what a profile of whole stages says of itself (`Profile.of_partition`)."""
    return () if partition is None else (("stages_of", list(partition.sizes)),)
