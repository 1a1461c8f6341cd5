"""A profile of a model by the cost model, for a machine that need not be at hand."""

from typing import Any

import optax

from octojax.costs import Device, seconds
from octojax.frontends import PureLoss
from octojax.ir import Machine, Profile
from octojax.layers import find_layers
from octojax.profiling.layers import layer_costs, one_layer_stages, programs_of, shapes_of
from octojax.trace import trace_loss


def estimate(
    loss: PureLoss,
    batch: Any,
    machine: Machine,
    device: Device,
    *,
    optimizer: optax.GradientTransformation | None = None,
    min_layers: int = 1,
    name: str = "estimated",
    ranks: int | None = None,
    microbatches: int | None = None,
) -> Profile:
    """Returns the profile of `loss` for `batch` (arrays or shapes), one microbatch.

    Times are rooflines of the real F, I, W and B programs of each layer, see
    `octojax.costs`; bytes are read off the programs and the optimizer's state, as
    in `measure`. Nothing is compiled or run.
    """
    layered = find_layers(
        trace_loss(loss.fn, loss.params, shapes_of(batch), loss.state), min_layers
    )
    staged, stages = one_layer_stages(layered)
    times = [
        {kind: seconds(program.jaxpr, device) for kind, program in programs_of(stage).items()}
        for stage in stages
    ]
    extra = (
        (
            "costs",
            f"roofline at {device.flops_per_s:.4g} operations/s, "
            f"{device.memory_bytes_per_s:.4g} bytes/s",
        ),
        ("names", [layer.name for layer in layered.graph.layers]),
    )
    costs = layer_costs(staged, stages, times, optimizer)
    return Profile(name, costs, machine, ranks, microbatches, extra)
