"""What layers cost on a rank of several devices, from what they cost on one.

Within a layer (Shoeybi et al., "Megatron-LM" (2019), section 3): matrices are divided over the
tensor axis, so that operations, weights and inner activations are; the residual stream is whole on
each device. Every mixer, MLP and head ends in one all-reduce in F, of its output, and one in I, of
its input's gradient, and W has none; an embedding has none in I. Experts lie on the same axis, and
their tokens travel there and back in an all-to-all each. With `sequence` (Korthikanti et al.,
"Reducing Activation Recomputation" (2022), section 4.2.2) the residual stream is divided over the
axis, too: an all-reduce becomes a gather before and a scatter behind of the same bytes, and W
gathers its input again. An embedding only scatters in F, a head only gathers in F and scatters
in I.

At the end of the step (Rajbhandari et al., "ZeRO" (2020), section 5): gradients are reduced over
the data axis, by each rank when its own last action has ended, beside the drain of the others.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from octojax.errors import ProfileError
from octojax.ir.collectives import Group
from octojax.ir.profile import EXPERTS_PER_TOKEN, LayerCost, Machine, Profile
from octojax.simulate.step_ends import data_axis_s

STREAMS = 2
"""Arrays of a layer's output size that each device keeps whole: its input, and that normalized."""
ZERO = (0, 1, 3)


@dataclass(frozen=True, order=True)
class MeshSizes:
    """Devices as pipeline x data x tensor, samples of a microbatch on each data shard, and what
    is divided over data: `zero` 0 nothing, 1 the optimizer state, 3 stored parameters, too.
    `sequence`: the residual stream is divided over the tensor axis."""

    pipeline: int
    tensor: int = 1
    data: int = 1
    samples: int = 1
    zero: int = 0
    sequence: bool = False

    def __post_init__(self) -> None:
        numbers = (self.pipeline, self.tensor, self.data, self.samples)
        if min(numbers) < 1 or self.zero not in ZERO:
            raise ValueError(f"{self}: expected numbers >= 1, and zero one of 0, 1, 3")

    @property
    def devices(self) -> int:
        return self.pipeline * self.tensor * self.data

    @property
    def rank_devices(self) -> int:
        return self.tensor * self.data


@dataclass(frozen=True)
class Base:
    """What a profile was made for: samples in its microbatch, and devices on its tensor axis.

    A collective carries no more than `exchange_bytes`, where layers pass on more: a stream that is
    float32 between layers of bfloat16, say.
    """

    samples: float
    tensor: int
    experts_per_token: float
    gradient_ratio: float
    exchange_bytes: float = math.inf

    @classmethod
    def of(cls, profile: Profile) -> "Base":
        """Reads `microbatch_size`, `tensor_parallel`, `experts_per_token`, `gradient_ratio` (bytes
        of gradients per byte of weights) and `exchange_bytes` (of a microbatch) from the profile,
        by default 1, 1, 2, 1 and no limit.

        Raises `ProfileError` for values that are no positive numbers.
        """
        extra: dict[str, Any] = dict(profile.extra)
        defaults = {
            "microbatch_size": 1,
            "tensor_parallel": 1,
            "experts_per_token": EXPERTS_PER_TOKEN,
            "gradient_ratio": 1.0,
            "exchange_bytes": math.inf,
        }
        values = [extra.get(name, default) for name, default in defaults.items()]
        wrong = [
            f"{name} = {value!r}"
            for name, value in zip(defaults, values, strict=True)
            if not (isinstance(value, int | float) and value > 0)
            or (not math.isfinite(value) and name != "exchange_bytes")
        ]
        if wrong:
            raise ProfileError(
                f"profile {profile.name!r}: {', '.join(wrong)}, expected numbers > 0"
            )
        samples, tensor, *rest = values
        return cls(float(samples), int(tensor), *map(float, rest))


