"""V-Half, V-Min and 1F1B-V: one building block per microbatch, repeated every six slots.

A block says when each rank runs the actions of one microbatch on its two chunks, so that copies
of it six slots apart never collide. The block's lifespans set the memory; everything else is
squeezing: filling the start, where earlier copies are missing, and the end, where later ones are.

    V-Min, p = 2      slot 0     1     2     3     4     5     6     7     8     9
    rank 0                 0F0   .     .     3F0   3I0   .     .     0I0  ...
    rank 1                 .     1F0   2F0   .     .     2I0   1I0   ...
"""

from collections.abc import Callable
from dataclasses import dataclass

from octojax.ir.action import Action, Kind
from octojax.ir.schedule import Schedule
from octojax.schedules.family import Family
from octojax.schedules.row_shapes import schedule
from octojax.simulate.oracle import peak_live

PERIOD = 6
NEVER = 1 << 40
F, B, I, W = Kind.FORWARD, Kind.BACKWARD, Kind.INPUT_GRAD, Kind.WEIGHT_GRAD  # noqa: E741
Slots = dict[Action, int]


@dataclass(frozen=True)
class Block:
    """Start slots of microbatch 0 on every rank; microbatch k runs `k * PERIOD` later.

    `releases` is the kind that ends an activation's life: W, or B where backwards are whole.
    """

    ranks: tuple[Slots, ...]
    releases: Kind

    @property
    def turn(self) -> int:
        """The slot at which the first gradient is back on rank 0: where the start ends."""
        kind = B if self.releases is B else I
        return self.ranks[0][Action(0, kind, 0)]

    def repeated(self, microbatches: int) -> list[tuple[int, int, Action]]:
        """Returns `(slot, rank, action)` of all microbatches, by slot."""
        return sorted(
            (start + k * PERIOD, rank, Action(action.stage, action.kind, k))
            for rank, slots in enumerate(self.ranks)
            for action, start in slots.items()
            for k in range(microbatches)
        )

    def peak(self) -> int:
        """Returns the most activations that a rank holds once the block repeats steadily."""
        copies = 2 + max(start for slots in self.ranks for start in slots.values()) // PERIOD
        rows: list[list[Action]] = [[] for _ in self.ranks]
        for _, rank, action in self.repeated(2 * copies):
            rows[rank].append(action)
        return max(peak_live(row, self.releases) for row in rows)


def _slots_taken(action: Action) -> int:
    return 2 if action.kind is B else 1


def _split_block(ranks: int, down: int, first_turn: int, hold: int) -> Block:
    """Returns the block of V-Half or V-Min.

    Forwards go down with `down` slots a hop and up with one, gradients the same; the gradient
    sets off at the first slot from `first_turn` on that makes no two actions of a rank meet
    modulo the period, and waits `hold` slots on the last rank. Each W takes the next free slot.
    """
    last = ranks - 1
    bottom = down * last + 1  # the forward's turning point on the last rank
    start = first_turn
    while True:
        block = [
            {
                Action(r, F, 0): down * r,
                Action(2 * ranks - 1 - r, F, 0): bottom + last - r,
                Action(2 * ranks - 1 - r, I, 0): start + down * r,
                Action(r, I, 0): start + down * last + hold + last - r,
            }
            for r in range(ranks)
        ]
        if all(len({slot % PERIOD for slot in slots.values()}) == 4 for slots in block):
            break
        start += 1
    for r, slots in enumerate(block):
        for stage in (2 * ranks - 1 - r, r):
            taken = {slot % PERIOD for slot in slots.values()}
            free = slots[Action(stage, I, 0)] + 1
            while free % PERIOD in taken:
                free += 1
            slots[Action(stage, W, 0)] = free
    return Block(tuple(block), W)


