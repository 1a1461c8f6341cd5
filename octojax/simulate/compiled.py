"""The compiled simulator's full path: arrays in, timeline out."""

from itertools import pairwise

import numpy as np

from octojax.ir import ActionSpan, Schedule, Timeline, TransferSpan
from octojax.simulate.costs import StageCosts
from octojax.simulate.evaluation import Trace, memory, trace
from octojax.simulate.links import Links
from octojax.simulate.memory import live_peaks
from octojax.simulate.overlap import overlaps
from octojax.simulate.table import Table
from octojax.simulate.timelines import Free, summaries


def compiled_timeline(
    table: Table, costs: StageCosts, links: Links, rows: Schedule, free: Free = "backward"
) -> Timeline:
    """Returns the timeline of a valid table whose items are those of `rows`."""
    times = trace(table, costs, links)
    held = memory(table, costs, times, record=True)
    both, sender = overlaps(
        table.rank_start,
        times.start_s,
        times.end_s,
        times.sent_s,
        times.arrived_s,
        times.target,
        times.rank_of,
    )
    items = [item for rank in rows.ranks for item in rank]
    cells = zip(
        times.rank_of.tolist(), items, times.start_s.tolist(), times.end_s.tolist(), strict=True
    )
    spans = tuple(ActionSpan(*cell) for cell in cells)
    makespan = float(times.end_s.max(initial=0.0))
    live = live_peaks(table.items, table.rank_start)
    traces = tuple(
        tuple(zip(held.times_s[a:b].tolist(), held.levels_bytes[a:b].tolist(), strict=True))
        for a, b in pairwise(held.bounds.tolist())
    )
    return Timeline(
        makespan,
        spans,
        _transfer_spans(table, costs, times, both, sender),
        summaries(spans, makespan, live, held.peak_bytes.tolist(), free),
        traces,
    )


def _transfer_spans(
    table: Table, costs: StageCosts, times: Trace, both: np.ndarray, sender: np.ndarray
) -> tuple[TransferSpan, ...]:
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
