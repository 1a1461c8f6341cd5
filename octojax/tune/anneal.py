"""Simulated annealing over ranks of layers, stage borders and priorities, compiled.

Every move changes one thing; a move whose best imaginable makespan (busiest rank's load from
its first arrival on) is hopeless is dropped before a schedule is built. What a promising move
makes is scheduled from its end and from its front again (`octojax.tune.justify`), so that
priorities follow the stages they were made for.
"""

import numpy as np
from numba import njit

from octojax.simulate.jit import CALLED, INNER
from octojax.tune.candidate import LATE_S
from octojax.tune.constraints import force, keeps
from octojax.tune.justify import judged, keys_of_layers

MOVES = (
    "relocate a layer",
    "swap two layers",
    "swap two close layers",
    "exchange two ranks for a while",
    "move a stage border",
    "shift the ranks of a run of layers",
    "exchange the ranks of two stages",
    "split or join stages",
    "shift whole kinds",
    "recompute or keep",
    "fuse or split a backward",
    "even out two ranks",
)
PHASE_OF_MOVE = (0, 0, 0, 1, 0, 0, 1, 0, 2, 2, 2, 0)
"""0 partition, 1 placement, 2 schedule."""
SPLIT_OR_JOIN, SHIFT, RECOMPUTE, EVEN_OUT = 7, 8, 9, 11


@njit(**CALLED)
def anneal(
    rank_L, cut_L, recompute_L, fused_L, key_LKM, patience_s, costs_4L, bytes_4L, speed_P,
    latency_PP, s_per_byte_PP, host_s, capacity_P, microbatches, layers_P, ranks_S, recompute_S,
    weights, rounds, steps, hot, cold, seed,
):  # fmt: skip
    """Returns `(makespan, best candidate's arrays, last makespan, last candidate's arrays,
    evaluations per phase)`.

    `weights` are the cumulated chances of the moves (the last is 1). A move's outcome is
    justified at most `rounds` times; with 0, keys stay what they are. Makes `steps` moves at
    temperatures from `hot` to `cold` seconds. `layers_P`, `ranks_S`, `recompute_S` are what no
    move may change (`octojax.tune.constraints`), empty where it may.
    """
    np.random.seed(seed)
    layers, ranks = rank_L.shape[0], speed_P.shape[0]
    out_N4 = np.zeros((3 * layers * microbatches, 4), np.int64)
    start_N, peak_P = np.empty(3 * layers * microbatches), np.empty(ranks)
    counts = np.zeros(3, np.int64)
    current, span, first_S, key_SKM = judged(
        rank_L, cut_L, recompute_L, fused_L, key_LKM, patience_s, costs_4L, bytes_4L, speed_P,
        latency_PP, s_per_byte_PP, host_s, capacity_P, microbatches, out_N4, start_N, peak_P,
        rounds, np.inf, 0.0,
    )  # fmt: skip
    keys = key_LKM
    if current < np.inf and rounds > 0:
        keys = keys_of_layers(first_S, key_SKM, layers)
    now = (rank_L, cut_L, recompute_L, fused_L, keys, patience_s)
    best, kept = span, now
    for step in range(steps):
        heat = hot * (cold / hot) ** (step / steps)
        draw = np.random.random()
        move = 0
        while weights[move] < draw:
            move += 1
        r, c, x, u, n, k = now
        if move <= SPLIT_OR_JOIN or move == EVEN_OUT:
            r, c, x, u = r.copy(), c.copy(), x.copy(), u.copy()
            if move == EVEN_OUT:
                _even_out(r, c, x, u, costs_4L, speed_P)
            else:
                _regroup(move, r, c, x, u, ranks)
            moved = False
            for layer in range(layers):
                moved |= r[layer] != now[0][layer] or c[layer] != now[1][layer]
            if not moved or not keeps(r, c, layers_P, ranks_S):
                continue
            if recompute_S.shape[0] > 0:
                force(r, c, x, recompute_S)
        elif move == SHIFT:
            n, k = n.copy(), k.copy()
            _reprioritize(n, k, best)
        else:
            x, u = x.copy(), u.copy()
            _toggle(r, c, x if move == RECOMPUTE else u)
        if move < SPLIT_OR_JOIN or move == EVEN_OUT:
            bound = least_makespan(r, costs_4L, speed_P, host_s, microbatches)
            if bound > span + 5 * heat:
                continue
        score, length, first_S, key_SKM = judged(
            r, c, x, u, n, k, costs_4L, bytes_4L, speed_P, latency_PP, s_per_byte_PP, host_s,
            capacity_P, microbatches, out_N4, start_N, peak_P,
            rounds, current, LATE_S if np.random.random() < 0.25 else 0.0,
        )  # fmt: skip
        phase = PHASE_OF_MOVE[move]
        counts[1 if phase == 0 and layers_P.shape[0] > 0 else phase] += 1
        if score == np.inf:
            continue
        if score <= current or np.random.random() < np.exp((current - score) / heat):
            if rounds > 0:
                n = keys_of_layers(first_S, key_SKM, layers)
            now = (r, c, x, u, n, k)
            current, span = score, length
            if span < best:
                best, kept = span, now
    return best, kept, span, now, counts


