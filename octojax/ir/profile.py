"""What each layer costs, and the machine it runs on."""

import hashlib
import json
from collections import Counter
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from octojax.errors import FormatError, ProfileError
from octojax.ir.files import other_version, read_json
from octojax.ir.machine import Machine, is_finite, is_whole, plain, short_text
from octojax.ir.shown import count, duration, line, picture, short

VERSION = 1
EXPERTS_PER_TOKEN = 2.0
"""Where a profile does not say `experts_per_token`."""


@dataclass(frozen=True)
class LayerCost:
    """Costs of one layer for one microbatch on one rank.

    `residual_bytes` are kept from F until I or B, `weight_residual_bytes` from I until W;
    `output_bytes` cross a stage boundary after this layer. `state_bytes` are weights,
    gradients and optimizer state. `backward_s` is the fused B; None means I + W.
    """

    kind: str
    forward_s: float
    input_grad_s: float
    weight_grad_s: float
    param_bytes: int = 0
    state_bytes: int = 0
    residual_bytes: int = 0
    weight_residual_bytes: int = 0
    output_bytes: int = 0
    backward_s: float | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.kind, str):
            raise ProfileError(f"a layer's kind is text, found {self.kind!r}")
        for name, value in asdict(self).items():
            if name == "kind" or (name == "backward_s" and value is None):
                continue
            if not is_finite(value) or value < 0:
                raise ProfileError(
                    f"layer of kind {self.kind!r}: {name} = {short_text(value)}, "
                    f"expected a finite number >= 0"
                )

    @property
    def fused_backward_s(self) -> float:
        return (
            self.input_grad_s + self.weight_grad_s if self.backward_s is None else self.backward_s
        )

    @property
    def compute_s(self) -> float:
        """Forward and split backward of one microbatch."""
        return self.forward_s + self.input_grad_s + self.weight_grad_s


