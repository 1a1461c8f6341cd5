"""Memory of every rank over time, compiled.

    from F's start         residuals (with recompute: only the stage's input)
    from R's, I's or B's   with recompute: the rebuilt residuals
    until I's or B's end   residuals; after I, what W still needs stays until W's end
    around a transfer      its value: on the sender from the producer's end to the transfer's,
                           on the receiver from the transfer's start to the consumer's end

A rank's own items, and the transfers on each link out and on each link in, change memory in
streams that are sorted already, so the streams are merged. All changes at one instant count as
one: what is freed when something else is allocated is not counted beside it.
"""

import numpy as np
from numba import njit

from octojax.simulate.engine import (
    BACKWARD,
    FORWARD,
    INPUT,
    INPUT_GRAD,
    OUTPUT,
    RECOMPUTE,
    WEIGHT_GRAD,
    half_of,
    index_items,
)

RESIDUAL, WEIGHT_RESIDUAL, STATE = 0, 1, 4  # columns of `StageCosts.nbytes`


@njit(cache=True, nogil=True)
def item_changes(items, rank_start, num_stages, num_microbatches, nbytes, recompute, target):
    """Returns (items, 2): the change in bytes on an item's rank at its start and at its end."""
    n = len(items)
    change = np.zeros((n, 2))
    _, _, recompute_item, _ = index_items(items, rank_start, num_stages, num_microbatches)
    for i in range(n):
        for half in range(2 if items[i, 3] >= 0 else 1):
            kind, stage, microbatch = half_of(items, i, half)
            again = recompute[stage]
            residual = nbytes[stage, RESIDUAL]
            if kind == FORWARD:
                change[i, 0] += nbytes[stage, INPUT] if again else residual
            elif kind == WEIGHT_GRAD:
                change[i, 1] -= nbytes[stage, WEIGHT_RESIDUAL]
            elif kind == RECOMPUTE:
                if again:
                    change[i, 0] += residual
            else:
                if again:
                    change[i, 1] -= nbytes[stage, INPUT]
                    if recompute_item[stage * num_microbatches + microbatch] < 0:
                        change[i, 0] += residual
                change[i, 1] -= residual
                if kind == INPUT_GRAD:
                    change[i, 1] += nbytes[stage, WEIGHT_RESIDUAL]
            for slot in range(2):
                if target[i, slot] >= 0 and (slot == 0) == (kind == FORWARD):
                    change[i, 1] += nbytes[stage, OUTPUT + slot]
                    change[target[i, slot], 1] -= nbytes[stage, OUTPUT + slot]
    return change


@njit(cache=True, nogil=True)
def rank_streams(items, rank_start, nbytes, change, start, end, sent, arrived, target, rank_of):
    """Returns `when`, `amount` of every change, and the bounds of their sorted streams.

    Rank r's streams are `r * (2 * ranks + 1)` and on: first its items, then for every other
    rank the transfers to it and the transfers from it.
    """
    num_ranks = len(rank_start) - 1
    width = 2 * num_ranks + 1
    bounds = np.zeros(num_ranks * width + 1, np.int64)
    when = amount = np.empty(0)
    place = bounds
    for fill in range(2):  # first count, then place
        if fill:
            for s in range(num_ranks * width):
                bounds[s + 1] += bounds[s]
            when = np.empty(bounds[-1])
            amount = np.empty(bounds[-1])
            place = bounds[:-1].copy()
        for i in range(len(items)):
            rank = rank_of[i]
            for side in range(2):
                if change[i, side] == 0.0:
                    continue
                s = rank * width
                if fill:
                    when[place[s]] = end[i] if side else start[i]
                    amount[place[s]] = change[i, side]
                    place[s] += 1
                else:
                    bounds[s + 1] += 1
            for slot in range(2):
                if target[i, slot] < 0:
                    continue
                other = rank_of[target[i, slot]]
                stage = items[i, 3] if slot == 1 and items[i, 3] >= 0 else items[i, 1]
                size = nbytes[stage, OUTPUT + slot]
                if size == 0.0:
                    continue
                outward = rank * width + 1 + 2 * other
                inward = other * width + 2 + 2 * rank
                if fill:
                    when[place[outward]] = arrived[i, slot]
                    amount[place[outward]] = -size
                    place[outward] += 1
                    when[place[inward]] = sent[i, slot]
                    amount[place[inward]] = size
                    place[inward] += 1
                else:
                    bounds[outward + 1] += 1
                    bounds[inward + 1] += 1
    for s in range(num_ranks * width):
        sort_stream(when, amount, bounds[s], bounds[s + 1])
    return when, amount, bounds


