"""The question a tuner answers, as flat arrays: layers, ranks, links, memory, microbatches."""

import math
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from octojax.errors import CapacityError, ProfileError
from octojax.ir.profile import Profile
from octojax.partitioners.cut import balanced_sizes
from octojax.tune.recompute_rule import RecomputeRule


@dataclass(frozen=True)
class Problem:
    """A profile on so many ranks with so many microbatches; times in seconds, sizes in bytes.

    Build it with `Problem.of`, which validates. Arrays over layers have length `num_layers`,
    `latency_s[r, q]` and `s_per_byte[r, q]` describe the link from rank r to rank q. `recompute`
    is what plans and baselines have to recompute.
    """

    profile: Profile
    ranks: int
    microbatches: int
    capacities_bytes: tuple[float, ...]
    recompute: RecomputeRule = field(default_factory=RecomputeRule)

    @classmethod
    def of(
        cls,
        profile: Profile,
        ranks: int | None = None,
        microbatches: int | None = None,
        capacity_bytes: float | None = None,
        recompute: RecomputeRule | None = None,
    ) -> "Problem":
        """Returns the problem; what is not given comes from the profile.

        Raises `ValueError` for sizes that make no sense, `ProfileError` for layers without
        cost and `CapacityError` when one layer's state alone exceeds every rank.
        """
        ranks = _size("ranks", profile.ranks if ranks is None else ranks, profile)
        microbatches = _size(
            "microbatches", profile.microbatches if microbatches is None else microbatches, profile
        )
        _check_layers(profile, ranks)
        machine = profile.machine
        for name, values in (
            ("speeds", machine.speeds),
            ("capacities_bytes", machine.capacities_bytes),
        ):
            if values and len(values) < ranks:
                raise ProfileError(
                    f"profile {profile.name!r}: machine.{name} has {len(values)} entries for "
                    f"{ranks} ranks; give one per rank, or none"
                )
        if capacity_bytes is not None and not capacity_bytes > 0:
            raise ValueError(f"capacity_bytes = {capacity_bytes}, expected more than 0")
        capacities = tuple(
            float(machine.capacity(r) if capacity_bytes is None else capacity_bytes)
            for r in range(ranks)
        )
        _check_state(profile, capacities)
        rule = RecomputeRule() if recompute is None else recompute
        rule.check(profile.num_layers)
        return cls(profile, ranks, microbatches, capacities, rule)

    @property
    def num_layers(self) -> int:
        return self.profile.num_layers

    def balanced_sizes(self, stages: int) -> tuple[int, ...]:
        """Returns layers per stage such that the slowest stage is as quick as can be."""
        return balanced_sizes(tuple(self.compute_s.tolist()), stages)

    @property
    def host_cost_s(self) -> float:
        return float(self.profile.machine.host_cost_s)

    def _column(self, name: str) -> np.ndarray:
        return np.array([float(getattr(x, name)) for x in self.profile.priced_layers])

    @cached_property
    def forward_s(self) -> np.ndarray:
        return self._column("forward_s")

    @cached_property
    def input_grad_s(self) -> np.ndarray:
        return self._column("input_grad_s")

    @cached_property
    def weight_grad_s(self) -> np.ndarray:
        return self._column("weight_grad_s")

    @cached_property
    def backward_s(self) -> np.ndarray:
        return self._column("fused_backward_s")

    @cached_property
    def again_s(self) -> np.ndarray:
        """Forward time that a layer is sure to take once more, where all is recomputed."""
        every = self.recompute.mode == "all"
        return self.forward_s if every else np.zeros(self.num_layers)

    @cached_property
    def compute_s(self) -> np.ndarray:
        """Least work of a layer on one microbatch: forward, and backward split or fused, with the
        forward once more where all is recomputed.
        """
        split = self.input_grad_s + self.weight_grad_s
        return self.forward_s + np.minimum(split, self.backward_s) + self.again_s

    @cached_property
    def residual_bytes(self) -> np.ndarray:
        return self._column("residual_bytes")

    @cached_property
    def weight_residual_bytes(self) -> np.ndarray:
        return self._column("weight_residual_bytes")

    @cached_property
    def state_bytes(self) -> np.ndarray:
        return self._column("state_bytes")

    @cached_property
    def output_bytes(self) -> np.ndarray:
        return self._column("output_bytes")

    @cached_property
    def speeds(self) -> np.ndarray:
        return np.array([self.profile.machine.speed(r) for r in range(self.ranks)], float)

    @cached_property
    def capacity_bytes(self) -> np.ndarray:
        return np.array(self.capacities_bytes)

    @cached_property
    def latency_s(self) -> np.ndarray:
        return self._links(lambda latency, bandwidth: latency)

    @cached_property
    def s_per_byte(self) -> np.ndarray:
        return self._links(lambda latency, bandwidth: 1.0 / bandwidth)

    def _links(self, pick) -> np.ndarray:
        link, ranks = self.profile.machine.link, range(self.ranks)
        return np.array([[0.0 if r == q else pick(*link(r, q)) for q in ranks] for r in ranks])


def _size(name: str, value: int | None, profile: Profile) -> int:
    if value is None:
        raise ValueError(
            f"profile {profile.name!r} does not say how many {name}; pass {name}=... (--{name})"
        )
    if not isinstance(value, (int, np.integer)) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{name} = {value!r}, expected a whole number of at least 1")
    return int(value)


def _check_layers(profile: Profile, ranks: int) -> None:
    if profile.num_layers < ranks:
        raise ValueError(
            f"profile {profile.name!r} has {profile.num_layers} layers for {ranks} ranks: every "
            f"rank needs at least one. Use at most {profile.num_layers} ranks, or cut layers finer"
        )
    idle = [i for i, x in enumerate(profile.layers) if x.forward_s <= 0 or x.compute_s <= 0]
    if idle:
        raise ProfileError(
            f"profile {profile.name!r}: layers {idle} have forward_s = 0; a layer that costs "
            f"nothing cannot be placed. Measure it, or join it to its neighbour"
        )


def _check_state(profile: Profile, capacities: tuple[float, ...]) -> None:
    largest = max(capacities)
    over = [(x.state_bytes, i, x.kind) for i, x in enumerate(profile.layers)]
    size, layer, kind = max(over)
    if size > largest and not math.isinf(largest):
        raise CapacityError(
            f"layer {layer} ({kind}) has {size / 2**30:.3f} GiB of state (weights, gradients, "
            f"optimizer), more than the {largest / 2**30:.3f} GiB of the largest rank: "
            f"{(size - largest) / 2**30:.3f} GiB lacking. Use ranks of more devices (tensor "
            f"parallelism), shard the optimizer state, or cut the layer finer"
        )
