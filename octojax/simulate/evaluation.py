"""The tuner's path through the simulator: makespan, busy times, peak bytes, nothing else."""

from typing import Any, NamedTuple

import numpy as np
from numba import njit
from numpy.typing import NDArray

from octojax.simulate.costs import StageCosts
from octojax.simulate.engine import execute
from octojax.simulate.links import Links
from octojax.simulate.memory import memory_over_time
from octojax.simulate.table import Table

Floats = NDArray[np.float64]


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
    target: NDArray[np.int32]
    rank_of: NDArray[np.int32]
    done: int


@njit(cache=True, nogil=True)
def evaluate_arrays(
    items,
    rank_start,
    num_microbatches,
    holds,
    seconds,
    nbytes,
    recompute,
    speed,
    latency_s,
    bandwidth_bytes_per_s,
    host_s,
    with_memory,
):
    """Returns the fields of `Evaluation`. For callers that are compiled themselves."""
    num_ranks, num_stages = holds.shape
    start, end, sent, arrived, target, rank_of, done = execute(
        items,
        rank_start,
        num_stages,
        num_microbatches,
        seconds,
        nbytes,
        recompute,
        speed,
        latency_s,
        bandwidth_bytes_per_s,
        host_s,
    )
    busy = np.zeros(num_ranks)
    first = np.zeros(num_ranks)
    last = np.zeros(num_ranks)
    peaks = np.zeros(num_ranks)
    makespan = 0.0
    for rank in range(num_ranks):
        a, b = rank_start[rank], rank_start[rank + 1]
        for i in range(a, b):
            busy[rank] += end[i] - start[i]
        if a < b:
            first[rank] = start[a]
            last[rank] = end[b - 1]
            makespan = max(makespan, last[rank])
    if with_memory and done == len(items):
        peaks = memory_over_time(
            items,
            rank_start,
            num_stages,
            num_microbatches,
            nbytes,
            recompute,
            holds,
            start,
            end,
            sent,
            arrived,
            target,
            rank_of,
            False,
        )[0]
    return makespan, busy, first, last, peaks, done


def _arguments(costs: StageCosts, links: Links) -> tuple[Any, Any, Any, Any, Any, Any, Any]:
    return (
        costs.seconds,
        costs.nbytes,
        costs.recompute,
        links.speed,
        links.latency_s,
        links.bandwidth_bytes_per_s,
        links.host_cost_s,
    )


def evaluate(table: Table, costs: StageCosts, links: Links, memory: bool = True) -> Evaluation:
    """Returns makespan, busy times and (if `memory`) peak bytes of a table."""
    return Evaluation(
        *evaluate_arrays(
            table.items,
            table.rank_start,
            table.num_microbatches,
            table.holds,
            *_arguments(costs, links),
            memory,
        )
    )


def trace(table: Table, costs: StageCosts, links: Links) -> Trace:
    """Returns start and end of every item and transfer of a table."""
    return Trace(
        *execute(
            table.items,
            table.rank_start,
            table.num_stages,
            table.num_microbatches,
            *_arguments(costs, links),
        )
    )