@dataclass(frozen=True)
class Profile:
    """Costs of every layer of a model for one microbatch, the machine, and the run's size."""

    name: str
    layers: tuple[LayerCost, ...]
    machine: Machine = field(default_factory=Machine)
    ranks: int | None = None
    microbatches: int | None = None
    extra: tuple[tuple[str, Any], ...] = ()  # what else the file says (pattern, sequence, ...)

    def __post_init__(self) -> None:
        if not isinstance(self.name, str):
            raise ProfileError(f"a profile's name is text, found {self.name!r}")
        if not self.layers:
            raise ProfileError(f"profile {self.name!r} has no layers")
        for what in ("ranks", "microbatches"):
            value = getattr(self, what)
            if value is not None and not (is_whole(value) and value >= 1):
                raise ProfileError(
                    f"profile {self.name!r}: {what} = {value!r}, expected a whole number >= 1"
                )
        sizes = dict(self.extra).get("stages_of")
        if sizes is not None and not (
            isinstance(sizes, list | tuple)
            and len(sizes) == len(self.layers)
            and all(is_whole(size) and size >= 1 for size in sizes)
        ):
            raise ProfileError(
                f"profile {self.name!r}: stages_of = {short_text(sizes)}, expected the number of "
                f"layers of each of its {len(self.layers)} stages, whole numbers >= 1"
            )

    def __repr__(self) -> str:
        kinds = ", ".join(f"{n} {kind}" for kind, n in Counter(self.kinds).most_common())
        return line("Profile", self.name, (
            f"{count(self.num_layers, 'layer')} ({short(kinds)})",
            f"{duration(sum(x.compute_s for x in self.layers))} a microbatch",
            "" if self.ranks is None else count(self.ranks, "rank"),
            f"machine {short(self.machine.name)!r}",
        ))  # fmt: skip

    def _repr_html_(self) -> str | None:
        return picture(self)

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kind of every layer, in their order."""
        return tuple(layer.kind for layer in self.layers)

    @property
    def of_partition(self) -> tuple[int, ...] | None:
        """The sizes of the stages that the "layers" are, in a profile of a plan's whole stages."""
        sizes = dict(self.extra).get("stages_of")
        return None if sizes is None else tuple(sizes)

    @cached_property
    def fingerprint(self) -> str:
        """Digests of the model (kinds and parameters of its layers), of what the layers cost, and
        of the machine's speeds and links, joined by points. Names and capacities do not count.
        """
        layers = [{**asdict(x), "backward_s": x.fused_backward_s} for x in self.layers]
        model = [(x.kind, x.param_bytes) for x in self.layers]
        return ".".join(map(_digest, (model, layers, self.machine.fingerprint_fields)))

    @property
    def experts_per_token(self) -> float:
        """How many experts a token visits: the profile's `experts_per_token`, or 2."""
        return float(dict(self.extra).get("experts_per_token", EXPERTS_PER_TOKEN))

    @cached_property
    def priced_layers(self) -> tuple[LayerCost, ...]:
        """The layers with what the machine's options add: where its experts are spread over
        replicas, an all-to-all there and another back in F and I of every layer with experts."""
        machine = self.machine
        if not machine.expert_parallel or machine.replicas == 1:
            return self.layers
        group = machine.between_replicas()

        def spread(layer: LayerCost) -> LayerCost:
            parts = sum("moe" in x or "expert" in x for x in layer.kind.lower().split("+"))
            added = 2 * parts * group.all_to_all_s(layer.output_bytes * self.experts_per_token)
            return replace(
                layer,
                forward_s=layer.forward_s + added,
                input_grad_s=layer.input_grad_s + added,
                backward_s=None if layer.backward_s is None else layer.backward_s + added,
            )

        return tuple(map(spread, self.layers))

    def on(self, machine: Machine) -> "Profile":
        return replace(self, machine=machine)

    def to_json(self) -> dict[str, Any]:
        layers = [
            {k: plain(v) for k, v in asdict(layer).items() if v is not None}
            for layer in self.layers
        ]
        sizes = {"ranks": self.ranks, "microbatches": self.microbatches}
        return {
            "version": VERSION,
            "name": self.name,
            **dict(self.extra),
            **{k: plain(v) for k, v in sizes.items() if v is not None},
            "machine": self.machine.to_json(),
            "layers": layers,
        }

    @classmethod
    def from_json(cls, data: Any, name: str = "profile") -> "Profile":
        """Returns the profile in parsed JSON; a file without `version` is version 1."""
        if not isinstance(data, dict):
            raise FormatError(f"{name}: a profile is a JSON object, found {type(data).__name__}")
        if data.get("version", VERSION) != VERSION:
            raise FormatError(other_version(name, "profile", data["version"], VERSION))
        if not isinstance(data.get("layers"), list):
            raise FormatError(f"{name}: profile lacks its list of 'layers'")
        layers = tuple(_layer(x, f"{name}: layer {i}") for i, x in enumerate(data["layers"]))
        machine = _machine(data.get("machine", {}), f"{name}: machine")
        known = {"version", "name", "layers", "machine", "ranks", "microbatches"}
        try:
            return cls(
                name=data.get("name", name),
                layers=layers,
                machine=machine,
                ranks=data.get("ranks"),
                microbatches=data.get("microbatches"),
                extra=tuple((k, v) for k, v in data.items() if k not in known),
            )
        except ProfileError as error:
            raise ProfileError(f"{name}: {error}") from None

    def save(self, path: str | Path) -> None:
        Path(path).write_text(json.dumps(self.to_json(), indent=1) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: str | Path) -> "Profile":
        return cls.from_json(read_json(path), str(path))


def _digest(value: Any) -> str:
    text = json.loads(json.dumps(value, default=plain), parse_int=float)  # 1 is 1.0
    return hashlib.sha256(json.dumps(text, sort_keys=True).encode()).hexdigest()[:8]


_NEEDED = ("kind", "forward_s", "input_grad_s", "weight_grad_s")


def _layer(data: Any, where: str) -> LayerCost:
    if not isinstance(data, dict):
        raise FormatError(f"{where}: expected an object, found {type(data).__name__}")
    missing = [k for k in _NEEDED if k not in data]
    unknown = [k for k in data if k not in LayerCost.__dataclass_fields__]
    if missing or unknown:
        raise FormatError(
            f"{where}: missing {missing or 'nothing'}, unknown {unknown or 'nothing'}; "
            f"fields are {', '.join(LayerCost.__dataclass_fields__)}"
        )
    try:
        return LayerCost(**data)
    except ProfileError as error:
        raise ProfileError(f"{where}: {error}") from None


def _machine(data: Any, where: str) -> Machine:
    if not isinstance(data, dict):
        raise FormatError(f"{where}: expected an object, found {type(data).__name__}")
    unknown = [k for k in data if k not in Machine.__dataclass_fields__]
    if unknown:
        raise FormatError(
            f"{where}: unknown {unknown}; fields are {', '.join(Machine.__dataclass_fields__)}"
        )
    fields: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in data.items()}
    try:
        return Machine(**fields)
    except ProfileError as error:
        raise ProfileError(f"{where}: {error}") from None
