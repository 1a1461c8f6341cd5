"""The compiled inner loop: a table and costs in, start and end of everything out.

Asynchronous transfers make the simulation a plain data flow: an item starts when its rank is
free and its inputs have arrived, and a transfer starts when its producer has ended and the
transfers that the same sender put on the same link before it have left. Nothing depends on a
global clock, so each rank runs ahead until it waits for a value, and every item is visited
once. The functions work on arrays alone and may be called from other compiled code.
"""

from typing import NamedTuple

import numpy as np
from numba import njit

from octojax.simulate.costs import StageCosts
from octojax.simulate.links import Links
from octojax.simulate.table import Table

_F, _B, _I, _W, _R = range(5)
_RESIDUAL, _WEIGHT_RESIDUAL, _OUTPUT, _INPUT, _STATE = range(5)


class Evaluation(NamedTuple):
    """What the tuner needs to know of a plan: (ranks,) arrays and the makespan.

    `done` is the number of items that ran; if it is below the table's length, the order
    deadlocks and the other figures mean nothing. `peak_bytes` is static where memory was off.
    """

    makespan_s: float
    busy_s: np.ndarray
    first_s: np.ndarray
    last_s: np.ndarray
    peak_bytes: np.ndarray
    done: int


class Trace(NamedTuple):
    """Times of everything. Row i belongs to item i; column 0 is F's output, 1 the gradient."""

    start_s: np.ndarray  # (items,)
    end_s: np.ndarray
    sent_s: np.ndarray  # (items, 2) start of the transfer, NaN where none
    arrived_s: np.ndarray  # (items, 2) its end
    target: np.ndarray  # (items, 2) int32 consumer item, -1 where no transfer
    rank_of: np.ndarray  # (items,) int32
    done: int


@njit(cache=True, nogil=True)
def index_items(items, rank_start, num_stages, num_microbatches):
    """Returns where each (stage, microbatch) has its F, its B or I, its R, and items' ranks."""
    cells = num_stages * num_microbatches
    forward_item = np.full(cells, -1, np.int32)
    backward_item = np.full(cells, -1, np.int32)
    recompute_item = np.full(cells, -1, np.int32)
    rank_of = np.empty(len(items), np.int32)
    for rank in range(len(rank_start) - 1):
        for i in range(rank_start[rank], rank_start[rank + 1]):
            rank_of[i] = rank
            kind = items[i, 0]
            cell = items[i, 1] * num_microbatches + items[i, 2]
            if kind == _F:
                forward_item[cell] = i
                if items[i, 3] >= 0:
                    backward_item[items[i, 3] * num_microbatches + items[i, 4]] = i
            elif kind == _B or kind == _I:
                backward_item[cell] = i
            elif kind == _R:
                recompute_item[cell] = i
    return forward_item, backward_item, recompute_item, rank_of


@njit(cache=True, nogil=True)
def _half(
    kind, stage, microbatch, rank, num_stages, num_microbatches,
    forward_item, backward_item, rank_of,
):  # fmt: skip
    """Returns the producer and consumer items of one action's input and output, else -1.

    -2 as a producer means that it exists nowhere in the table.
    """
    cell = stage * num_microbatches + microbatch
    before = after = -1
    if kind == _F:
        if stage > 0:
            before = forward_item[cell - num_microbatches]
            before = -2 if before < 0 else before
        if stage < num_stages - 1:
            after = forward_item[cell + num_microbatches]
    elif kind == _B or kind == _I:
        if stage < num_stages - 1:
            before = backward_item[cell + num_microbatches]
            before = -2 if before < 0 else before
        if stage > 0:
            after = backward_item[cell - num_microbatches]
    return before, after