def _whole_block(ranks: int) -> Block:
    """Returns the block of 1F1B-V: each action as early as no two of a rank meet (F 1, B 2).

    A second chunk's backward gives way within its slack where the first chunk's, on the way
    back up, can then run earlier.
    """
    last, stages = ranks - 1, 2 * ranks
    downward = [2 * ranks - 1 - r for r in range(ranks)]  # second-chunk stages, rank by rank
    block: list[Slots] = [{} for _ in range(ranks)]
    clock = 0
    for stage in range(stages):
        rank = min(stage, stages - 1 - stage)
        block[rank][Action(stage, F, 0)] = clock = _free(block[rank], clock, 1)
        clock += 1
    for rank, stage in enumerate(downward):
        clock = _free(block[rank], clock, 2)
        block[rank][Action(stage, B, 0)] = clock
        clock += 2
    for rank in reversed(range(ranks)):
        own = Action(downward[rank], B, 0)
        earliest = block[rank].pop(own)
        latest = earliest if rank == last else block[rank + 1][Action(own.stage - 1, B, 0)] - 2
        choices = []
        for start in range(earliest, latest + 1):
            if start == _free(block[rank], start, 2):
                choices.append((_free({**block[rank], own: start}, clock, 2), start))
        clock, block[rank][own] = min(choices)
        block[rank][Action(rank, B, 0)] = clock
        clock += 2
    return Block(tuple(block), B)


def _free(slots: Slots, earliest: int, length: int) -> int:
    """Returns the first slot from `earliest` on that meets nothing in `slots`, all modulo 6.

    Returns `NEVER` if nothing of that length fits into a period any more.
    """
    taken = {(at + i) % PERIOD for a, at in slots.items() for i in range(_slots_taken(a))}
    for slot in range(earliest, earliest + PERIOD):
        if not taken & {(slot + i) % PERIOD for i in range(length)}:
            return slot
    return NEVER


class _Table:
    """The slots of every rank while the repeated block is squeezed."""

    def __init__(self, block: Block, limit: int) -> None:
        self.slots: list[Slots] = [{} for _ in block.ranks]
        self.busy: list[set[int]] = [set() for _ in block.ranks]
        self.limit, self.releases = limit, block.releases
        self.stages = 2 * len(block.ranks)

    def end(self, rank: int) -> int:
        return 1 + max(self.busy[rank], default=-1)

    def row(self, rank: int) -> list[Action]:
        return sorted(self.slots[rank], key=self.slots[rank].__getitem__)

    def ready(self, action: Action) -> int | None:
        """Returns the first slot at which the action's inputs are there, None if unknown yet."""
        stage, last = action.stage, self.stages - 1
        if action.kind is F:
            needed = Action(stage - 1, F, action.microbatch) if stage else None
        elif action.kind is W:
            needed = Action(stage, I, action.microbatch)
        elif stage == last:
            needed = Action(stage, F, action.microbatch)
        else:
            needed = Action(stage + 1, action.kind, action.microbatch)
        if needed is None:
            return 0
        slot = self.slots[min(needed.stage, last - needed.stage)].get(needed)
        return None if slot is None else slot + _slots_taken(needed)

    def put(self, rank: int, action: Action, slot: int) -> None:
        self.slots[rank][action] = slot
        self.busy[rank] |= set(range(slot, slot + _slots_taken(action)))

    def insert(self, rank: int, action: Action, earliest: int) -> None:
        """Puts the action into the first idle slot where the rank's memory allows it."""
        length, slot = _slots_taken(action), earliest
        while True:
            if not self.busy[rank] & set(range(slot, slot + length)):
                self.slots[rank][action] = slot
                if action.kind is not F or peak_live(self.row(rank), self.releases) <= self.limit:
                    break
                del self.slots[rank][action]
            slot += 1
        self.put(rank, action, slot)

    def full(self, rank: int) -> bool:
        return (
            sum((a.kind is F) - (a.kind is self.releases) for a in self.slots[rank]) >= self.limit
        )