def on_mesh(profile: Profile, sizes: MeshSizes) -> Profile:
    """Returns the profile of ranks that are `tensor x data` devices, for `sizes.samples` samples
    a microbatch and data shard; bytes are those of each device.

    Times and activations are taken as proportional to samples, times also to the share of a
    device. The machine's `ranks_per_node` counts devices in the profile given, ranks in the one
    returned. Of a profile that was made for several devices on the tensor axis nobody knows what
    of its times are collectives: it is good for that axis alone.

    Raises `ProfileError` for another tensor axis than such a profile's, and for a machine whose
    ranks differ.
    """
    machine, base = profile.machine, Base.of(profile)
    if base.tensor not in (1, sizes.tensor):
        raise ProfileError(
            f"profile {profile.name!r} was made for tensor_parallel = {base.tensor}, and its times "
            f"say nothing of {sizes.tensor} devices there. Profile the model on one device"
        )
    if sizes.data > 1 and machine.replicas > 1:
        raise ProfileError(
            f"profile {profile.name!r}: its machine has {machine.replicas} replicas, and sizes "
            f"have a data axis of {sizes.data}. Leave replicas out to choose sizes"
        )
    if machine.speeds or machine.capacities_bytes:
        raise ProfileError(
            f"profile {profile.name!r}: its machine has speeds or capacities by rank, which say "
            f"nothing of ranks of other sizes. Leave them out to choose sizes"
        )
    sent = [layer.output_bytes for layer in profile.layers]
    layers = tuple(
        _layer(layer, incoming, base, sizes, machine)
        for layer, incoming in zip(profile.layers, (sent[0], *sent), strict=False)
    )
    extra = {**dict(profile.extra), "microbatch_size": sizes.samples}
    extra |= {"tensor_parallel": sizes.tensor}
    return replace(
        profile,
        layers=layers,
        machine=_machine(machine, base, sizes),
        ranks=sizes.pipeline,
        microbatches=None,
        extra=tuple(extra.items()),
    )


def _layer(
    layer: LayerCost, incoming_bytes: int, base: Base, sizes: MeshSizes, machine: Machine
) -> LayerCost:
    samples, share = sizes.samples / base.samples, base.tensor / sizes.tensor
    group = (base, sizes.tensor, machine)
    sent, incoming = (
        samples * min(x, base.exchange_bytes) for x in (layer.output_bytes, incoming_bytes)
    )
    if sizes.sequence:
        forward, backward, weight = divided_stream_s(layer, *group, sent, incoming)
    else:
        forward = exchange_s(layer, *group, sent)
        backward, weight = exchange_s(layer, *group, incoming, backward=True), 0.0
    stream = share if sizes.sequence else 1.0

    def time_s(seconds: float, exchange: float) -> float:
        return seconds * samples * share + exchange

    def kept(nbytes: int) -> int:
        whole = min(nbytes, STREAMS * layer.output_bytes)
        return round(samples * (whole * stream + (nbytes - whole) * share))

    params = layer.param_bytes * share
    return replace(
        layer,
        forward_s=time_s(layer.forward_s, forward),
        input_grad_s=time_s(layer.input_grad_s, backward),
        weight_grad_s=time_s(layer.weight_grad_s, weight),
        backward_s=None
        if layer.backward_s is None
        else time_s(layer.backward_s, backward + weight),
        param_bytes=round(params),
        state_bytes=round(_state_bytes(layer, base, sizes)),
        residual_bytes=kept(layer.residual_bytes),
        weight_residual_bytes=kept(layer.weight_residual_bytes),
        output_bytes=round(layer.output_bytes * samples * stream),
    )


def exchange_s(
    layer: LayerCost,
    base: Base,
    tensor: int,
    machine: Machine,
    nbytes: float,
    backward: bool = False,
) -> float:
    """Returns how long the collectives inside a layer's F (or I: `backward`) take over `tensor`
    devices for `nbytes` of its output (of its input's gradient); 0 where the profile's times have
    them already."""
    if tensor == base.tensor or not layer.param_bytes:
        return 0.0
    group = group_of(machine, base, tensor, 1)
    seconds = 0.0
    for part in layer.kind.lower().split("+"):
        if part == "loss" or (backward and part == "embedding"):
            continue
        if "moe" in part or "expert" in part:
            tokens = nbytes * base.experts_per_token / tensor
            seconds += 2 * group.all_to_all_s(tokens) + group.all_gather_s(nbytes)
        else:
            seconds += group.all_reduce_s(nbytes)
    return seconds


