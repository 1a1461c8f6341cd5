"""Parameters, gradients and optimizer state spread over the data axis (ZeRO, Rajbhandari et al.
2020, section 5).

    zero=0   all whole on every data shard; gradients are all-reduced once per step
    zero=1   moments spread, gradients reduce-scattered once per step, new parameters gathered
    zero=3   parameters stored spread, too, and gathered once per step and rank
"""

import math
from collections.abc import Collection, Sequence
from typing import Any

from jax.sharding import Mesh, PartitionSpec

from octojax.executor.specs import ParamSpecs
from octojax.mesh import DATA_AXIS, axes_of

LEVELS = (0, 1, 3)


def param_specs(
    zero: int,
    specs: Sequence[PartitionSpec],
    avals: Sequence[Any],
    mesh: Mesh,
    whole: Collection[int] = (),
) -> ParamSpecs:
    """Returns how the parameter units of `specs` lie at a level of ZeRO on a rank's `mesh`.

    The gradients and moments of the units in `whole`, which the optimizer mixes, are not spread.
    """
    plain = tuple(specs)
    if not zero or mesh.shape.get(DATA_AXIS, 1) == 1:
        return ParamSpecs(plain, plain, plain)
    spread = tuple(
        over_data(spec, aval.shape, mesh) for spec, aval in zip(specs, avals, strict=True)
    )
    gradients = tuple(plain[u] if u in whole else spec for u, spec in enumerate(spread))
    return ParamSpecs(plain, spread if zero == 3 else plain, gradients)


def over_data(spec: PartitionSpec, shape: Sequence[int], mesh: Mesh) -> PartitionSpec:
    """Returns `spec` with the data axis at the first dimension without axes that it divides, else
    behind the axes of the first that it divides so; `spec` itself where there is none."""
    size = mesh.shape[DATA_AXIS]
    entries = [*map(axes_of, spec), *[()] * (len(shape) - len(spec))]
    for free in (True, False):
        for at, (axes, length) in enumerate(zip(entries, shape, strict=True)):
            parts = math.prod(mesh.shape[name] for name in axes)
            if bool(axes) != free and length % (parts * size) == 0 and length:
                new = [*entries[:at], (*axes, DATA_AXIS), *entries[at + 1 :]]
                return PartitionSpec(*(x[0] if len(x) == 1 else x or None for x in new))
    return spec
