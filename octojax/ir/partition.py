"""How many consecutive layers form each stage."""

from collections.abc import Sequence
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


FIRST_KINDS = ("embed", "input")
LAST_KINDS = ("head", "loss", "output")
"""Kinds of layers that belong to the ends, by a part of their name."""


def uniform_partition(kinds: Sequence[str], num_stages: int) -> Partition:
    """Returns inner layers split evenly by count, embedding with the first, head with the last.

    `kinds` are those of the layers, in their order. The convention of Megatron-LM and of the
    paper's baselines. Where the inner layers do not divide evenly, earlier stages get one more
    (30 equal layers on 4 stages: 8 8 7 7), since a heavy last stage delays the first backward.
    Where too few would be left inside, all layers are split evenly.

    Raises:
        PlanError: there are fewer layers than stages.
    """
    count = len(kinds)
    if count < num_stages:
        raise PlanError(
            f"{count} layers cannot form {num_stages} stages; use at most {count} stages"
        )
    first = int(any(word in kinds[0].lower() for word in FIRST_KINDS))
    last = int(any(word in kinds[-1].lower() for word in LAST_KINDS))
    if count - first - last < num_stages:
        first = last = 0
    each, more = divmod(count - first - last, num_stages)
    sizes = [each + (s < more) for s in range(num_stages)]
    sizes[0] += first
    sizes[-1] += last
    return Partition(tuple(sizes))
