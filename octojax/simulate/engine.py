"""The compiled inner loop: a table and costs in, start and end of everything out.

Asynchronous transfers make the simulation a plain data flow: an item starts when its rank is
free and its inputs have arrived, and a transfer starts when its producer has ended and the
transfers that the same sender put on the same link before it have left. Nothing depends on a
global clock, so each rank runs ahead until it waits for a value, and every item is visited
once. Functions are called one after another from Python, not from each other, because the
compiler would compile a callee anew inside each caller.

A transfer occupies its link for bytes / bandwidth; the latency is pure delay, as on a network
(the published tables' figures with latency 1 hold only so: an overlapped pair of DualPipe
sends two values at one instant over one link, and both arrive after one latency).
"""

import numpy as np
from numba import njit

from octojax.simulate.jit import CALLED, INNER

FORWARD, BACKWARD, INPUT_GRAD, WEIGHT_GRAD, RECOMPUTE = range(5)
OUTPUT, INPUT = 2, 3  # columns of `StageCosts.nbytes`


@njit(**CALLED)
def index_items(items, rank_start, num_stages, num_microbatches):
    """Returns the items that run F, B or I, and R of each stage * microbatches + microbatch,
    -1 where none does, and the rank of each item.
    """
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
            if kind == FORWARD:
                forward_item[cell] = i
                if items[i, 3] >= 0:
                    backward_item[items[i, 3] * num_microbatches + items[i, 4]] = i
            elif kind <= INPUT_GRAD:
                backward_item[cell] = i
            elif kind == RECOMPUTE:
                recompute_item[cell] = i
    return forward_item, backward_item, recompute_item, rank_of


@njit(**INNER)
def half_of(items, i, half):
    """Returns kind, stage and microbatch of the item's first action, or of its second."""
    if half == 0:
        return items[i, 0], items[i, 1], items[i, 2]
    return BACKWARD, items[i, 3], items[i, 4]


@njit(**INNER)
def neighbours(kind, stage, cell, num_stages, num_microbatches, forward_item, backward_item):
    """Returns the items that make an action's input and that take its output.

    -1: there is none, by the pipeline's shape. -2: it is missing in the table.
    """
    before, after = -1, -1
    if kind == FORWARD:
        if stage > 0:
            before = forward_item[cell - num_microbatches]
            before = before if before >= 0 else -2
        if stage < num_stages - 1:
            after = forward_item[cell + num_microbatches]
    elif kind <= INPUT_GRAD:
        if stage < num_stages - 1:
            before = backward_item[cell + num_microbatches]
            before = before if before >= 0 else -2
        if stage > 0:
            after = backward_item[cell - num_microbatches]
    return before, after


@njit(**CALLED)
def execute(
    items,
    rank_start,
    num_microbatches,
    forward_item,
    backward_item,
    recompute_item,
    rank_of,
    seconds,
    nbytes,
    recompute,
    speed,
    latency_s,
    bandwidth_bytes_per_s,
    host_s,
    discount,
    begin,
):
    """Returns start and end (items,), sent, arrived and target (items, 2), done.

    Arguments are those of `index_items`, what it returns, and the fields of `StageCosts` and
    `Links`; rank r is busy until `begin[r]`. Column 0 of the transfers is
    the output of F, column 1 the gradient that B or I sends; `sent` and `arrived` are NaN and
    `target` (the consuming item) -1 where nothing crosses ranks. `done` items ran: fewer than
    all if the order deadlocks, and the rest of `start` and `end` is NaN.
    """
    num_ranks = len(rank_start) - 1
    num_stages = len(seconds)
    n = len(items)
    start = np.full(n, np.nan)
    end = np.full(n, np.nan)
    sent = np.full((n, 2), np.nan)
    arrived = np.full((n, 2), np.nan)
    target = np.full((n, 2), -1, np.int32)
    input_done = np.zeros(num_stages * num_microbatches, np.bool_)  # I or B has ended
    link_free = np.zeros((num_ranks, num_ranks))
    head = rank_start[:-1].copy()
    free = begin.copy()
    stack = np.arange(num_ranks - 1, -1, -1).astype(np.int32)  # ranks that may go on
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
            first = 0.0  # of a pair, its forward
            transfers = 0
            blocked = False
            halves = 2 if items[i, 3] >= 0 else 1
            for half in range(halves):
                kind, stage, microbatch = half_of(items, i, half)
                cell = stage * num_microbatches + microbatch
                first = duration
                duration += seconds[stage, kind]
                if kind == WEIGHT_GRAD:
                    blocked |= not input_done[cell]
                    continue
                if kind != FORWARD:
                    own = forward_item[cell]
                    blocked |= own < 0 or np.isnan(end[own])
                    if kind != RECOMPUTE and recompute[stage]:
                        again = recompute_item[cell]
                        if again < 0:
                            duration += seconds[stage, FORWARD]
                        else:
                            blocked |= np.isnan(end[again])
                before, after = neighbours(
                    kind, stage, cell, num_stages, num_microbatches, forward_item, backward_item
                )
                if before == -2:
                    blocked = True
                elif before >= 0:
                    at = end[before]
                    if rank_of[before] != rank:
                        at = arrived[before, 0 if kind == FORWARD else 1]
                        transfers += 1
                    blocked |= np.isnan(at)
                    ready = max(ready, at)
                if after >= 0 and rank_of[after] != rank:
                    transfers += 1
            if blocked:
                break
            if halves == 2:
                duration -= discount * min(first, duration - first)
            finish = ready + (duration / speed[rank] + transfers * host_s)
            start[i] = ready
            end[i] = finish
            free[rank] = finish
            head[rank] = i + 1
            done += 1
            for half in range(halves):
                kind, stage, microbatch = half_of(items, i, half)
                cell = stage * num_microbatches + microbatch
                if kind == BACKWARD or kind == INPUT_GRAD:  # noqa: SIM109 (slow when compiled)
                    input_done[cell] = True
                _, after = neighbours(
                    kind, stage, cell, num_stages, num_microbatches, forward_item, backward_item
                )
                if after < 0:
                    continue
                other = rank_of[after]
                if other == rank:
                    continue
                slot = 0 if kind == FORWARD else 1
                occupied = nbytes[stage, OUTPUT + slot] / bandwidth_bytes_per_s[rank, other]
                leaves = max(finish, link_free[rank, other])
                sent[i, slot] = leaves
                arrived[i, slot] = leaves + (latency_s[rank, other] + occupied)
                target[i, slot] = after
                link_free[rank, other] = leaves + occupied
                if not queued[other]:
                    queued[other] = True
                    stack[depth] = other
                    depth += 1
    return start, end, sent, arrived, target, done
