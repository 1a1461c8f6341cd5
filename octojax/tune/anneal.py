"""Simulated annealing over ranks of layers, stage borders and priorities, compiled.

Every move changes one thing; a move whose best imaginable makespan (busiest rank's load from
its first arrival on) is hopeless is dropped before a schedule is built.
"""

import numpy as np
from numba import njit

from octojax.tune.candidate import KNOBS, evaluate

MOVES = (
    "relocate a layer",
    "swap two layers",
    "swap two close layers",
    "exchange two ranks for a while",
    "move a stage border",
    "shift the ranks of a run of layers",
    "exchange the ranks of two stages",
    "split or join stages",
    "turn a knob",
    "shift priorities",
    "recompute or keep",
    "fuse or split a backward",
)
PHASE_OF_MOVE = (0, 0, 0, 1, 0, 0, 1, 0, 2, 2, 2, 2)
"""0 partition, 1 placement, 2 schedule."""


@njit(cache=True, nogil=True)
def anneal(
    rank_L, cut_L, recompute_L, fused_L, shift_LK, knobs, costs_4L, bytes_4L, speed_P, latency_PP,
    s_per_byte_PP, host_s, capacity_P, microbatches, period, weights, steps, hot, cold, seed,
    current_s,
):  # fmt: skip
    """Returns `(makespan, *arrays of the best candidate, *arrays of the last, its makespan,
    evaluations per phase)`.

    `weights` chances of the moves (cumulated, last is 1). `steps` moves, at temperatures from
    `hot` to `cold` seconds. `current_s` is the start's makespan, or negative: unknown.
    """
    np.random.seed(seed)
    layers, ranks = rank_L.shape[0], speed_P.shape[0]
    out_N4 = np.empty((3 * layers * microbatches, 4), np.int64)
    start_N, peak_P = np.empty(3 * layers * microbatches), np.empty(ranks)
    now = (rank_L, cut_L, recompute_L, fused_L, shift_LK, knobs)
    counts = np.zeros(3, np.int64)
    current = current_s
    if current < 0:
        current = evaluate(
            rank_L, cut_L, recompute_L, fused_L, shift_LK, knobs, costs_4L, bytes_4L, speed_P,
            latency_PP, s_per_byte_PP, host_s, capacity_P, microbatches, period,
            out_N4, start_N, peak_P,
        )  # fmt: skip
        counts[2] += 1
    best, kept = current, now
    total = costs_4L[0].sum()
    for step in range(steps):
        heat = hot * (cold / hot) ** (step / steps)
        r, c, x, u, n, k = (
            now[0].copy(), now[1].copy(), now[2].copy(), now[3].copy(), now[4].copy(),
            now[5].copy(),
        )  # fmt: skip
        dice = np.random.random()
        move = 0
        while weights[move] < dice:
            move += 1
        _change(move, r, c, x, u, n, k, ranks, total)
        if move < 7:
            hope = least_makespan(r, costs_4L, speed_P, host_s, microbatches)
            if hope > current + 5 * heat:
                continue
        made = evaluate(
            r, c, x, u, n, k, costs_4L, bytes_4L, speed_P, latency_PP, s_per_byte_PP, host_s,
            capacity_P, microbatches, period, out_N4, start_N, peak_P,
        )  # fmt: skip
        counts[PHASE_OF_MOVE[move]] += 1
        if made == np.inf:
            continue
        if made <= current or np.random.random() < np.exp((current - made) / heat):
            now, current = (r, c, x, u, n, k), made
            if made < best:
                best, kept = made, now
    return best, kept, current, now, counts


