"""What the partitioners see of a model: a chain of layers with seconds and bytes per microbatch."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from octojax.errors import ProfileError
from octojax.ir.profile import Profile

Array = np.ndarray[Any, np.dtype[np.float64]]


@dataclass(frozen=True)
class Chain:
    """Costs of the layers of a model for one microbatch, as plain numbers.

    `border_s[i]` is the time of one transfer across the border after layer i; `state_bytes`
    stay for the whole step, `residual_bytes` from F to the end of the backward.
    """

    forward_s: tuple[float, ...]
    backward_s: tuple[float, ...]
    border_s: tuple[float, ...]
    state_bytes: tuple[float, ...]
    residual_bytes: tuple[float, ...]
    kinds: tuple[str, ...]
    capacity_bytes: float = math.inf

    @classmethod
    def of(cls, costs: "Profile | Sequence[float] | Chain") -> "Chain":
        """Returns the chain of a profile, or of total seconds per layer (a third is forward).

        Raises `ProfileError` for no layers, or costs that are not finite numbers >= 0.
        """
        if isinstance(costs, Chain):
            return costs
        if isinstance(costs, Profile):
            return _of_profile(costs)
        try:
            total = [float(cost) for cost in costs]
        except (TypeError, ValueError):
            raise ProfileError(
                f"expected a Profile or seconds per layer, found {costs!r:.80}"
            ) from None
        bad = [i for i, cost in enumerate(total) if not (math.isfinite(cost) and cost >= 0)]
        if bad or not total:
            raise ProfileError(
                f"layer costs must be finite numbers >= 0, at least one; "
                f"found {[total[i] for i in bad[:5]]} at layers {bad[:5]} of {len(total)}"
            )
        none = (0.0,) * len(total)
        return cls(
            tuple(t / 3 for t in total),
            tuple(t - t / 3 for t in total),
            none,
            none,
            none,
            ("layer",) * len(total),
        )

    @property
    def num_layers(self) -> int:
        return len(self.forward_s)

    @property
    def total_s(self) -> Array:
        return np.array(self.forward_s) + np.array(self.backward_s)

    def compute_s(self) -> Array:
        """Returns `(n+1, n+1)`: seconds of a stage of layers i to j-1, infinite for j <= i."""
        return spans(self.total_s)


def spans(per_layer: Sequence[float] | Array) -> Array:
    """Returns `(n+1, n+1)`: the sum of layers i to j-1, infinite for j <= i (no empty stage)."""
    sums = np.concatenate([[0.0], np.cumsum(np.asarray(per_layer, dtype=np.float64))])
    table = sums[None, :] - sums[:, None]
    table[np.tril_indices(len(sums))] = math.inf
    return table


def _of_profile(profile: Profile) -> Chain:
    latency, bandwidth = profile.machine.link(0, 1)
    layers = profile.layers
    return Chain(
        tuple(layer.forward_s for layer in layers),
        tuple(layer.fused_backward_s for layer in layers),
        tuple(latency + layer.output_bytes / bandwidth for layer in layers),
        tuple(float(layer.state_bytes) for layer in layers),
        tuple(float(layer.residual_bytes) for layer in layers),
        tuple(layer.kind for layer in layers),
        profile.machine.capacity(0),
    )
