"""What a plan was made for, and what its maker expects of it."""

import math
from dataclasses import dataclass
from typing import Any

from octojax.errors import FormatError
from octojax.ir.profile import Profile

_PARTS = ("model", "layer costs", "machine")


@dataclass(frozen=True)
class Prediction:
    """The profile that a plan was made for, and the simulated seconds of its step under it.

    `profile` is that profile's name, `fingerprint` its `Profile.fingerprint`; `lower_bound_s`
    is below every plan's step under it (docs/lower_bound.md), None where nobody computed it.
    """

    profile: str
    fingerprint: str
    makespan_s: float
    lower_bound_s: float | None = None

    def differences(self, profile: Profile) -> tuple[str, ...]:
        """Returns what is not that of `profile`: some of model, layer costs and machine.

        Another model has other costs too; a profile of a plan's whole stages cannot be compared.
        """
        if profile.of_partition is not None:
            return ()
        here, there = self.fingerprint.split("."), profile.fingerprint.split(".")
        return tuple(part for part, a, b in zip(_PARTS, here, there, strict=True) if a != b)

    def to_json(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.__dataclass_fields__}

    @classmethod
    def from_json(cls, data: Any, name: str = "plan") -> "Prediction":
        """Returns the prediction in a plan's parsed JSON. Raises `FormatError` naming fields."""
        form = (
            f"{name}: 'prediction' must be an object of 'profile' (text), 'fingerprint' (three "
            f"words joined by points), 'makespan_s' and, if known, 'lower_bound_s' (numbers >= 0)"
        )
        if not isinstance(data, dict) or not data.keys() <= cls.__dataclass_fields__.keys():
            raise FormatError(form)
        words = [data.get("profile"), data.get("fingerprint")]
        bound = data.get("lower_bound_s")
        times = [data.get("makespan_s"), *([] if bound is None else [bound])]
        if not (
            all(isinstance(word, str) for word in words)
            and data["fingerprint"].count(".") == len(_PARTS) - 1
            and all(type(t) in (int, float) and 0 <= t < math.inf for t in times)
        ):
            raise FormatError(form)
        return cls(**data)