@njit(cache=True, nogil=True)
def _change(move, r, c, x, u, n, k, ranks, total):
    """Changes one thing in place, see `MOVES`."""
    layers = r.shape[0]
    a = np.random.randint(layers)
    if move == 0:
        r[a] = np.random.randint(ranks)
    elif move == 1:
        b = np.random.randint(layers)
        r[a], r[b] = r[b], r[a]
    elif move == 2:
        b = min(layers - 1, a + 1 + np.random.randint(4))
        r[a], r[b] = r[b], r[a]
    elif move == 3:
        p, q = np.random.randint(ranks), np.random.randint(ranks)
        b = (
            layers
            if np.random.random() < 0.2
            else min(layers, a + 1 + np.random.randint(2 * ranks))
        )
        for layer in range(a, b):
            if r[layer] == p:
                r[layer] = q
            elif r[layer] == q:
                r[layer] = p
    elif move == 4:
        while a < layers - 1 and r[a] == r[a + 1] and not c[a + 1]:
            a += 1
        if a < layers - 1:
            if np.random.random() < 0.5:
                r[a + 1] = r[a]
            else:
                r[a] = r[a + 1]
            if c[a + 1]:
                c[a + 1] = False
    elif move == 5:
        b = np.random.randint(layers)
        if np.random.random() < 0.7:
            b = min(layers - 1, a + np.random.randint(1 + 3 * layers // ranks))
        a, b = min(a, b), max(a, b)
        if np.random.random() < 0.5:
            for layer in range(b, a, -1):
                r[layer] = r[layer - 1]
        else:
            for layer in range(a, b):
                r[layer] = r[layer + 1]
    elif move == 6:
        b = np.random.randint(layers)
        p, q = r[a], r[b]
        if p != q:
            _paint(r, c, a, q)
            _paint(r, c, b, p)
    elif move == 7:
        c[a] = not c[a]
    elif move == 8:
        j = np.random.randint(KNOBS)
        if j == 6:
            k[j] = 0.06 * np.random.random() * np.random.random()
        elif j >= 3:
            k[j] = 0.0 if np.random.random() < 0.2 else k[j] + 0.1 * np.random.normal()
        else:
            k[j] += 0.2 * np.random.normal() * (1 + abs(k[j]))
    elif move == 9:
        j = np.random.randint(3)
        far = np.random.random() < 0.15
        b = layers if far else min(layers, a + 1 + np.random.randint(6))
        by = np.random.normal() * 0.3 * np.random.random() * total
        for layer in range(a, b):
            n[layer, j] += by
    else:
        flag = x if move == 10 else u
        while a > 0 and r[a - 1] == r[a] and not c[a]:
            a -= 1
        flag[a] = not flag[a]
        a += 1
        while a < layers and r[a] == r[a - 1] and not c[a]:
            flag[a] = flag[a - 1]
            a += 1


@njit(cache=True, nogil=True)
def _paint(r, c, at, rank):
    """Gives the whole stage of layer `at` to `rank`."""
    was = r[at]
    a = at
    while a > 0 and r[a - 1] == was and not c[a]:
        a -= 1
    b = at
    while b < r.shape[0] - 1 and r[b + 1] == was and not c[b + 1]:
        b += 1
    for layer in range(a, b + 1):
        r[layer] = rank


@njit(cache=True, nogil=True)
def least_makespan(rank_L, costs_4L, speed_P, host_s, microbatches):
    """Returns a time below which no schedule of these layers on these ranks can be: the
    busiest rank's work, begun when the first forward can have reached it.
    """
    ranks = speed_P.shape[0]
    load_P, entry_P = np.zeros(ranks), np.full(ranks, np.inf)
    before = 0.0
    for layer in range(rank_L.shape[0]):
        r = rank_L[layer]
        backward = min(costs_4L[1, layer] + costs_4L[2, layer], costs_4L[3, layer])
        load_P[r] += (costs_4L[0, layer] + backward) / speed_P[r]
        if layer > 0 and rank_L[layer - 1] != r:
            load_P[r] += 2 * host_s
            load_P[rank_L[layer - 1]] += 2 * host_s
        entry_P[r] = min(entry_P[r], before)
        before += costs_4L[0, layer] / speed_P[r]
    return np.max(load_P * microbatches + entry_P)