def divided_stream_s(
    layer: LayerCost, base: Base, tensor: int, machine: Machine, sent: float, incoming: float
) -> tuple[float, float, float]:
    """Returns how long the collectives of F, I and W take where the residual stream is divided
    over `tensor` devices; `sent` and `incoming` are bytes of a layer's whole output and input."""
    if tensor == base.tensor or not layer.param_bytes:
        return 0.0, 0.0, 0.0
    group = group_of(machine, base, tensor, 1)
    scatter, gather = group.reduce_scatter_s(sent), group.all_gather_s(incoming)
    parts = [part for part in layer.kind.lower().split("+") if part != "loss"]
    if parts == ["embedding"]:
        return scatter, 0.0, group.all_gather_s(sent)
    if parts == ["head"]:
        return gather, group.reduce_scatter_s(incoming), 0.0
    forward = exchange_s(layer, base, tensor, machine, sent)
    backward = exchange_s(layer, base, tensor, machine, incoming, backward=True)
    return forward, backward, len(parts) * gather


def group_of(machine: Machine, base: Base, size: int, stride: int) -> Group:
    """Returns the group of `size` devices that are `stride` apart, on the slowest link between
    them: that between nodes where the group does not fit into one."""
    near = machine.bandwidth_bytes_per_s
    per_node = math.inf if machine.ranks_per_node is None else machine.ranks_per_node * base.tensor
    if size * stride <= per_node:
        return Group(size, machine.latency_s, near)
    latency, far = machine.inter_latency_s, machine.inter_bandwidth_bytes_per_s
    return Group(
        size, machine.latency_s if latency is None else latency, near if far is None else far
    )


def _state_bytes(layer: LayerCost, base: Base, sizes: MeshSizes) -> float:
    """Weights, gradients and optimizer state on each device."""
    share = base.tensor / sizes.tensor
    params = min(layer.param_bytes, layer.state_bytes) * share
    rest = layer.state_bytes * share - params
    gradients = min(rest, params * base.gradient_ratio)
    optimizer = rest - gradients
    if sizes.zero:
        optimizer /= sizes.data
    stored = params / sizes.data if sizes.zero == 3 and sizes.data > 1 else 0.0
    return params + gradients + optimizer + stored


def _machine(machine: Machine, base: Base, sizes: MeshSizes) -> Machine:
    if machine.ranks_per_node is None:
        return machine
    devices = machine.ranks_per_node * base.tensor
    return replace(machine, ranks_per_node=max(1, devices // sizes.rank_devices))


@dataclass(frozen=True)
class StepEnds:
    """What the data axis adds to a step: `before_s[r]` gathers parameters before rank r's first
    action, `after_s[r]` reduces gradients (and gathers new parameters) after its last."""

    before_s: tuple[float, ...]
    after_s: tuple[float, ...]

    def step_s(self, first_s: Sequence[float], last_s: Sequence[float]) -> float:
        """Returns how long the step takes whose ranks begin and end their actions then.

        A gather that a rank has ready when its first input comes costs nothing, and neither does
        a reduction that ends before the last rank's.
        """
        late = max(max(0.0, g - begin) for g, begin in zip(self.before_s, first_s, strict=True))
        return late + max(end + r for end, r in zip(last_s, self.after_s, strict=True))


def step_ends(
    profile: Profile, sizes: MeshSizes, layers_of_rank: Sequence[Sequence[int]]
) -> StepEnds:
    """Returns what the data axis adds; `profile` is the one that `on_mesh` was given."""
    base = Base.of(profile)
    data = group_of(profile.machine, base, sizes.data, sizes.tensor)
    share = base.tensor / sizes.tensor
    before, after = [], []
    for own in layers_of_rank:
        params = sum(profile.layers[at].param_bytes for at in own) * share
        gradients = params * base.gradient_ratio
        gather, reduce = data_axis_s(data, params, gradients, sizes.zero)
        before.append(gather)
        after.append(reduce)
    return StepEnds(tuple(before), tuple(after))
