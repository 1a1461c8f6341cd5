"""DualPipe and its cut-in-half form: pairs of a forward and a backward run as one."""

from collections import deque

from octojax.ir.action import Action, Item, Overlap
from octojax.ir.schedule import Schedule
from octojax.schedules.family import Family
from octojax.schedules.row_shapes import backward, forward, input_grad, schedule, weight_grad


class _Row:
    """One rank's row under construction. `stages` and `entries` are indexed by direction.

    Direction 0 is the one that enters on this rank's half of the pipeline (DualPipe), or the
    rank's first chunk (DualPipeV); 1 is the other. Weight gradients wait in a first-in
    first-out queue.
    """

    def __init__(self, stages: tuple[int, int], entries: tuple[int, int]) -> None:
        self.items: list[Item] = []
        self._stages = stages
        self._next_forward = list(entries)
        self._next_backward = list(entries)
        self._weights: deque[Action] = deque()

    def f(self, way: int) -> None:
        self.items.append(self._forward(way))

    def b(self, way: int) -> None:
        self.items.append(backward(self._stages[way], self._step_backward(way)))

    def i(self, way: int) -> None:
        microbatch = self._step_backward(way)
        self.items.append(input_grad(self._stages[way], microbatch))
        self._weights.append(weight_grad(self._stages[way], microbatch))

    def w(self) -> None:
        self.items.append(self._weights.popleft())

    def fb(self, forward_way: int) -> None:
        """A forward one way and a backward the other way, as one overlapped pair."""
        other = 1 - forward_way
        ahead = self._forward(forward_way)
        self.items.append(Overlap(ahead, backward(self._stages[other], self._step_backward(other))))

    def _forward(self, way: int) -> Action:
        self._next_forward[way] += 1
        return forward(self._stages[way], self._next_forward[way] - 1)

    def _step_backward(self, way: int) -> int:
        self._next_backward[way] += 1
        return self._next_backward[way] - 1


def _fill(row: _Row, depth: int, rank: int, pairs: int) -> list[Item]:
    """Returns the eight phases of the published order.

    `depth` is the number of ranks that one direction warms up over, `rank` this rank's
    distance from where direction 0 enters, `pairs` how often phase 4 repeats.
    """
    ahead = depth - rank - 1  # ranks between this one and the turning point
    for _ in range(2 * ahead):  # 1: fill with what enters here
        row.f(0)
    for _ in range(rank + 1):  # 2: both directions' forwards
        row.f(0)
        row.f(1)
    for _ in range(ahead):  # 3: first backwards, split to pass gradients on early
        row.i(1)
        row.w()
        row.f(1)
    for repeat in range(pairs):  # 4: steady state
        if repeat == 0 and ahead == 0:
            row.f(0)
            row.b(1)
        else:
            row.fb(0)
        row.fb(1)
    for _ in range(ahead):  # 5: drain, the last forwards of the other direction
        row.b(1)
        row.fb(1)
    for turn in range(2 * (rank + 1)):  # 6: backwards only, split from the middle on
        split = turn >= rank + 1
        (row.i if split else row.b)(1 - turn % 2)
    for _ in range(ahead):  # 7: weight gradients while waiting for the last gradients
        row.w()
        row.i(0)
    for _ in range(rank + 1):  # 8: the weight gradients left over
        row.w()
    return row.items


def dualpipe(ranks: int, microbatches: int, chunks: int) -> Schedule:
    """Returns DeepSeek-V3's schedule: microbatches 0..m/2-1 enter at rank 0, the others at p-1.

    Rank r holds stages r and p-1-r, each stage is on two ranks, and the weights are held twice.
    """
    half, entering = ranks // 2, microbatches // 2
    rows = []
    for rank in range(ranks):
        stages, entries = (rank, ranks - 1 - rank), (0, entering)
        if rank >= half:
            stages, entries = (stages[1], stages[0]), (entries[1], entries[0])
        near = min(rank, ranks - 1 - rank)
        rows.append(_fill(_Row(stages, entries), half, near, entering - ranks + near + 1))
    return schedule(rows)


def dualpipe_v(ranks: int, microbatches: int, chunks: int) -> Schedule:
    """Returns DualPipe folded at its middle: rank r holds stages r and 2p-1-r, all enter at 0."""
    return schedule(
        _fill(
            _Row((rank, 2 * ranks - 1 - rank), (0, 0)),
            ranks,
            rank,
            microbatches - 2 * ranks + rank + 1,
        )
        for rank in range(ranks)
    )


def _even(ranks: int) -> bool:
    return ranks % 2 == 0


def _twice_and_even(ranks: int, microbatches: int, chunks: int) -> bool:
    return microbatches % 2 == 0 and microbatches >= 2 * ranks


def _twice(ranks: int, microbatches: int, chunks: int) -> bool:
    return microbatches >= 2 * ranks


FAMILIES = (
    Family(
        name="dualpipe",
        summary="two directions at once, each forward paired with the other way's backward",
        source="DeepSeek-V3 Technical Report, 2024, arXiv:2412.19437, section 3.2.1",
        layout=dualpipe,
        constraints="p even, m even, m >= 2p; weights are held twice",
        bubble="(p/2-1)(F&B + B - 3W)",
        peak="p+1",
        chunks=2,
        chunk_range=(2, 2),
        placement="bidirectional",
        splits_backward=True,
        allows=_twice_and_even,
        allows_ranks=_even,
    ),
    Family(
        name="dualpipe-v",
        summary="DualPipe cut in half: a V placement, weights held once",
        source="Sea AI Lab and DeepSeek, Cut-in-half (DualPipeV), 2025; PyTorch ScheduleDualPipeV",
        layout=dualpipe_v,
        constraints="m >= 2p",
        bubble="(p-1)(F&B + B - 3W) chunks",
        peak="(2p+1)/2",
        chunks=2,
        chunk_range=(2, 2),
        placement="wave",
        splits_backward=True,
        allows=_twice,
    ),
)
