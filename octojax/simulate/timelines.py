"""From times to the record that people and reports read: simulated and measured alike."""

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Literal, NamedTuple

from octojax.ir import (
    ActionSpan,
    Cause,
    Gap,
    Kind,
    Placement,
    RankSummary,
    Schedule,
    Timeline,
    Transfer,
    TransferSpan,
)
from octojax.ir.walk import Mode, TableWalk
from octojax.simulate.oracle import Meaning, Times, held_bytes, peak_live, times_of
from octojax.simulate.waits import gaps_of

Free = Literal["backward", "weight"]
Memory = tuple[tuple[float, float], ...]
"""`(time_s, bytes)` after each change."""


class Move(NamedTuple):
    """When a transfer ran, how many bytes it moved, and how long they travelled off the link."""

    transfer: Transfer
    start_s: float
    end_s: float
    nbytes: float
    latency_s: float = 0.0


def simulated(meaning: Meaning, walk: TableWalk, placement: Placement, free: Free) -> Timeline:
    """Returns the record of a walk. `placement` says which rank holds which stage's state."""
    spans = [ActionSpan(rank, *span) for rank, row in enumerate(walk.spans) for span in row]
    times = times_of(walk)
    traces = [memory_trace(meaning, times, placement, r) for r in range(len(walk.spans))]
    take = meaning.crossings.take
    moves = [
        Move(
            take[action],
            *walk.moves[take[action]],
            meaning.size_bytes(take[action]),
            meaning.wire_s(take[action])[0],
        )
        for _, _, action in meaning.schedule.actions()
        if action in take
    ]
    return timeline_of(
        meaning.schedule,
        spans,
        moves,
        tuple(map(tuple, traces)),
        free,
        blocking=walk.mode is Mode.RENDEZVOUS,
        ends_s=meaning.ends,
    )


def timeline_of(
    schedule: Schedule,
    spans: Iterable[ActionSpan],
    moves: Iterable[Move],
    memory: tuple[Memory, ...] = (),
    free: Free = "backward",
    blocking: bool = False,
    ends_s: Sequence[tuple[float, float]] = (),
) -> Timeline:
    """Returns the record of a step: `spans` rank by rank in order, `moves` in any order.

    `memory[r]` are rank r's `(time_s, bytes)`; its peak is the most of them, 0 if not traced.
    Rank r is busy for `ends_s[r]` before its first action and after its last.
    """
    ends_s = ends_s or ((0.0, 0.0),) * schedule.num_ranks
    actions = tuple(spans)
    busy: list[list[tuple[float, float]]] = [[] for _ in schedule.ranks]
    for span in actions:
        busy[span.rank].append((span.start_s, span.end_s))
    makespan = max(
        max((end for _, end in own), default=before) + after
        for own, (before, after) in zip(busy, ends_s, strict=True)
    )
    transfers = tuple(_span(move, busy) for move in moves)
    gaps = gaps_of(actions, transfers, schedule.num_ranks, makespan, blocking, ends_s)
    peaks = [max(level for _, level in trace) for trace in memory] or [0.0] * schedule.num_ranks
    live = [
        (peak_live(row, Kind.INPUT_GRAD), peak_live(row, Kind.WEIGHT_GRAD))
        for row in schedule.ranks
    ]
    by_rank: list[list[Gap]] = [[] for _ in schedule.ranks]
    for gap in gaps:
        by_rank[gap.rank].append(gap)
    summaries = tuple(
        _summary(own, makespan, counts, peak, mine, free, ends)
        for own, counts, peak, mine, ends in zip(busy, live, peaks, by_rank, ends_s, strict=True)
    )
    return Timeline(makespan, actions, transfers, summaries, memory, gaps)


def memory_trace(
    meaning: Meaning, times: Times, placement: Placement, rank: int
) -> list[tuple[float, float]]:
    """Returns `(time_s, bytes)` after each change; all changes at one instant count as one."""
    stages = placement.ranks[rank]
    level = float(sum(float(meaning.costs.state_bytes[stage]) for stage in stages))
    changes: dict[float, float] = defaultdict(float)
    for begin, end, size in held_bytes(meaning, times, rank):
        if begin < end:
            changes[begin] += size
            changes[end] -= size
    trace = [(0.0, level)]
    for time in sorted(changes):
        if changes[time] == 0.0:
            continue
        level += changes[time]
        if time == 0.0:
            trace.clear()
        trace.append((time, level))
    return trace


def _span(move: Move, busy: Sequence[Sequence[tuple[float, float]]]) -> TransferSpan:
    transfer, begin, stop, nbytes, latency_s = move
    sender = _within(busy[transfer.source], begin, stop)
    receiver = _within(busy[transfer.target], begin, stop)
    both = sum(
        max(0.0, min(x[1], y[1], stop) - max(x[0], y[0], begin)) for x in sender for y in receiver
    )
    alone = sum(max(0.0, min(b, stop) - max(a, begin)) for a, b in sender)
    return TransferSpan(
        transfer.source,
        transfer.target,
        transfer.stage,
        str(transfer.kind),
        transfer.microbatch,
        begin,
        stop,
        nbytes,
        float(both),
        float(alone),
        float(latency_s),
    )


def _within(
    cells: Sequence[tuple[float, float]], begin: float, stop: float
) -> Sequence[tuple[float, float]]:
    first = bisect_right(cells, begin, key=lambda cell: cell[1])
    last = first
    while last < len(cells) and cells[last][0] < stop:
        last += 1
    return cells[first:last]


def _summary(
    own: Sequence[tuple[float, float]],
    makespan_s: float,
    live: tuple[int, int],
    peak: float,
    gaps: Sequence[Gap],
    free: Free,
    ends_s: tuple[float, float],
) -> RankSummary:
    before, after = ends_s
    busy = float(sum(end - start for start, end in own)) + (before + after)
    bubble = makespan_s - busy
    residual = float(sum(b[0] - a[1] for a, b in pairwise(own)))
    boundary = makespan_s - (before + after)
    if own:
        boundary = (own[0][0] - before) + (makespan_s - (own[-1][1] + after))
    waited = {
        cause: float(sum(g.end_s - g.start_s for g in gaps if g.cause is cause and not g.boundary))
        for cause in Cause
    }
    return RankSummary(
        busy,
        bubble,
        boundary,
        residual,
        live[free == "weight"],
        peak,
        live[1],
        waited[Cause.COMPUTATION],
        waited[Cause.TRANSFER],
        before,
        after,
    )
