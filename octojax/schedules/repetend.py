"""Tessel's repetend: the shortest period at which a microbatch can follow the one before.

Each block (F or B of a stage) appears once in a repetend, for whichever microbatch has come so
far. Start times for one microbatch, taken modulo the period, say all of it; the search places
the blocks along the chain F0 F1 .. B1 B0, earliest first, and proves a period impossible before
it tries the next.
"""

from dataclasses import dataclass

from octojax.ir.placement import Placement

NODES = 40_000
"""Placements tried per period; beyond, the best repetend found so far is taken unproven."""


@dataclass(frozen=True)
class Blocks:
    """What one microbatch does: whole numbers of time slots per stage, ranks, memory per rank."""

    placement: Placement
    forward: tuple[int, ...]
    backward: tuple[int, ...]
    memory: tuple[int, ...]

    @property
    def num_stages(self) -> int:
        return len(self.forward)

    def rank(self, stage: int) -> int:
        return self.placement.stages[stage][0]

    def load(self, rank: int) -> int:
        return sum(self.forward[s] + self.backward[s] for s in self.placement.ranks[rank])


@dataclass(frozen=True)
class Repetend:
    """`forward[s]` and `backward[s]` are start slots of microbatch 0; the next starts `period`
    later. `proven`: no shorter period exists."""

    period: int
    forward: tuple[int, ...]
    backward: tuple[int, ...]
    proven: bool

    def bubble(self, blocks: Blocks) -> int:
        """Returns the slots per repetend that the busiest rank idles."""
        return self.period - max(blocks.load(r) for r in range(blocks.placement.num_ranks))


def shortest_repetend(blocks: Blocks, nodes: int = NODES) -> Repetend:
    """Returns the repetend of least period, then of least time from F0 to the end of B0.

    Raises `ValueError` if a rank cannot even hold one microbatch of each of its stages.
    """
    placement = blocks.placement
    for rank, own in enumerate(placement.ranks):
        if len(own) > blocks.memory[rank]:
            raise ValueError(
                f"tessel: rank {rank} holds {len(own)} stages, so it needs memory for at least "
                f"{len(own)} activations, and has {blocks.memory[rank]}. Raise memory"
            )
    least = max(blocks.load(rank) for rank in range(placement.num_ranks))
    most = sum(blocks.forward) + sum(blocks.backward)
    proven = True
    for period in range(least, most + 1):
        search = _Search(blocks, period, nodes)
        starts = search.run()
        if starts is not None:
            stages = blocks.num_stages
            return Repetend(period, starts[:stages], starts[: stages - 1 : -1], proven)
        proven = proven and search.left > 0
    raise AssertionError("one microbatch after another always fits")


class _Search:
    """Depth-first over start slots, along the chain of blocks, at one period."""

    def __init__(self, blocks: Blocks, period: int, nodes: int) -> None:
        self.blocks, self.period, self.left = blocks, period, nodes
        stages = blocks.num_stages
        self.chain = [*range(stages), *reversed(range(stages))]
        self.lengths = [*blocks.forward, *reversed(blocks.backward)]
        self.rest = [sum(self.lengths[i:]) for i in range(len(self.lengths) + 1)]
        self.taken: list[set[int]] = [set() for _ in range(blocks.placement.num_ranks)]
        self.starts: list[int] = []
        self.best: tuple[int, ...] | None = None
        self.best_end = 1 << 60

    def run(self) -> tuple[int, ...] | None:
        self._extend(0)
        return self.best

    def _extend(self, earliest: int) -> None:
        at = len(self.starts)
        if at == len(self.chain):
            self.best, self.best_end = tuple(self.starts), earliest
            return
        taken = self.taken[self.blocks.rank(self.chain[at])]
        for start in range(earliest, earliest + (self.period if at else 1)):
            if start + self.rest[at] >= self.best_end or self.left <= 0:
                return
            phases = {(start + i) % self.period for i in range(self.lengths[at])}
            if len(phases) < self.lengths[at] or phases & taken:
                continue
            self.left -= 1
            self.starts.append(start)
            taken |= phases
            if self._fits(start + self.lengths[at]):
                self._extend(start + self.lengths[at])
            taken -= phases
            self.starts.pop()

    def _fits(self, now: int) -> bool:
        """Whether each rank's live activations can stay within memory; B not placed ends now."""
        stages = self.blocks.num_stages
        begun = min(len(self.starts), stages)
        for rank, own in enumerate(self.blocks.placement.ranks):
            lives = []
            for stage in own:
                if stage < begun:
                    place = 2 * stages - 1 - stage  # of its B in the chain
                    done = place < len(self.starts)
                    end = self.starts[place] + self.lengths[place] if done else now
                    lives.append((self.starts[stage], end))
            for phase, _ in lives:
                live = sum(
                    max(0, -(-(end - begin - (phase - begin) % self.period) // self.period))
                    for begin, end in lives
                )
                if live > self.blocks.memory[rank]:
                    return False
        return True