def _squeeze(block: Block, microbatches: int) -> Schedule:
    """Returns the repeated block with its start and its end closed up, in unchanged memory.

    Start: what the block puts before the first gradient is back on rank 0 moves to the first
    idle slot. Middle: the order stays, W fills idle slots. End, from the slot before the last
    microbatch enters: forwards and gradients go as soon as they can, W only where a rank waits
    or must free memory, second chunk first. Whole backwards leave no W to fill with: there
    every action moves to the first idle slot.
    """
    table = _Table(block, block.peak())
    cooldown = PERIOD * (microbatches - 1)
    rest: list[list[Action]] = [[] for _ in block.ranks]
    for slot, rank, action in block.repeated(microbatches):
        # Rank 0 waits for nothing: there the W just before its last forward keeps its place.
        if block.releases is W and slot >= cooldown - (rank > 0):
            rest[rank].append(action)
            continue
        ready = table.ready(action)
        assert ready is not None, "a block lists every action after what it needs"
        moves = slot < block.turn or action.kind is W or block.releases is B
        table.insert(rank, action, ready if moves else max(ready, table.end(rank)))
    _drain(table, rest)
    return schedule(table.row(rank) for rank in range(len(block.ranks)))


def _drain(table: _Table, rest: list[list[Action]]) -> None:
    ranks = range(len(rest))
    slot = min(table.end(rank) for rank in ranks)
    begins = [table.end(rank) for rank in ranks]
    while any(rest):
        for rank in ranks:
            if slot >= begins[rank] and (action := _next(table, rank, rest[rank], slot)):
                rest[rank].remove(action)
                table.put(rank, action, slot)
        slot += 1


def _next(table: _Table, rank: int, rest: list[Action], slot: int) -> Action | None:
    ready = [a for a in rest if (at := table.ready(a)) is not None and at <= slot]
    moves = [a for a in ready if a.kind is not W]
    fills = sorted((a for a in ready if a.kind is W), key=lambda a: -a.stage)
    if not moves:
        return fills[0] if fills else None
    if moves[0].kind is not F or not table.full(rank):
        return moves[0]
    grads = [a for a in moves if a.kind is I]
    return next(iter([*fills, *grads]), None)


def _family(block_of: Callable[[int], Block]) -> Callable[[int, int, int], Schedule]:
    def layout(ranks: int, microbatches: int, chunks: int) -> Schedule:
        return _squeeze(block_of(ranks), microbatches)

    return layout


def _half_block(ranks: int) -> Block:
    return _split_block(ranks, down=2, first_turn=3 * ranks - 1, hold=2)


def _min_block(ranks: int) -> Block:
    return _split_block(ranks, down=1, first_turn=2 * ranks, hold=1)


SOURCE = "Qi et al., Pipeline Parallelism with Controllable Memory, NeurIPS 2024, arXiv:2405.15362"

FAMILIES = (
    Family(
        name="v-half",
        summary="half of 1F1B's memory for a bubble near a third of 1F1B's",
        source=SOURCE,
        layout=_family(_half_block),
        bubble="1, 5, 5, 11, 17 chunks at p = 2, 3, 4, 6, 8 (F=I=W=1)",
        peak="(p+2)/2, p odd (p+1)/2",
        chunks=2,
        chunk_range=(2, 2),
        placement="wave",
        splits_backward=True,
    ),
    Family(
        name="v-min",
        summary="a third of 1F1B's memory, the least of any V schedule",
        source=SOURCE,
        layout=_family(_min_block),
        bubble="3, 5, 11, 17, 27 chunks at p = 2, 3, 4, 6, 8 (F=I=W=1)",
        peak="ceil((p+2)/3)",
        chunks=2,
        chunk_range=(2, 2),
        placement="wave",
        splits_backward=True,
    ),
    Family(
        name="1f1b-v",
        summary="1F1B on a V placement, backwards whole, in three quarters of its memory",
        source=SOURCE,
        layout=_family(_whole_block),
        bubble="15 and 33 chunks at p = 4, 8 (F=1, B=2)",
        peak="3p/4",
        chunks=2,
        chunk_range=(2, 2),
        placement="wave",
    ),
)