@njit(cache=True, nogil=True)
def execute(
    items, rank_start, num_stages, num_microbatches,
    seconds, nbytes, recompute, speed, latency_s, byte_s, host_s,
):  # fmt: skip
    """Runs the table and returns the fields of `Trace`.

    `speed` is (ranks,), `latency_s` and `byte_s` (seconds per byte) are (ranks, ranks).
    """
    num_ranks = len(rank_start) - 1
    n = len(items)
    forward_item, backward_item, recompute_item, rank_of = index_items(
        items, rank_start, num_stages, num_microbatches
    )
    start = np.full(n, np.nan)
    end = np.full(n, np.nan)
    sent = np.full((n, 2), np.nan)
    arrived = np.full((n, 2), np.nan)
    target = np.full((n, 2), -1, np.int32)
    input_done = np.zeros(num_stages * num_microbatches, np.bool_)  # I or B has ended
    link_free = np.zeros((num_ranks, num_ranks))
    head = rank_start[:-1].copy()
    free = np.zeros(num_ranks)
    stack = np.arange(num_ranks - 1, -1, -1).astype(np.int32)
    queued = np.ones(num_ranks, np.bool_)
    depth = num_ranks
    done = 0
    while depth > 0:
        depth -= 1
        rank = stack[depth]
        queued[rank] = False
        while head[rank] < rank_start[rank + 1]:
            i = head[rank]
            ready = free[rank]
            duration = 0.0
            transfers = 0
            blocked = False
            pair = items[i, 3] >= 0
            for half in range(2):
                if half == 1 and not pair:
                    break
                kind = items[i, 0] if half == 0 else _B
                stage = items[i, 1] if half == 0 else items[i, 3]
                microbatch = items[i, 2] if half == 0 else items[i, 4]
                cell = stage * num_microbatches + microbatch
                duration += seconds[stage, kind]
                if kind == _W:
                    blocked = blocked or not input_done[cell]
                    continue
                if kind != _F:
                    f = forward_item[cell]
                    blocked = blocked or f < 0 or np.isnan(end[f])
                    if kind != _R and recompute[stage]:
                        again = recompute_item[cell]
                        if again < 0:
                            duration += seconds[stage, _F]
                        else:
                            blocked = blocked or np.isnan(end[again])
                before, after = _half(
                    kind, stage, microbatch, rank, num_stages, num_microbatches,
                    forward_item, backward_item, rank_of,
                )  # fmt: skip
                if before == -2:
                    blocked = True
                elif before >= 0:
                    if rank_of[before] == rank:
                        at = end[before]
                    else:
                        at = arrived[before, 0 if kind == _F else 1]
                        transfers += 1
                    if np.isnan(at):
                        blocked = True
                    elif at > ready:
                        ready = at
                if after >= 0 and rank_of[after] != rank:
                    transfers += 1
            if blocked:
                break
            start[i] = ready
            finish = ready + (duration / speed[rank] + transfers * host_s)
            end[i] = finish
            free[rank] = finish
            head[rank] = i + 1
            done += 1
            for half in range(2):
                if half == 1 and not pair:
                    break
                kind = items[i, 0] if half == 0 else _B
                stage = items[i, 1] if half == 0 else items[i, 3]
                microbatch = items[i, 2] if half == 0 else items[i, 4]
                if kind == _B or kind == _I:
                    input_done[stage * num_microbatches + microbatch] = True
                before, after = _half(
                    kind, stage, microbatch, rank, num_stages, num_microbatches,
                    forward_item, backward_item, rank_of,
                )  # fmt: skip
                if after < 0:
                    continue
                other = rank_of[after]
                if other != rank:
                    slot = 0 if kind == _F else 1
                    size = nbytes[stage, _OUTPUT if kind == _F else _INPUT]
                    leaves = max(finish, link_free[rank, other])
                    occupied = size * byte_s[rank, other]
                    sent[i, slot] = leaves
                    arrived[i, slot] = leaves + (latency_s[rank, other] + occupied)
                    link_free[rank, other] = leaves + occupied
                    target[i, slot] = after
                    if not queued[other]:
                        queued[other] = True
                        stack[depth] = other
                        depth += 1
    return start, end, sent, arrived, target, rank_of, done


