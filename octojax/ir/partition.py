"""How many consecutive layers form each stage."""

from dataclasses import dataclass
from itertools import accumulate

from octojax.errors import FormatError, PlanError


@dataclass(frozen=True)
class Partition:
    """`sizes[s]` is the number of consecutive layers in stage s. Text: `14 14 15 15`."""

    sizes: tuple[int, ...]

    def __post_init__(self) -> None:
        empty = [s for s, size in enumerate(self.sizes) if size < 1]
        if empty or not self.sizes:
            raise PlanError(
                f"partition [{self}] leaves stage {empty or 'list'} empty: "
                f"{sum(self.sizes)} layers cannot form {len(self.sizes)} stages this way. "
                f"Give every stage at least one layer, or use fewer stages"
            )

    def __str__(self) -> str:
        return " ".join(map(str, self.sizes))

    @classmethod
    def parse(cls, text: str) -> "Partition":
        try:
            return cls(tuple(int(word) for word in text.split()))
        except PlanError:
            raise
        except ValueError:
            raise FormatError(
                f"cannot read {text!r} as a partition: expected layers per stage, "
                f"such as '14 14 15 15'"
            ) from None

    @property
    def num_stages(self) -> int:
        return len(self.sizes)

    @property
    def num_layers(self) -> int:
        return sum(self.sizes)

    @property
    def bounds(self) -> tuple[int, ...]:
        """Stage s holds layers `bounds[s]` to `bounds[s + 1] - 1`."""
        return (0, *accumulate(self.sizes))

    def layers(self, stage: int) -> range:
        bounds = self.bounds
        return range(bounds[stage], bounds[stage + 1])
