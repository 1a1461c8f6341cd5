"""List scheduling on flat arrays: priorities in, a whole schedule and its makespan out.

Every rank, whenever it is free, takes the ready action with the smallest key; if none is
ready it waits for the first to come. One pass gives a schedule and its times under the
simulator's meaning: asynchronous transfers, one at a time per directed link in the sender's
order; host cost on both ends; memory held from F to I, and from I to W.

Within a stage, microbatches keep their order, so a stage offers at most three actions at any
time (the next F, I and W): choosing is one scan over the few stages of a rank.

Legend: S stages, P ranks, M microbatches, K kinds (F=0, I=1, W=2), N actions.
"""

import numpy as np
from numba import njit

F, I, W = 0, 1, 2  # noqa: E741
NEVER = np.inf


@njit(cache=True, nogil=True, error_model="numpy")
def list_schedule(
    rank_S, first_P, held_S, time_SK, send_f_S2, send_i_S2, key_SKM, fused_S, hold_f_S, hold_w_S,
    surge_S, free_P, microbatches, patience_s, cutoff_s, out_N4, start_N, peak_P,
):  # fmt: skip
    """Returns the makespan in seconds, or infinity when memory leaves nothing to run, or as soon
    as the makespan is sure to exceed `cutoff_s`.

    `rank_S` rank of each stage; rank r holds stages `held_S[first_P[r]:first_P[r + 1]]`.
    `time_SK` durations with host costs; `send_f_S2[s]` seconds on the link and latency of the
    transfer s -> s+1, `send_i_S2[s]` of s -> s-1 (unused within a rank). `key_SKM[s, k, m]` are
    the priorities, smallest first. `fused_S`: I does all the backward, W does not exist.
    Bytes: F takes `hold_f_S`, I `surge_S` more while it runs; I leaves `hold_w_S` for W; rank r
    has `free_P[r]` for all that.
    `patience_s`: a W is put off if an F or I comes within so many seconds.
    Filled: `out_N4` rows (rank, stage, kind, microbatch) in the order of their starts,
    `start_N` their starts, `peak_P` most bytes of residuals alive.
    """
    stages, ranks, M = rank_S.shape[0], first_P.shape[0] - 1, microbatches
    arrive_f = np.empty((stages, M))
    arrive_i = np.full((stages, M), NEVER)
    end_f, end_i = np.empty((stages, M)), np.empty((stages, M))
    got_f = np.zeros(stages, np.int64)  # inputs that have arrived; they come in order
    done = np.zeros((stages, 3), np.int64)
    # What each stage offers next: by position in `held_S`, so that a rank's offers are adjacent.
    place_S = np.empty(stages, np.int64)
    for at in range(stages):
        place_S[held_S[at]] = at
    ready = np.full((stages, 3), NEVER)
    key = np.empty((stages, 3))
    for s in range(stages):
        for k in range(3):
            key[place_S[s], k] = key_SKM[s, k, 0]
    clock, held = np.zeros(ranks), np.zeros(ranks)
    link = np.zeros((ranks, ranks))
    tight = np.zeros(ranks, np.bool_)  # whether memory could bind at all
    left = np.zeros(ranks)  # seconds of work that are not scheduled yet
    total = 0
    for s in range(stages):
        left[rank_S[s]] += M * (time_SK[s, F] + time_SK[s, I] + time_SK[s, W])
        total += (2 if fused_S[s] else 3) * M
        held[rank_S[s]] += M * max(hold_f_S[s], hold_w_S[s]) + surge_S[s]
    for r in range(ranks):
        tight[r] = held[r] > free_P[r]
        held[r] = peak_P[r] = 0.0
    when = np.full(ranks, NEVER)
    choice = np.zeros(ranks, np.int64)  # 3 * place + kind
    for m in range(M):
        arrive_f[0, m] = 0.0
    got_f[0] = M
    ready[place_S[0], F] = 0.0
    stale = rank_S[0]
    also = -1  # a second rank whose choice must be made again
    makespan = 0.0
    for n in range(total):
        for r in (stale, also):
            if r < 0:
                continue
            room, rest, oldest = NEVER, 0.0, 0
            if tight[r]:
                room = free_P[r] - held[r]
                oldest, rest = _oldest(
                    first_P[r], first_P[r + 1], held_S, done, hold_f_S, hold_w_S, surge_S, M
                )
            when[r], choice[r] = _choose(
                first_P[r], first_P[r + 1], ready, key, clock[r], patience_s,
                tight[r], room, rest, oldest, held_S, done, hold_f_S, hold_w_S, surge_S, fused_S,
            )  # fmt: skip
        r = 0
        for q in range(1, ranks):
            if when[q] < when[r]:
                r = q
        begin = when[r]
        if begin == NEVER:
            return NEVER
        at, k = choice[r] // 3, choice[r] % 3
        s = held_S[at]
        m = done[s, k]
        done[s, k] = m + 1
        if m + 1 < M:
            key[at, k] = key_SKM[s, k, m + 1]
        end = begin + time_SK[s, k]
        clock[r] = end
        makespan = max(makespan, end)
        left[r] -= time_SK[s, k]
        if end + left[r] > cutoff_s:
            return NEVER
        stale, also = r, -1
        out_N4[n, 0], out_N4[n, 1], out_N4[n, 2], out_N4[n, 3] = r, s, k, m
        start_N[n] = begin
        to, kind, comes = -1, k, end
        if k == F:
            held[r] += hold_f_S[s]
            end_f[s, m] = end
            ready[at, F] = arrive_f[s, m + 1] if m + 1 < got_f[s] else NEVER
            if s + 1 == stages:
                arrive_i[s, m] = end
            else:
                to = s + 1
                if rank_S[to] != r:
                    comes = max(end, link[r, rank_S[to]]) + send_f_S2[s, 0]
                    link[r, rank_S[to]] = comes
                    comes += send_f_S2[s, 1]
                arrive_f[to, m] = comes
                got_f[to] = m + 1
            if done[s, I] == m:
                ready[at, I] = max(end, arrive_i[s, m])
        elif k == I:
            peak_P[r] = max(peak_P[r], held[r] + surge_S[s])
            held[r] += (0.0 if fused_S[s] else hold_w_S[s]) - hold_f_S[s]
            end_i[s, m] = end
            ready[at, I] = max(end_f[s, m + 1], arrive_i[s, m + 1]) if m + 1 < done[s, F] else NEVER
            if done[s, W] == m and not fused_S[s]:
                ready[at, W] = end
            if s > 0:
                to = s - 1
                if rank_S[to] != r:
                    comes = max(end, link[r, rank_S[to]]) + send_i_S2[s, 0]
                    link[r, rank_S[to]] = comes
                    comes += send_i_S2[s, 1]
                arrive_i[to, m] = comes
        else:
            held[r] -= hold_w_S[s]
            ready[at, W] = end_i[s, m + 1] if m + 1 < done[s, I] else NEVER
        peak_P[r] = max(peak_P[r], held[r])
        if to < 0 or done[to, kind] != m or (kind == I and done[to, F] <= m):
            continue
        spot = place_S[to]
        ready[spot, kind] = comes if kind == F else max(comes, end_f[to, m])
        q = rank_S[to]
        if q == r:
            continue
        if tight[q]:
            also = q
            continue
        comes = max(ready[spot, kind], clock[q])
        weak = when[q] < NEVER and choice[q] % 3 == W and comes <= when[q] + patience_s
        known = key[choice[q] // 3, choice[q] % 3]
        if comes < when[q] or weak or (comes == when[q] and key[spot, kind] < known):
            when[q], choice[q] = comes, 3 * spot + kind
    return makespan


@njit(cache=True, nogil=True, error_model="numpy")
def _choose(
    first, last, ready, key, now, patience_s,
    tight, room, rest, oldest, held_S, done, hold_f_S, hold_w_S, surge_S, fused_S,
):  # fmt: skip
    """Returns `(start, 3 * place + kind)` of what a rank that is free at `now` runs next.

    Where memory is tight, a forward is let in only if afterwards the rank's oldest unfinished
    microbatch still fits (the banker's rule): a rank is never stuck half way.
    """
    best, best_key, choice = NEVER, NEVER, 0
    soon, soon_key, useful = NEVER, NEVER, 0  # the same among F and I alone
    for at in range(first, last):
        for k in range(3):
            comes = ready[at, k]
            if comes == NEVER:
                continue
            if tight and k != W:
                s = held_S[at]
                need = hold_f_S[s]
                if k == I:
                    need = max(surge_S[s], 0.0 if fused_S[s] else hold_w_S[s] - hold_f_S[s])
                elif done[s, F] != oldest:
                    need += rest
                if need > room:
                    continue
            comes = max(comes, now)
            if comes < best or (comes == best and key[at, k] < best_key):
                best, best_key, choice = comes, key[at, k], 3 * at + k
            if k != W and (comes < soon or (comes == soon and key[at, k] < soon_key)):
                soon, soon_key, useful = comes, key[at, k], 3 * at + k
    if choice % 3 == W and soon <= best + patience_s and soon > best:
        return soon, useful
    return best, choice


@njit(cache=True, nogil=True, error_model="numpy")
def _oldest(first, last, held_S, done, hold_f_S, hold_w_S, surge_S, M):
    """Returns a rank's oldest microbatch without all its I, and the bytes it will still take."""
    oldest = M
    for at in range(first, last):
        oldest = min(oldest, done[held_S[at], I])
    rest = surge = 0.0
    for at in range(first, last):
        s = held_S[at]
        if done[s, F] <= oldest:
            rest += max(hold_f_S[s], hold_w_S[s])
        elif done[s, I] <= oldest:
            rest += max(0.0, hold_w_S[s] - hold_f_S[s])
        surge = max(surge, surge_S[s])
    return oldest, rest + surge
