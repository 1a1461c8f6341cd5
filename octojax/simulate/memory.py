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
from numpy.typing import NDArray

from octojax.simulate.engine import (
    FORWARD,
    INPUT,
    INPUT_GRAD,
    OUTPUT,
    RECOMPUTE,
    WEIGHT_GRAD,
    half_of,
)
from octojax.simulate.jit import CALLED, INNER

Ints = NDArray[np.int32]

RESIDUAL, WEIGHT_RESIDUAL = 0, 1  # columns of `StageCosts.nbytes`


@njit(**CALLED)
def item_changes(items, num_microbatches, recompute_item, nbytes, recompute, target):
    """Returns (items, 2): the change in bytes on an item's rank at its start and at its end."""
    n = len(items)
    change = np.zeros((n, 2))
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


@njit(**CALLED)
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


@njit(**INNER)
def sort_stream(when, amount, low, high):
    """Sorts one stream in place. Only lowered tables, which may send out of order, need it."""
    for i in range(low + 1, high):
        time, size = when[i], amount[i]
        j = i - 1
        while j >= low and when[j] > time:
            when[j + 1], amount[j + 1] = when[j], amount[j]
            j -= 1
        when[j + 1], amount[j + 1] = time, size


@njit(**CALLED)
def merge(when, amount, bounds, static, record):
    """Returns peak bytes per rank, and if `record` the times and levels of every change.

    `static` is (ranks,) bytes held all along. Rank r's changes are those from `traces[r]` to
    `traces[r + 1]`: `(peaks, times, levels, traces)`.
    """
    num_ranks = len(static)
    width = 2 * num_ranks + 1
    room = len(when) + num_ranks if record else num_ranks
    times = np.empty(room)
    levels = np.empty(room)
    traces = np.zeros(num_ranks + 1, np.int64)
    peaks = np.empty(num_ranks)
    at = np.empty(width, np.int64)
    stop = np.empty(width, np.int64)
    clock = np.empty(width)
    used = 0
    for rank in range(num_ranks):
        streams = 0
        for s in range(rank * width, (rank + 1) * width):
            if bounds[s] < bounds[s + 1]:
                at[streams], stop[streams] = bounds[s], bounds[s + 1]
                clock[streams] = when[bounds[s]]
                streams += 1
        level = static[rank]
        now = 0.0
        last = used
        times[last], levels[last] = now, level
        peaks[rank] = level
        while True:
            pick, soonest = 0, np.inf
            for s in range(streams):
                if clock[s] < soonest:
                    pick, soonest = s, clock[s]
            if soonest > now:  # all changes at `now` are in
                peaks[rank] = max(peaks[rank], level)
                if record and levels[last] != level:
                    last += times[last] != now
                    times[last], levels[last] = now, level
                now = soonest
            if streams == 0:
                break
            level += amount[at[pick]]
            at[pick] += 1
            if at[pick] < stop[pick]:
                clock[pick] = when[at[pick]]
            else:
                streams -= 1
                at[pick], stop[pick], clock[pick] = at[streams], stop[streams], clock[streams]
        used = last + 1
        traces[rank + 1] = used
    return peaks, times[:used], levels[:used], traces