@njit(**INNER)
def _regroup(move, r, c, x, u, ranks):
    """Changes ranks or borders in place, see `MOVES`; flags follow their stages."""
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
    elif move == SPLIT_OR_JOIN:
        c[a] = not c[a]
    _one_flag_a_stage(r, c, x, u)


@njit(**INNER)
def _even_out(r, c, x, u, costs_4L, speed_P):
    """Hands work from one of the busiest ranks to one of the idlest, in place: over a border
    between stages, by a layer alone, or a heavier layer against a lighter one nearby.
    """
    layers, ranks = r.shape[0], speed_P.shape[0]
    load_P, work_L = np.zeros(ranks), np.empty(layers)
    for layer in range(layers):
        work_L[layer] = costs_4L[0, layer] + costs_4L[1, layer] + costs_4L[2, layer]
        load_P[r[layer]] += work_L[layer] / speed_P[r[layer]]
    third = max(1, ranks // 3)
    idle = _ranked(load_P, np.random.randint(third))
    busy = _ranked(load_P, ranks - 1 - np.random.randint(third))
    a = b = np.random.randint(layers)
    draw = np.random.random()
    if draw < 0.5:
        for turn in range(layers):
            b = (a + turn) % layers
            if b + 1 == layers or r[b] == r[b + 1]:
                continue
            if r[b] == busy or (r[b + 1] == idle and np.random.random() < 0.5):
                r[b] = r[b + 1]
                break
            if r[b + 1] == busy or (r[b] == idle and np.random.random() < 0.5):
                r[b + 1] = r[b]
                break
        c[b] = c[b] and r[b] == r[b - 1]
        if b + 1 < layers:
            c[b + 1] = False
    else:
        while r[a] != busy:
            a = (a + 1) % layers
        b = -1
        if draw > 0.7:
            nearest = np.inf
            for layer in range(layers):
                more = work_L[a] - work_L[layer]
                if r[layer] == idle and 0 < more < load_P[busy] - load_P[idle]:
                    far = abs(layer - a) * (0.5 + np.random.random())
                    if far < nearest:
                        nearest, b = far, layer
        r[a] = idle
        if b >= 0:
            r[b] = busy
    _one_flag_a_stage(r, c, x, u)


@njit(**INNER)
def _one_flag_a_stage(r, c, x, u):
    """Gives every layer the flags of its stage's first, in place."""
    for layer in range(1, r.shape[0]):
        if r[layer] == r[layer - 1] and not c[layer]:
            x[layer], u[layer] = x[layer - 1], u[layer - 1]


@njit(**INNER)
def _ranked(load_P, place):
    """Returns the rank at a place in ascending order of load."""
    for r in range(load_P.shape[0]):
        before = 0
        for q in range(load_P.shape[0]):
            before += load_P[q] < load_P[r] or (load_P[q] == load_P[r] and q < r)
        if before == place:
            return r
    return 0


@njit(**INNER)
def _reprioritize(n, k, makespan):
    """Shifts the keys of one kind in place, by some share of the makespan; or draws how long a
    rank waits rather than start a W.
    """
    layers, _, microbatches = n.shape
    by = np.random.normal() * makespan * 0.2 * 10 ** (-3 * np.random.random())
    kind = np.random.randint(3)
    draw = np.random.random()
    if draw < 0.2:
        k[0] = 0.03 * makespan * np.random.random() ** 4
        return
    first = 0 if draw < 0.6 else np.random.randint(microbatches)
    for m in range(first, microbatches):
        share = (m + 1) / microbatches if draw < 0.4 else 1.0
        for layer in range(layers):
            n[layer, kind, m] += by * share


@njit(**INNER)
def _toggle(r, c, flag):
    """Turns the flag of one stage in place."""
    layers = r.shape[0]
    a = np.random.randint(layers)
    while a > 0 and r[a - 1] == r[a] and not c[a]:
        a -= 1
    flag[a] = not flag[a]
    a += 1
    while a < layers and r[a] == r[a - 1] and not c[a]:
        flag[a] = flag[a - 1]
        a += 1


@njit(**INNER)
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


@njit(**CALLED)
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
    least = 0.0
    for r in range(ranks):
        least = max(least, load_P[r] * microbatches + entry_P[r])
    return least