@njit(cache=True, nogil=True)
def sort_stream(when, amount, low, high):
    """Sorts one stream in place. Only lowered tables, which may send out of order, need it."""
    for i in range(low + 1, high):
        time, size = when[i], amount[i]
        j = i - 1
        while j >= low and when[j] > time:
            when[j + 1], amount[j + 1] = when[j], amount[j]
            j -= 1
        when[j + 1], amount[j + 1] = time, size


@njit(cache=True, nogil=True)
def merge(when, amount, bounds, first, width, level, times, levels):
    """Returns the peak of one rank's merged streams, its last level, and the changes recorded.

    Changes go to `times` and `levels` where those are not empty.
    """
    record = len(times) > 0
    at = np.empty(width, np.int64)
    stop = np.empty(width, np.int64)
    clock = np.empty(width)
    streams = 0
    for s in range(first, first + width):
        if bounds[s] < bounds[s + 1]:
            at[streams], stop[streams] = bounds[s], bounds[s + 1]
            clock[streams] = when[bounds[s]]
            streams += 1
    peak = level
    now = 0.0
    used = 0
    if record:
        times[0], levels[0] = 0.0, level
        used = 1
    while streams > 0:
        pick = 0
        soonest = clock[0]
        for s in range(1, streams):
            if clock[s] < soonest:
                pick, soonest = s, clock[s]
        if soonest > now:
            peak = max(peak, level)
            if record and levels[used - 1] != level:
                if times[used - 1] != now:
                    used += 1
                times[used - 1], levels[used - 1] = now, level
            now = soonest
        level += amount[at[pick]]
        at[pick] += 1
        if at[pick] < stop[pick]:
            clock[pick] = when[at[pick]]
        else:
            streams -= 1
            at[pick], stop[pick], clock[pick] = at[streams], stop[streams], clock[streams]
    peak = max(peak, level)
    if record and levels[used - 1] != level:
        if times[used - 1] != now:
            used += 1
        times[used - 1], levels[used - 1] = now, level
    return peak, level, used


@njit(cache=True, nogil=True)
def memory_over_time(
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
    record,
):
    """Returns peak bytes per rank, and if `record` the `times`, `levels` and their bounds."""
    num_ranks = len(rank_start) - 1
    width = 2 * num_ranks + 1
    change = item_changes(
        items, rank_start, num_stages, num_microbatches, nbytes, recompute, target
    )
    when, amount, bounds = rank_streams(
        items, rank_start, nbytes, change, start, end, sent, arrived, target, rank_of
    )
    room = len(when) + num_ranks if record else 0
    times = np.empty(room)
    levels = np.empty(room)
    peaks = np.zeros(num_ranks)
    traces = np.zeros(num_ranks + 1, np.int64)
    for rank in range(num_ranks):
        static = 0.0
        for stage in range(num_stages):
            if holds[rank, stage]:
                static += nbytes[stage, STATE]
        begin = traces[rank]
        peaks[rank], _, used = merge(
            when, amount, bounds, rank * width, width, static, times[begin:], levels[begin:]
        )
        traces[rank + 1] = begin + used
    return peaks, times[: traces[-1]], levels[: traces[-1]], traces


@njit(cache=True, nogil=True)
def live_peaks(items, rank_start):
    """Returns per rank the most live (stage, microbatch)s: freed at B or I, and at B or W."""
    num_ranks = len(rank_start) - 1
    peaks = np.zeros((num_ranks, 2), np.int64)
    for rank in range(num_ranks):
        until_input, until_weight = 0, 0
        for i in range(rank_start[rank], rank_start[rank + 1]):
            for half in range(2 if items[i, 3] >= 0 else 1):
                kind, _, _ = half_of(items, i, half)
                if kind == FORWARD:
                    until_input += 1
                    until_weight += 1
                    peaks[rank, 0] = max(peaks[rank, 0], until_input)
                    peaks[rank, 1] = max(peaks[rank, 1], until_weight)
                elif kind <= INPUT_GRAD:
                    until_input -= 1
                    until_weight -= kind == BACKWARD
                elif kind == WEIGHT_GRAD:
                    until_weight -= 1
    return peaks
