"""The machine that a profile's ranks are on: speeds, memory, links, and what ends a step."""

import math
import numbers
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from octojax.errors import ProfileError
from octojax.ir.collectives import Group


def short_text(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:50]}... ({len(text)} characters)"


def _is_number(value: Any) -> bool:
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def is_whole(value: Any) -> bool:
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


def is_finite(value: Any) -> bool:
    try:
        return _is_number(value) and math.isfinite(value)
    except OverflowError:  # a whole number too large for a float
        return False


def _is_amount(value: Any) -> bool:
    return is_finite(value) and value >= 0


def _is_size(value: Any) -> bool:
    return _is_number(value) and value > 0 and (value == math.inf or is_finite(value))


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
     _per_rank(lambda value: is_finite(value) and value > 0)),
    ("capacities_bytes", "numbers > 0, one per rank", _per_rank(_is_size)),
    ("ranks_per_node", "a whole number >= 1",
     _or_none(lambda value: is_whole(value) and value >= 1)),
    ("inter_latency_s", _AMOUNT, _or_none(_is_amount)),
    ("inter_bandwidth_bytes_per_s", _SIZE, _or_none(_is_size)),
    ("blocking", "true or false", lambda value: isinstance(value, bool)),
    ("overlap_discount", "a number >= 0 and < 1",
     lambda value: _is_amount(value) and value < 1),
    ("replicas", "a whole number >= 1", lambda value: is_whole(value) and value >= 1),
    ("zero", "0, 1 or 3", lambda value: is_whole(value) and value in (0, 1, 3)),
    ("expert_parallel", "true or false", lambda value: isinstance(value, bool)),
    ("update_bytes_per_s", _SIZE, _is_size),
)  # fmt: skip
"""Field, what it must be in words, and whether a value is that."""


@dataclass(frozen=True)
class Machine:
    """Ranks and links. A transfer takes `latency_s + bytes / bandwidth_bytes_per_s`.

    `host_cost_s` is what each transfer costs on each of its two ranks.
    `speeds[r]` divides rank r's compute times; `capacities_bytes[r]` overrides the capacity.
    With `ranks_per_node` set, links between nodes take the `inter_*` figures. `blocking`: a
    transfer occupies both its ranks, which compute nothing meanwhile (rendezvous).

    What follows is off by default. `overlap_discount`: an overlapped pair takes less than its two
    parts, by this share of the shorter one. `replicas` pipelines train on other data beside this
    one (the data axis), each rank on a link between nodes where there are nodes: gradients are
    reduced over them when a rank has ended, and with `zero` 3 its parameters gathered before it
    begins (1: the optimizer's state is divided, and new parameters gathered at the end).
    `expert_parallel`: experts are spread over the replicas, so that their tokens travel there and
    back. An update goes through a rank's state at `update_bytes_per_s`.
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
    overlap_discount: float = 0.0
    replicas: int = 1
    zero: int = 0
    expert_parallel: bool = False
    update_bytes_per_s: float = math.inf

    def __post_init__(self) -> None:
        wrong = [
            f"{name} = {short_text(value)}, expected {form}"
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

    @property
    def has_step_ends(self) -> bool:
        """Whether ranks are busy before their first action, or after their last."""
        return self.replicas > 1 or self.update_bytes_per_s < math.inf

    def to_json(self) -> dict[str, Any]:
        """Returns the fields that say something."""
        return {
            k: list(map(plain, v)) if isinstance(v, tuple) else plain(v)
            for k, v in asdict(self).items()
            if not (v is None or v is False or (isinstance(v, tuple) and not v) or v == math.inf)
            and not (k in _LATER and v == _LATER[k])
        }

    @property
    def fingerprint_fields(self) -> dict[str, Any]:
        """What tells this machine's times from another's: no names and no capacities, and the
        options that came later only where they are used."""
        fields = {k: v for k, v in asdict(self).items() if "capacit" not in k}
        if not self.blocking:
            del fields["blocking"]  # as before there was a choice
        kept = {k: v for k, v in fields.items() if not (k in _LATER and v == _LATER[k])}
        return {**kept, "name": ""}

    def between_replicas(self) -> Group:
        """Returns the group of a rank's replicas."""
        near = self.ranks_per_node is None
        latency = None if near else self.inter_latency_s
        bandwidth = None if near else self.inter_bandwidth_bytes_per_s
        return Group(
            self.replicas,
            self.latency_s if latency is None else latency,
            self.bandwidth_bytes_per_s if bandwidth is None else bandwidth,
        )


_LATER = {
    "overlap_discount": 0.0,
    "replicas": 1,
    "zero": 0,
    "expert_parallel": False,
    "update_bytes_per_s": math.inf,
}
"""Options with the values that leave everything as it is."""


def plain(value: Any) -> Any:
    """Returns NumPy's numbers as Python's, which JSON can write."""
    return value.item() if hasattr(value, "item") else value
