"""What each layer costs, and the machine it runs on."""

import json
import math
import numbers
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from octojax.errors import FormatError, ProfileError

VERSION = 1


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
        for name, value in asdict(self).items():
            if name == "kind" or value is None:
                continue
            if not _is_number(value) or not math.isfinite(value) or value < 0:
                raise ProfileError(
                    f"layer of kind {self.kind!r}: {name} = {value!r}, "
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
class Machine:
    """Ranks and links. A transfer takes `latency_s + bytes / bandwidth_bytes_per_s`.

    `host_cost_s` is what each transfer costs on each of its two ranks.
    `speeds[r]` divides rank r's compute times; `capacities_bytes[r]` overrides the capacity.
    With `ranks_per_node` set, links between nodes take the `inter_*` figures.
    """

    name: str = "unnamed"
    capacity_bytes: float = math.inf
    latency_s: float = 0.0
    bandwidth_bytes_per_s: float = math.inf
    host_cost_s: float = 0.0
    speeds: tuple[float, ...] = ()
    capacities_bytes: tuple[float, ...] = ()
    ranks_per_node: int | None = None
    inter_latency_s: float | None = None
    inter_bandwidth_bytes_per_s: float | None = None

    def __post_init__(self) -> None:
        numbers = (
            "capacity_bytes", "latency_s", "bandwidth_bytes_per_s", "host_cost_s",
            "ranks_per_node", "inter_latency_s", "inter_bandwidth_bytes_per_s",
        )  # fmt: skip
        given = {
            name: (getattr(self, name),) for name in numbers if getattr(self, name) is not None
        }
        given |= {name: getattr(self, name) for name in ("speeds", "capacities_bytes")}
        for name, values in given.items():
            if not isinstance(values, tuple) or not all(_is_number(v) for v in values):
                raise ProfileError(
                    f"machine {self.name!r}: {name} = {getattr(self, name)!r} is not a number"
                    f"{' per rank' if name in ('speeds', 'capacities_bytes') else ''}"
                )
        for name in ("inter_latency_s", "inter_bandwidth_bytes_per_s", "ranks_per_node"):
            value = getattr(self, name)
            if value is not None and not (value >= 0 if name == "inter_latency_s" else value > 0):
                raise ProfileError(f"machine {self.name!r}: {name} = {value} is too small")
        for name in ("latency_s", "host_cost_s"):
            if not getattr(self, name) >= 0:
                raise ProfileError(f"machine {self.name!r}: {name} = {getattr(self, name)}, < 0")
        for name in ("bandwidth_bytes_per_s", "capacity_bytes"):
            if not getattr(self, name) > 0:
                raise ProfileError(f"machine {self.name!r}: {name} must be > 0")
        if any(not s > 0 for s in self.speeds):
            raise ProfileError(f"machine {self.name!r}: speeds must be > 0, found {self.speeds}")

    def speed(self, rank: int) -> float:
        return self.speeds[rank] if self.speeds else 1.0

    def capacity(self, rank: int) -> float:
        return self.capacities_bytes[rank] if self.capacities_bytes else self.capacity_bytes

    def link(self, source: int, target: int) -> tuple[float, float]:
        """The `(latency_s, bandwidth_bytes_per_s)` of the link from rank to rank."""
        far = (
            self.ranks_per_node is not None
            and source // self.ranks_per_node != target // self.ranks_per_node
        )
        latency, bandwidth = self.latency_s, self.bandwidth_bytes_per_s
        if far:
            latency = latency if self.inter_latency_s is None else self.inter_latency_s
            inter = self.inter_bandwidth_bytes_per_s
            bandwidth = bandwidth if inter is None else inter
        return latency, bandwidth


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
        if not self.layers:
            raise ProfileError(f"profile {self.name!r} has no layers")

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    def on(self, machine: Machine) -> "Profile":
        return replace(self, machine=machine)

    def to_json(self) -> dict[str, Any]:
        machine = {
            k: list(v) if isinstance(v, tuple) else v
            for k, v in asdict(self.machine).items()
            if v is not None and v != () and v != math.inf
        }
        layers = [
            {k: v for k, v in asdict(layer).items() if v is not None} for layer in self.layers
        ]
        sizes = {"ranks": self.ranks, "microbatches": self.microbatches}
        return {
            "version": VERSION,
            "name": self.name,
            **dict(self.extra),
            **{k: v for k, v in sizes.items() if v is not None},
            "machine": machine,
            "layers": layers,
        }

    @classmethod
    def from_json(cls, data: Any, name: str = "profile") -> "Profile":
        """Returns the profile in parsed JSON; a file without `version` is version 1."""
        if not isinstance(data, dict):
            raise FormatError(f"{name}: a profile is a JSON object, found {type(data).__name__}")
        if data.get("version", VERSION) != VERSION:
            raise FormatError(
                f"{name}: profile version {data['version']!r}, this octojax reads {VERSION}"
            )
        if not isinstance(data.get("layers"), list):
            raise FormatError(f"{name}: profile lacks its list of 'layers'")
        layers = tuple(_layer(x, f"{name}: layer {i}") for i, x in enumerate(data["layers"]))
        machine = _machine(data.get("machine", {}), f"{name}: machine")
        known = {"version", "name", "layers", "machine", "ranks", "microbatches"}
        return cls(
            name=data.get("name", name),
            layers=layers,
            machine=machine,
            ranks=data.get("ranks"),
            microbatches=data.get("microbatches"),
            extra=tuple((k, v) for k, v in data.items() if k not in known),
        )

    def save(self, path: str | Path) -> None:
        Path(path).write_text(json.dumps(self.to_json(), indent=1) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: str | Path) -> "Profile":
        text = Path(path).read_text(encoding="utf-8")
        try:
            return cls.from_json(json.loads(text), str(path))
        except json.JSONDecodeError as error:
            raise FormatError(f"{path}: not JSON: {error}") from None


def _is_number(value: Any) -> bool:
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


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
    return Machine(**fields)
