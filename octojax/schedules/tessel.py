"""Tessel: search a repetend for any placement, repeat it, and close up its start and end."""

from octojax.ir.action import Action, Kind
from octojax.ir.placement import Placement
from octojax.ir.schedule import Schedule
from octojax.schedules import row_shapes as make
from octojax.schedules.family import Family, Option
from octojax.schedules.options import limits, per_rank, ranks_of_stages
from octojax.schedules.repetend import Blocks, Repetend, shortest_repetend
from octojax.schedules.user_placement import on_ranks
from octojax.simulate.oracle import peak_live


def tessel(
    ranks: int,
    microbatches: int,
    chunks: int,
    *,
    placement: Placement | None,
    memory: tuple[int, ...] | None,
    forward: tuple[int, ...],
    backward: tuple[int, ...],
) -> Schedule:
    """Returns warm-up, m repetends overlapping by one period each, and cool-down.

    Costs are whole numbers of time slots. The repetend is the shortest one within `memory`
    activations per rank (see `repetend.py`). Where earlier or later microbatches are missing,
    an action moves to the first slot where its rank idles and has memory.
    """
    blocks = blocks_of(ranks, chunks, placement, memory, forward, backward)
    return _repeat(blocks, shortest_repetend(blocks), microbatches)


def blocks_of(
    ranks: int,
    chunks: int = 1,
    placement: Placement | None = None,
    memory: tuple[int, ...] | None = None,
    forward: tuple[int, ...] = (1,),
    backward: tuple[int, ...] = (2,),
) -> Blocks:
    """Returns the blocks that the options describe; `memory` defaults to the number of stages."""
    where = on_ranks(placement or Placement.loop(ranks, chunks), ranks, "tessel")
    stages = where.num_stages
    return Blocks(
        where,
        _per_stage(forward, stages, "forward"),
        _per_stage(backward, stages, "backward"),
        per_rank(memory or (stages,), ranks, "memory"),
    )


def _per_stage(costs: tuple[int, ...], stages: int, what: str) -> tuple[int, ...]:
    if len(costs) == 1:
        return costs * stages
    if len(costs) != stages:
        raise ValueError(
            f"tessel: {what} has {len(costs)} numbers for {stages} stages; give one, or one each"
        )
    return costs


def _repeat(blocks: Blocks, repetend: Repetend, microbatches: int) -> Schedule:
    """Returns every microbatch's blocks in time order, each in the first idle slot it fits."""
    events: list[tuple[int, Action, int]] = []
    for k in range(microbatches):
        shift = k * repetend.period
        for s in range(blocks.num_stages):
            events.append((repetend.forward[s] + shift, make.forward(s, k), blocks.forward[s]))
            events.append((repetend.backward[s] + shift, make.backward(s, k), blocks.backward[s]))
    ends: dict[Action, int] = {}
    rows: list[list[tuple[int, int, Action]]] = [[] for _ in range(blocks.placement.num_ranks)]
    for _, action, length in sorted(events, key=lambda event: event[0]):
        ready = _ready(blocks, ends, action)
        rank = blocks.rank(action.stage)
        ends[action] = _insert(rows[rank], action, ready, length, blocks.memory[rank])
    return make.schedule([action for _, _, action in row] for row in rows)


def _ready(blocks: Blocks, ends: dict[Action, int], action: Action) -> int:
    s, k = action.stage, action.microbatch
    if action.kind is Kind.FORWARD:
        return ends[make.forward(s - 1, k)] if s else 0
    return ends[make.forward(s, k) if s == blocks.num_stages - 1 else make.backward(s + 1, k)]


def _insert(
    row: list[tuple[int, int, Action]], action: Action, ready: int, length: int, memory: int
) -> int:
    """Inserts into the first gap of `(start, end, action)` that fits; returns the end."""
    for place in range(len(row) + 1):
        start = max(ready, row[place - 1][1] if place else 0)
        fits = place == len(row) or start + length <= row[place][0]
        if not fits:
            continue
        row.insert(place, (start, start + length, action))
        if (
            action.kind is not Kind.FORWARD
            or place == len(row) - 1
            or peak_live((a for _, _, a in row), Kind.BACKWARD) <= memory
        ):
            return start + length
        row.pop(place)
    raise AssertionError("the end of the row always fits")


FAMILIES = (
    Family(
        name="tessel",
        summary="searched repetend for any placement, any costs, within a memory limit",
        source="Lin et al., Tessel, HPCA 2024, arXiv:2311.15269 (own exact search)",
        layout=tessel,
        constraints="any number of microbatches; memory >= a rank's stages; costs whole numbers",
        bubble="0 per repetend if memory >= p (sequential); warm-up and cool-down remain",
        peak="memory",
        chunk_range=(1, None),
        placement="given",
        options=(
            Option("placement", None, "rank of each stage, such as 0,1,1,0", ranks_of_stages),
            Option("memory", None, "activations held, one or one per rank; all stages", limits),
            Option("forward", (1,), "slots of F, one number or one per stage", limits),
            Option("backward", (2,), "slots of B, one number or one per stage", limits),
        ),
    ),
)
