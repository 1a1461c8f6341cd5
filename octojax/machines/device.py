"""What one device computes, for the cost model."""

from dataclasses import dataclass, fields


@dataclass(frozen=True)
class Device:
    """One rank's device: peak rates, and the share of them that each kind of work reaches.

    `efficiency` is that of contractions with weights; `attention_efficiency` and
    `recurrence_efficiency` those of contractions of activations in attention and in recurrences
    (Mamba, delta rule), None being the former; `bandwidth_efficiency` that of memory.
    `float32_flops_per_s` is the rate for float32 where it differs. `launch_s` is paid once per
    program, `optimizer_slots` arrays per weight are kept besides the weight and its gradient.
    """

    flops_per_s: float
    bandwidth_bytes_per_s: float
    efficiency: float = 0.5
    launch_s: float = 0.0
    optimizer_slots: int = 2
    attention_efficiency: float | None = None
    recurrence_efficiency: float | None = None
    bandwidth_efficiency: float = 1.0
    float32_flops_per_s: float | None = None

    def __post_init__(self) -> None:
        wrong = [
            f"{field.name} = {value!r}, expected {'>= 0' if field.name in _AMOUNTS else '> 0'}"
            for field in fields(self)
            if not _allowed(field.name, value := getattr(self, field.name))
        ]
        if wrong:
            raise ValueError(f"device: {'; '.join(wrong)}")

    def time_s(
        self, flops: float, nbytes: float, inner: float = 0.0, recurrent: bool = False
    ) -> float:
        """Returns how long `flops` operations of contractions with weights take, together with
        `inner` ones of attention or, if `recurrent`, of a recurrence; or the bytes, if longer."""
        other = self.recurrence_efficiency if recurrent else self.attention_efficiency
        compute_s = flops / (self.flops_per_s * self.efficiency)
        compute_s += inner / (self.flops_per_s * (self.efficiency if other is None else other))
        return max(compute_s, nbytes / (self.bandwidth_bytes_per_s * self.bandwidth_efficiency))


_AMOUNTS = ("launch_s", "optimizer_slots")
_OPTIONAL = ("attention_efficiency", "recurrence_efficiency", "float32_flops_per_s")


def _allowed(name: str, value: object) -> bool:
    if value is None:
        return name in _OPTIONAL
    if not isinstance(value, int | float) or isinstance(value, bool):
        return False
    return value >= 0 if name in _AMOUNTS else value > 0
