"""What each layer costs, and the machine it runs on."""

import hashlib
import json
import math
import numbers
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from octojax.errors import FormatError, ProfileError
from octojax.ir.files import other_version, read_json
from octojax.ir.shown import count, duration, line, picture, short

VERSION = 1


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:50]}... ({len(text)} characters)"


def _is_number(value: Any) -> bool:
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def _is_whole(value: Any) -> bool:
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


def _is_finite(value: Any) -> bool:
    try:
        return _is_number(value) and math.isfinite(value)
    except OverflowError:  # a whole number too large for a float
        return False


def _is_amount(value: Any) -> bool:
    return _is_finite(value) and value >= 0


def _is_size(value: Any) -> bool:
    return _is_number(value) and value > 0 and (value == math.inf or _is_finite(value))


def _per_rank(holds: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda values: isinstance(values, tuple) and all(map(holds, values))


def _or_none(holds: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: value is None or holds(value)


_AMOUNT, _SIZE = "a finite number >= 0", "a number > 0"
_MACHINE_FORMS: tuple[tuple[str, str, Callable[[Any], bool]], ...] = (
    ("name", "text", lambda value: isinstance(value, str)),
    ("capacity_bytes", _SIZE, _is_size),
    ("latency_s", _AMOUNT, _is_amount),
    ("bandwidth_bytes_per_s", _SIZE, _is_size),
    ("host_cost_s", _AMOUNT, _is_amount),
    ("speeds", "finite numbers > 0, one per rank",
     _per_rank(lambda value: _is_finite(value) and value > 0)),
    ("capacities_bytes", "numbers > 0, one per rank", _per_rank(_is_size)),
    ("ranks_per_node", "a whole number >= 1",
     _or_none(lambda value: _is_whole(value) and value >= 1)),
    ("inter_latency_s", _AMOUNT, _or_none(_is_amount)),
    ("inter_bandwidth_bytes_per_s", _SIZE, _or_none(_is_size)),
    ("blocking", "true or false", lambda value: isinstance(value, bool)),
)  # fmt: skip
"""Field, what it must be in words, and whether a value is that."""


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
            if not _is_finite(value) or value < 0:
                raise ProfileError(
                    f"layer of kind {self.kind!r}: {name} = {_short(value)}, "
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
    With `ranks_per_node` set, links between nodes take the `inter_*` figures. `blocking`: a
    transfer occupies both its ranks, which compute nothing meanwhile (rendezvous).
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
    blocking: bool = False

    def __post_init__(self) -> None:
        wrong = [
            f"{name} = {_short(value)}, expected {form}"
            for name, form, holds in _MACHINE_FORMS
            if not holds(value := getattr(self, name))
        ]
        if wrong:
            raise ProfileError(f"machine {self.name!r}: {'; '.join(wrong)}")

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
        if not isinstance(self.name, str):
            raise ProfileError(f"a profile's name is text, found {self.name!r}")
        if not self.layers:
            raise ProfileError(f"profile {self.name!r} has no layers")
        for what in ("ranks", "microbatches"):
            value = getattr(self, what)
            if value is not None and not (_is_whole(value) and value >= 1):
                raise ProfileError(
                    f"profile {self.name!r}: {what} = {value!r}, expected a whole number >= 1"
                )
        sizes = dict(self.extra).get("stages_of")
        if sizes is not None and not (
            isinstance(sizes, list | tuple)
            and len(sizes) == len(self.layers)
            and all(_is_whole(size) and size >= 1 for size in sizes)
        ):
            raise ProfileError(
                f"profile {self.name!r}: stages_of = {_short(sizes)}, expected the number of "
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
        machine = {k: v for k, v in asdict(self.machine).items() if "capacit" not in k}
        if not self.machine.blocking:
            del machine["blocking"]  # as before there was a choice
        layers = [{**asdict(x), "backward_s": x.fused_backward_s} for x in self.layers]
        model = [(x.kind, x.param_bytes) for x in self.layers]
        return ".".join(map(_digest, (model, layers, {**machine, "name": ""})))

    def on(self, machine: Machine) -> "Profile":
        return replace(self, machine=machine)

    def to_json(self) -> dict[str, Any]:
        machine = {
            k: list(map(_plain, v)) if isinstance(v, tuple) else _plain(v)
            for k, v in asdict(self.machine).items()
            if not (v is None or v is False or (isinstance(v, tuple) and not v) or v == math.inf)
        }
        layers = [
            {k: _plain(v) for k, v in asdict(layer).items() if v is not None}
            for layer in self.layers
        ]
        sizes = {"ranks": self.ranks, "microbatches": self.microbatches}
        return {
            "version": VERSION,
            "name": self.name,
            **dict(self.extra),
            **{k: _plain(v) for k, v in sizes.items() if v is not None},
            "machine": machine,
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
    text = json.loads(json.dumps(value, default=_plain), parse_int=float)  # 1 is 1.0
    return hashlib.sha256(json.dumps(text, sort_keys=True).encode()).hexdigest()[:8]


def _plain(value: Any) -> Any:
    """Returns NumPy's numbers as Python's, which JSON can write."""
    return value.item() if hasattr(value, "item") else value


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
