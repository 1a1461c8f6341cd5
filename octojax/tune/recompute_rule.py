"""Which stages rebuild their residuals in the backward: left to the search, or asked for."""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

FORMS = "auto (the search decides), all, none, or stages such as 0-3,7"
MOST_STAGES = 1 << 16
"""A stage number beyond is a mistake."""


@dataclass(frozen=True)
class RecomputeRule:
    """`mode` is `auto`, `all`, `none`, or `stages`: then exactly the stages in `stages` recompute.

    A recomputed stage keeps its input alone from F on, and its backward takes a forward longer
    (`docs/simulator.md`).
    """

    mode: str = "auto"
    stages: frozenset[int] = frozenset()

    @classmethod
    def of(cls, value: "RecomputeRule | str | Iterable[int]") -> "RecomputeRule":
        """Returns the rule that text (`FORMS`) or numbers of stages ask for.

        Raises `ValueError` for anything else.
        """
        if isinstance(value, RecomputeRule):
            return value
        if isinstance(value, str):
            word = value.strip().lower()
            if word in ("auto", "all", "none"):
                return cls(word)
            numbers = _numbers(word)
        else:
            numbers = list(value)
        wrong = [n for n in numbers if not isinstance(n, int) or isinstance(n, bool) or n < 0]
        if wrong or not numbers:
            raise ValueError(f"recompute = {value!r}: expected {FORMS}")
        return cls("stages", frozenset(numbers))

    @property
    def forced(self) -> bool:
        return self.mode != "auto"

    def flags(self, stages: int, default: tuple[bool, ...] = ()) -> tuple[bool, ...]:
        """Returns what `Plan.recompute` takes for so many stages; `default` where it is free."""
        if not self.forced:
            return default
        flags = tuple(self.mode == "all" or s in self.stages for s in range(stages))
        return flags if any(flags) else ()

    def array(self, most: int) -> np.ndarray:
        """Returns the flags of up to `most` stages for compiled functions; empty where free."""
        if not self.forced:
            return np.zeros(0, np.bool_)
        return np.array([self.mode == "all" or s in self.stages for s in range(most)], np.bool_)

    def check(self, layers: int) -> None:
        """Raises `ValueError` for stages that no plan of so many layers has."""
        beyond = sorted(s for s in self.stages if s >= layers)
        if beyond:
            raise ValueError(
                f"recompute = {self}: a plan of {layers} layers has at most stages 0 to "
                f"{layers - 1}, so there is no stage {', '.join(map(str, beyond))}"
            )

    def __str__(self) -> str:
        if self.mode != "stages":
            return self.mode
        runs: list[list[int]] = []
        for stage in sorted(self.stages):
            if runs and stage == runs[-1][-1] + 1:
                runs[-1].append(stage)
            else:
                runs.append([stage])
        return ",".join(f"{r[0]}-{r[-1]}" if len(r) > 1 else f"{r[0]}" for r in runs)


def _numbers(text: str) -> list[int]:
    """Returns the numbers in text such as `0-3,7`; none where it has another form."""
    numbers: list[int] = []
    for word in text.split(","):
        first, dash, last = (part.strip() for part in word.partition("-"))
        if not first.isdigit() or (dash and not last.isdigit()):
            return []
        low, high = int(first), int(last) if dash else int(first)
        if high < low or high > MOST_STAGES:
            return []
        numbers += range(low, high + 1)
    return numbers
