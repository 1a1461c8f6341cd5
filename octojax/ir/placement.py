"""Which rank, or which two ranks, hold each stage."""

from dataclasses import dataclass
from functools import cached_property

from octojax.errors import FormatError, PlanError


@dataclass(frozen=True)
class Placement:
    """`stages[s]` are the ranks that hold stage s: one, or two in a bidirectional pipeline.

    Text: one word per stage, two holders joined by `+`: `0 1 1 0`, `0+3 1+2 1+2 0+3`.
    """

    stages: tuple[tuple[int, ...], ...]
    num_ranks: int

    def __post_init__(self) -> None:
        for stage, ranks in enumerate(self.stages):
            outside = [r for r in ranks if not 0 <= r < self.num_ranks]
            if outside:
                raise PlanError(
                    f"stage {stage} is placed on rank {outside[0]}, but there are only "
                    f"{self.num_ranks} ranks (0 to {self.num_ranks - 1})"
                )
            if len(set(ranks)) != len(ranks):
                raise PlanError(f"stage {stage} names a rank twice: {ranks}")

    def __str__(self) -> str:
        return " ".join("+".join(map(str, ranks)) for ranks in self.stages)

    @classmethod
    def parse(cls, text: str, num_ranks: int | None = None) -> "Placement":
        """Returns the placement in `text`; ranks are counted from it unless given."""
        try:
            stages = tuple(tuple(int(r) for r in word.split("+")) for word in text.split())
        except ValueError:
            raise FormatError(
                f"cannot read {text!r} as a placement: expected a rank per stage, "
                f"such as '0 1 1 0' or '0+3 1+2 1+2 0+3'"
            ) from None
        return cls(stages, num_ranks or 1 + max((r for s in stages for r in s), default=-1))

    @classmethod
    def of(cls, ranks: "tuple[int, ...] | list[int]", num_ranks: int | None = None) -> "Placement":
        """Returns the placement of stage s on `ranks[s]` alone."""
        return cls(tuple((r,) for r in ranks), num_ranks or 1 + max(ranks, default=-1))

    @classmethod
    def sequential(cls, num_ranks: int) -> "Placement":
        return cls.of(range(num_ranks), num_ranks)  # type: ignore[arg-type]

    @classmethod
    def loop(cls, num_ranks: int, chunks: int) -> "Placement":
        """Stage s on rank s mod p (Megatron's interleaving)."""
        return cls.of([s % num_ranks for s in range(num_ranks * chunks)], num_ranks)

    @classmethod
    def wave(cls, num_ranks: int, waves: int = 1) -> "Placement":
        """Down and up again, `waves` times: the V placement and Hanayo's snake."""
        down_up = [*range(num_ranks), *reversed(range(num_ranks))]
        return cls.of(down_up * waves, num_ranks)

    @classmethod
    def bidirectional(cls, num_ranks: int) -> "Placement":
        """Stage s on rank s and on rank p-1-s (DualPipe, Chimera)."""
        last = num_ranks - 1
        return cls(tuple(tuple(sorted({s, last - s})) for s in range(num_ranks)), num_ranks)

    @property
    def num_stages(self) -> int:
        return len(self.stages)

    @cached_property
    def ranks(self) -> tuple[tuple[int, ...], ...]:
        """The stages that each rank holds, ascending."""
        stages_by_rank: list[list[int]] = [[] for _ in range(self.num_ranks)]
        for stage, ranks in enumerate(self.stages):
            for rank in ranks:
                stages_by_rank[rank].append(stage)
        return tuple(map(tuple, stages_by_rank))

    @property
    def replicated(self) -> bool:
        """Whether some stage is held by two ranks, with its parameters twice."""
        return any(len(ranks) > 1 for ranks in self.stages)

    @property
    def empty_ranks(self) -> tuple[int, ...]:
        return tuple(r for r, stages in enumerate(self.ranks) if not stages)
