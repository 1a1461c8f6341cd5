"""From times in dictionaries to the record that people and reports read."""

from bisect import bisect_right
from collections import defaultdict
from itertools import pairwise
from typing import Literal

from octojax.ir import ActionSpan, Kind, Placement, RankSummary, Timeline, TransferSpan
from octojax.ir.lowering import Transfer, transfers_of
from octojax.simulate.oracle import Meaning, Run, held_bytes, peak_live

Free = Literal["backward", "weight"]
Busy = list[list[tuple[float, float]]]
"""Per rank, the `(start_s, end_s)` of its cells, ascending."""


def timeline_of(meaning: Meaning, done: Run, placement: Placement, free: Free) -> Timeline:
    """Returns the record of a run. `placement` says which rank holds which stage's state."""
    schedule = meaning.schedule
    spans = tuple(
        ActionSpan(rank, item, done.start[rank, position], done.end[rank, position])
        for rank, row in enumerate(schedule.ranks)
        for position, item in enumerate(row)
    )
    traces = [memory_trace(meaning, done, placement, r) for r in range(schedule.num_ranks)]
    peaks = [max(level for _, level in trace) for trace in traces]
    live = [
        (peak_live(schedule, r, Kind.INPUT_GRAD), peak_live(schedule, r, Kind.WEIGHT_GRAD))
        for r in range(schedule.num_ranks)
    ]
    makespan = max(done.end.values(), default=0.0)
    return Timeline(
        makespan,
        spans,
        transfer_spans(meaning, done),
        summaries(spans, makespan, live, peaks, free),
        tuple(map(tuple, traces)),
    )


def memory_trace(
    meaning: Meaning, done: Run, placement: Placement, rank: int
) -> list[tuple[float, float]]:
    """Returns `(time_s, bytes)` after each change; all changes at one instant count as one."""
    held = placement.ranks[rank]
    level = float(sum(float(meaning.costs.state_bytes[stage]) for stage in held))
    changes: dict[float, float] = defaultdict(float)
    for begin, end, size in held_bytes(meaning, done, rank):
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


def transfer_spans(meaning: Meaning, done: Run) -> tuple[TransferSpan, ...]:
    """Returns the transfers, rank by rank in the sender's program order."""
    busy: Busy = [
        [(done.start[r, p], done.end[r, p]) for p in range(len(row))]
        for r, row in enumerate(meaning.schedule.ranks)
    ]
    return tuple(_span(meaning, done, busy, t) for t in transfers_of(meaning.schedule))


def _span(meaning: Meaning, done: Run, busy: Busy, transfer: Transfer) -> TransferSpan:
    begin, stop = done.moves[transfer]
    sender = _within(busy[transfer.source], begin, stop)
    receiver = _within(busy[transfer.target], begin, stop)
    both = sum(
        max(0.0, min(x[1], y[1], stop) - max(x[0], y[0], begin)) for x in sender for y in receiver
    )
    return TransferSpan(
        transfer.source,
        transfer.target,
        transfer.stage,
        transfer.kind,
        transfer.microbatch,
        begin,
        stop,
        meaning.size_bytes(transfer),
        float(both),
        float(sum(max(0.0, min(b, stop) - max(a, begin)) for a, b in sender)),
    )


def _within(cells: list[tuple[float, float]], begin: float, stop: float) -> list:
    first = bisect_right(cells, begin, key=lambda cell: cell[1])
    last = first
    while last < len(cells) and cells[last][0] < stop:
        last += 1
    return cells[first:last]


def summaries(
    spans: tuple[ActionSpan, ...],
    makespan_s: float,
    live: list[tuple[int, int]],
    peaks: list[float],
    free: Free,
) -> tuple[RankSummary, ...]:
    """Returns each rank's account. `live` counts until I and until W, `peaks` are bytes."""
    by_rank: list[list[ActionSpan]] = [[] for _ in peaks]
    for span in spans:
        by_rank[span.rank].append(span)
    return tuple(
        _summary(own, makespan_s, counts, peak, free)
        for own, counts, peak in zip(by_rank, live, peaks, strict=True)
    )


def _summary(
    own: list[ActionSpan], makespan_s: float, live: tuple[int, int], peak: float, free: Free
) -> RankSummary:
    busy = float(sum(x.end_s - x.start_s for x in own))
    bubble = makespan_s - busy
    residual = float(sum(b.start_s - a.end_s for a, b in pairwise(own)))
    boundary = own[0].start_s + (makespan_s - own[-1].end_s) if own else makespan_s
    return RankSummary(busy, bubble, boundary, residual, live[free == "weight"], peak, live[1])