@njit(cache=True, nogil=True)
def _own_bytes(items, i, at_end, nbytes, recompute, recompute_item, num_microbatches):
    """Returns the change in residuals on the item's rank at its start, or at its end."""
    change = 0.0
    pair = items[i, 3] >= 0
    for half in range(2):
        if half == 1 and not pair:
            break
        kind = items[i, 0] if half == 0 else _B
        stage = items[i, 1] if half == 0 else items[i, 3]
        microbatch = items[i, 2] if half == 0 else items[i, 4]
        residual = nbytes[stage, _RESIDUAL]
        again = recompute[stage]
        if not at_end:
            if kind == _F:
                change += nbytes[stage, _INPUT] if again else residual
            elif kind == _R and again:
                change += residual
            elif (kind == _I or kind == _B) and again:
                if recompute_item[stage * num_microbatches + microbatch] < 0:
                    change += residual
        elif kind == _I or kind == _B:
            change -= residual
            if again:
                change -= nbytes[stage, _INPUT]
            if kind == _I:
                change += nbytes[stage, _WEIGHT_RESIDUAL]
        elif kind == _W:
            change -= nbytes[stage, _WEIGHT_RESIDUAL]
    return change


@njit(cache=True, nogil=True)
def memory(
    items, rank_start, num_stages, num_microbatches, nbytes, recompute, holds,
    start, end, sent, arrived, target, rank_of, record,
):  # fmt: skip
    """Returns peak bytes per rank and, if `record`, `(times, bytes, bounds)` of every change.

    A rank's own items, the transfers on each link out and on each link in are streams that
    are sorted already, so they are merged. All changes at one instant count as one, so a
    value released when another is allocated is not counted beside it.
    """
    num_ranks = len(rank_start) - 1
    _, _, recompute_item, _ = index_items(items, rank_start, num_stages, num_microbatches)
    n = len(items)
    count = np.zeros((num_ranks, num_ranks), np.int32)
    received = np.zeros(n)  # bytes of inputs that item i frees at its end
    total = 0
    for i in range(n):
        for slot in range(2):
            if target[i, slot] >= 0:
                count[rank_of[i], rank_of[target[i, slot]]] += 1
                total += 1
    offset = np.zeros(num_ranks * num_ranks + 1, np.int32)
    for link in range(num_ranks * num_ranks):
        offset[link + 1] = offset[link] + count[link // num_ranks, link % num_ranks]
    sent_by = np.empty(total, np.int32)  # transfers as 2 * item + slot, link after link
    size_of = np.zeros(2 * n)
    fill = offset[:-1].copy()
    for i in range(n):
        for slot in range(2):
            j = target[i, slot]
            if j < 0:
                continue
            if slot == 0:
                size = nbytes[items[i, 1], _OUTPUT]
            elif items[i, 3] >= 0:
                size = nbytes[items[i, 3], _INPUT]
            else:
                size = nbytes[items[i, 1], _INPUT]
            received[j] += size
            size_of[2 * i + slot] = size
            link = rank_of[i] * num_ranks + rank_of[j]
            sent_by[fill[link]] = 2 * i + slot
            fill[link] += 1
    room = 2 * n + 2 * total + num_ranks if record else 1
    times = np.empty(room)
    levels = np.empty(room)
    bounds = np.zeros(num_ranks + 1, np.int64)
    used = 0
    peaks = np.zeros(num_ranks)
    at = np.empty(2 * num_ranks, np.int32)
    stop = np.empty(2 * num_ranks, np.int32)
    clock = np.empty(2 * num_ranks + 1)  # when each stream changes next; the last is our own
    for rank in range(num_ranks):
        level = 0.0
        for stage in range(num_stages):
            if holds[rank, stage]:
                level += nbytes[stage, _STATE]
        peak = level
        streams = 0
        for other in range(num_ranks):
            for outward in range(2):
                link = rank * num_ranks + other if outward else other * num_ranks + rank
                if offset[link] < offset[link + 1]:
                    at[streams] = offset[link] * 2 + outward
                    stop[streams] = offset[link + 1] * 2
                    transfer = sent_by[offset[link]]
                    i, slot = transfer // 2, transfer % 2
                    clock[streams] = arrived[i, slot] if outward else sent[i, slot]
                    streams += 1
        own = 2 * rank_start[rank]  # 2 * item + (1 at its end)
        last = 2 * rank_start[rank + 1]
        clock[streams] = start[own // 2] if own < last else np.inf
        now = 0.0
        if record:
            times[used], levels[used] = 0.0, level
        while True:
            pick = 0
            for s in range(1, streams + 1):
                if clock[s] < clock[pick]:
                    pick = s
            when = clock[pick]
            if when > now:  # all changes at `now` are in
                if level > peak:
                    peak = level
                if record and level != levels[used]:
                    if times[used] != now:
                        used += 1
                        times[used] = now
                    levels[used] = level
            if when == np.inf:
                break
            now = max(now, when)
            if pick == streams:
                i = own // 2
                level += _own_bytes(
                    items, i, own % 2, nbytes, recompute, recompute_item, num_microbatches
                )
                if own % 2:
                    level += size_of[2 * i] + size_of[2 * i + 1] - received[i]
                own += 1
                if own < last:
                    clock[pick] = end[own // 2] if own % 2 else start[own // 2]
                else:
                    clock[pick] = np.inf
            else:
                outward = at[pick] % 2
                transfer = sent_by[at[pick] // 2]
                level += -size_of[transfer] if outward else size_of[transfer]
                at[pick] += 2
                if at[pick] < stop[pick]:
                    transfer = sent_by[at[pick] // 2]
                    i, slot = transfer // 2, transfer % 2
                    clock[pick] = arrived[i, slot] if outward else sent[i, slot]
                else:
                    clock[pick] = np.inf
        peaks[rank] = peak
        if record:
            used += 1
        bounds[rank + 1] = used
    return peaks, times[:used], levels[:used], bounds


@njit(cache=True, nogil=True)
def live_peaks(items, rank_start):
    """Returns per rank the most live (stage, microbatch)s: freed at B or I, and at B or W."""
    num_ranks = len(rank_start) - 1
    peaks = np.zeros((num_ranks, 2), np.int64)
    for rank in range(num_ranks):
        live = 0
        kept = 0
        for i in range(rank_start[rank], rank_start[rank + 1]):
            kind = items[i, 0]
            if kind == _F:
                live += 1
                kept += 1
                peaks[rank, 0] = max(peaks[rank, 0], live)
                peaks[rank, 1] = max(peaks[rank, 1], kept)
            if kind == _B or kind == _I or items[i, 3] >= 0:
                live -= 1
            if kind == _B or kind == _W or items[i, 3] >= 0:
                kept -= 1
    return peaks


@njit(cache=True, nogil=True)
def _evaluate(
    items, rank_start, num_microbatches, holds, seconds, nbytes, recompute,
    speed, latency_s, byte_s, host_s, with_memory,
):  # fmt: skip
    num_ranks, num_stages = holds.shape
    start, end, sent, arrived, target, rank_of, done = execute(
        items, rank_start, num_stages, num_microbatches, seconds, nbytes, recompute,
        speed, latency_s, byte_s, host_s,
    )  # fmt: skip
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
        peaks = memory(
            items, rank_start, num_stages, num_microbatches, nbytes, recompute, holds,
            start, end, sent, arrived, target, rank_of, False,
        )[0]  # fmt: skip
    return makespan, busy, first, last, peaks, done


def evaluate(table: Table, costs: StageCosts, links: Links, memory: bool = True) -> Evaluation:
    """Returns makespan, busy time and (if `memory`) peak bytes of a table: the tuner's path."""
    return Evaluation(
        *_evaluate(
            table.items,
            table.rank_start,
            table.num_microbatches,
            table.holds,
            costs.seconds,
            costs.nbytes,
            costs.recompute,
            links.speed,
            links.latency_s,
            links.byte_s,
            links.host_cost_s,
            memory,
        )  # fmt: skip
    )


def trace(table: Table, costs: StageCosts, links: Links) -> Trace:
    """Returns start and end of every item and transfer of a table."""
    return Trace(
        *execute(
            table.items,
            table.rank_start,
            table.num_stages,
            table.num_microbatches,
            costs.seconds,
            costs.nbytes,
            costs.recompute,
            links.speed,
            links.latency_s,
            links.byte_s,
            links.host_cost_s,
        )  # fmt: skip
    )
