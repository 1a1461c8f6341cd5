"""The tuner's path through the simulator: makespan, busy times, peak bytes, nothing else."""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from octojax.simulate.costs import STATE, StageCosts
from octojax.simulate.engine import execute, index_items
from octojax.simulate.links import Links
from octojax.simulate.memory import item_changes, merge, rank_streams
from octojax.simulate.step_ends import rank_ends
from octojax.simulate.table import Table

Floats = NDArray[np.float64]
Ints = NDArray[np.int32]


class Evaluation(NamedTuple):
    """What a tuner needs to know of a plan; arrays are (ranks,).

    `done` is the number of items that ran. If it is below the table's length, the order
    deadlocks and the other figures mean nothing. `peak_bytes` is zero where not asked for.
    """

    makespan_s: float
    busy_s: Floats
    first_s: Floats
    last_s: Floats
    peak_bytes: Floats
    done: int


class Trace(NamedTuple):
    """When every item and transfer of a table runs; see `engine.execute`."""

    start_s: Floats
    end_s: Floats
    sent_s: Floats
    arrived_s: Floats
    target: Ints
    rank_of: Ints
    recompute_item: Ints
    done: int


class Memory(NamedTuple):
    """Peak bytes per rank, and the level after each change: see `memory.merge`."""

    peak_bytes: Floats
    times_s: Floats
    levels_bytes: Floats
    bounds: NDArray[np.int64]


def trace(table: Table, costs: StageCosts, links: Links) -> Trace:
    """Returns start and end of every item and transfer of a table."""
    forward_item, backward_item, recompute_item, rank_of = index_items(
        table.items, table.rank_start, table.num_stages, table.num_microbatches
    )
    start, end, sent, arrived, target, done = execute(
        table.items,
        table.rank_start,
        table.num_microbatches,
        forward_item,
        backward_item,
        recompute_item,
        rank_of,
        costs.seconds,
        costs.nbytes,
        costs.recompute,
        links.speed,
        links.latency_s,
        links.bandwidth_bytes_per_s,
        links.host_cost_s,
        links.overlap_discount,
        np.array([before for before, _ in ends_of(table, costs)]),
    )
    return Trace(start, end, sent, arrived, target, rank_of, recompute_item, done)


def ends_of(table: Table, costs: StageCosts) -> tuple[tuple[float, float], ...]:
    """Returns what every rank takes before its first action and after its last."""
    if costs.ends_s is None:
        return ((0.0, 0.0),) * table.num_ranks
    return rank_ends(costs.ends_s, [np.flatnonzero(row).tolist() for row in table.holds])


def memory(table: Table, costs: StageCosts, times: Trace, record: bool = False) -> Memory:
    """Returns the peaks of every rank of a traced table that finished.

    With `record`, the level after each change too.
    """
    change = item_changes(
        table.items,
        table.num_microbatches,
        times.recompute_item,
        costs.nbytes,
        costs.recompute,
        times.target,
    )
    when, amount, bounds = rank_streams(
        table.items,
        table.rank_start,
        costs.nbytes,
        change,
        times.start_s,
        times.end_s,
        times.sent_s,
        times.arrived_s,
        times.target,
        times.rank_of,
    )
    static = table.holds.astype(np.float64) @ np.ascontiguousarray(costs.nbytes[:, STATE])
    return Memory(*merge(when, amount, bounds, static, record))


def evaluate(table: Table, costs: StageCosts, links: Links, with_memory: bool = True) -> Evaluation:
    """Returns makespan, busy times and (if `with_memory`) peak bytes of a table."""
    times = trace(table, costs, links)
    ranks = table.num_ranks
    busy: Floats = np.zeros(ranks)
    np.add.at(busy, times.rank_of, times.end_s - times.start_s)
    first, last, peaks = np.zeros(ranks), np.zeros(ranks), np.zeros(ranks)
    works = table.rank_start[:-1] < table.rank_start[1:]
    first[works] = times.start_s[table.rank_start[:-1][works]]
    last[works] = times.end_s[table.rank_start[1:][works] - 1]
    if with_memory and times.done == len(table.items):
        peaks = memory(table, costs, times).peak_bytes
    for rank, (before, after) in enumerate(ends_of(table, costs)):
        busy[rank] += before + after
        last[rank] = max(last[rank], before) + after
    makespan = float(last.max(initial=0.0))
    return Evaluation(makespan, busy, first, last, peaks, times.done)
