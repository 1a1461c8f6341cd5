"""ZB-V: zero bubble in 1F1B's memory, on two chunks placed as a V."""

from octojax.ir.action import Action
from octojax.ir.schedule import Schedule
from octojax.schedules.row_shapes import forward, input_grad, schedule, weight_grad


class _Chunk:
    """One of a rank's two stages, counting how far its forwards, I and W have come."""

    def __init__(self, stage: int) -> None:
        self._stage = stage
        self.forwards = self.inputs = self.weights = 0

    def f(self) -> Action:
        self.forwards += 1
        return forward(self._stage, self.forwards - 1)

    def i(self) -> Action:
        self.inputs += 1
        return input_grad(self._stage, self.inputs - 1)

    def w(self) -> Action:
        self.weights += 1
        return weight_grad(self._stage, self.weights - 1)


def handcrafted(ranks: int, microbatches: int) -> Schedule:
    """Returns the handcrafted order of the paper (PyTorch's ScheduleZBVZeroBubble).

    Fewer than 2p-1 microbatches take the order for 2p-1 and leave out those that do not exist.
    """
    return schedule(
        [a for a in _row(ranks, r, max(microbatches, 2 * ranks - 1)) if a.microbatch < microbatches]
        for r in range(ranks)
    )


def _row(ranks: int, rank: int, microbatches: int) -> list[Action]:
    down, up = _Chunk(rank), _Chunk(2 * ranks - 1 - rank)
    row = [down.f() for _ in range(2 * (ranks - rank) - 1)]
    for _ in range(rank):
        row += [up.f(), down.f()]
    for _ in range(ranks - rank):
        row += [up.f(), up.i(), up.w()]
    while up.forwards < microbatches:
        if down.forwards < microbatches:
            row.append(down.f())
        row += [down.i(), down.w(), up.f(), up.i(), up.w()]
    for _ in range(rank):
        row += [down.i(), up.i()]
    for _ in range(ranks - rank):
        row += [down.i(), down.w()]
    for chunk in (up, down):
        row += [chunk.w() for _ in range(chunk.inputs - chunk.weights)]
    return row
