"""The compiled simulator's full path: arrays in, timeline out."""

from itertools import pairwise

import numpy as np

from octojax.ir import ActionSpan, Cargo, Schedule, Timeline, Transfer
from octojax.simulate.costs import StageCosts
from octojax.simulate.evaluation import Trace, ends_of, memory, trace
from octojax.simulate.links import Links
from octojax.simulate.table import Table
from octojax.simulate.timelines import Free, Move, timeline_of


def compiled_timeline(
    table: Table, costs: StageCosts, links: Links, rows: Schedule, free: Free = "backward"
) -> Timeline:
    """Returns the timeline of a valid table whose items are those of `rows`."""
    times = trace(table, costs, links)
    levels = memory(table, costs, times, record=True)
    items = [item for rank in rows.ranks for item in rank]
    cells = zip(
        times.rank_of.tolist(), items, times.start_s.tolist(), times.end_s.tolist(), strict=True
    )
    traces = tuple(
        tuple(zip(levels.times_s[a:b].tolist(), levels.levels_bytes[a:b].tolist(), strict=True))
        for a, b in pairwise(levels.bounds.tolist())
    )
    spans = [ActionSpan(*cell) for cell in cells]
    moves = _moves(table, costs, links, times)
    return timeline_of(rows, spans, moves, traces, free, ends_s=ends_of(table, costs))


def _moves(table: Table, costs: StageCosts, links: Links, times: Trace) -> list[Move]:
    moves = []
    for i, slot in np.argwhere(times.target >= 0).tolist():
        _, stage, microbatch, stage2, microbatch2 = table.items[i].tolist()
        if slot == 1 and stage2 >= 0:
            stage, microbatch = stage2, microbatch2
        size = costs.input_bytes[stage] if slot else costs.output_bytes[stage]
        source, target = int(times.rank_of[i]), int(times.rank_of[times.target[i, slot]])
        kind = Cargo.GRADIENT if slot else Cargo.OUTPUT
        moves.append(
            Move(
                Transfer(source, target, kind, stage, microbatch),
                float(times.sent_s[i, slot]),
                float(times.arrived_s[i, slot]),
                float(size),
                float(links.latency_s[source, target]),
            )
        )
    return moves
