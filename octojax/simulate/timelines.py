"""From the arrays of a simulation to the record that people and reports read."""

from itertools import pairwise
from typing import Literal

import numpy as np

from octojax.ir import ActionSpan, RankSummary, Schedule, Timeline, TransferSpan
from octojax.simulate.costs import StageCosts
from octojax.simulate.evaluate import Trace
from octojax.simulate.memory import live_peaks, memory_over_time
from octojax.simulate.overlap import overlaps
from octojax.simulate.table import Table

Free = Literal["backward", "weight"]


def timeline_of(
    table: Table, costs: StageCosts, times: Trace, rows: Schedule, free: Free = "backward"
) -> Timeline:
    """Returns the record of a traced table whose items are those of `rows`."""
    *where, _ = times
    peaks, when, levels, bounds = memory_over_time(
        table.items,
        table.rank_start,
        table.num_stages,
        table.num_microbatches,
        costs.nbytes,
        costs.recompute,
        table.holds,
        *where,
        True,
    )
    both, sender = overlaps(table.rank_start, *where)
    start, end = times.start_s.tolist(), times.end_s.tolist()
    items = [item for rank in rows.ranks for item in rank]
    spans = tuple(
        ActionSpan(rank, item, a, b)
        for rank, item, a, b in zip(times.rank_of.tolist(), items, start, end, strict=True)
    )
    makespan = max(end, default=0.0)
    return Timeline(
        makespan,
        spans,
        transfer_spans(table, costs, times, both, sender),
        summaries(spans, makespan, live_peaks(table.items, table.rank_start), peaks, free),
        tuple(
            tuple(zip(when[a:b].tolist(), levels[a:b].tolist(), strict=True))
            for a, b in pairwise(bounds.tolist())
        ),
    )


def transfer_spans(
    table: Table, costs: StageCosts, times: Trace, both: np.ndarray, sender: np.ndarray
) -> tuple[TransferSpan, ...]:
    """Returns the transfers of a traced table, rank by rank in the sender's program order."""
    spans = []
    for i, slot in np.argwhere(times.target >= 0).tolist():
        _, stage, microbatch, stage2, microbatch2 = table.items[i].tolist()
        if slot == 1 and stage2 >= 0:
            stage, microbatch = stage2, microbatch2
        size = costs.input_bytes[stage] if slot else costs.output_bytes[stage]
        spans.append(
            TransferSpan(
                int(times.rank_of[i]),
                int(times.rank_of[times.target[i, slot]]),
                stage,
                "B" if slot else "F",
                microbatch,
                float(times.sent_s[i, slot]),
                float(times.arrived_s[i, slot]),
                float(size),
                float(both[i, slot]),
                float(sender[i, slot]),
            )
        )
    return tuple(spans)


def summaries(
    spans: tuple[ActionSpan, ...],
    makespan_s: float,
    live: np.ndarray,
    peaks: np.ndarray,
    free: Free = "backward",
) -> tuple[RankSummary, ...]:
    """Returns each rank's account. `live` is (ranks, 2), `peaks` (ranks,) bytes."""
    by_rank: list[list[ActionSpan]] = [[] for _ in range(len(peaks))]
    for span in spans:
        by_rank[span.rank].append(span)
    result = []
    for rank, own in enumerate(by_rank):
        busy = sum(x.end_s - x.start_s for x in own)
        first, last = (own[0].start_s, own[-1].end_s) if own else (makespan_s, makespan_s)
        boundary = first + (makespan_s - last)
        bubble = makespan_s - busy
        until_input, until_weight = map(int, live[rank])
        result.append(
            RankSummary(
                busy,
                bubble,
                boundary,
                max(0.0, bubble - boundary),
                until_weight if free == "weight" else until_input,
                float(peaks[rank]),
                until_weight,
            )
        )
    return tuple(result)
