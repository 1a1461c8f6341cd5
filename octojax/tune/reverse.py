"""List scheduling from the end: the last action first, each as late as it may be.

In reverse W has nothing before it; I of a stage waits for its W and for I of the stage in
front; F waits for its I and for F of the stage behind. Microbatches of a stage keep their
order. Memory is not looked at: the outcome serves as priorities, not as a plan.
"""

import numpy as np
from numba import njit

from octojax.tune.list_schedule import NEVER, F, I, W


@njit(cache=True, nogil=True, error_model="numpy")
def reverse_schedule(
    rank_S, first_P, held_S, time_SK, send_f_S2, send_i_S2, key_SKM, fused_S, stop_SKM
):
    """Returns the length of the schedule in seconds and fills `stop_SKM` with the reverse times
    at which actions are over: seconds from the end to their start.

    Arguments as `list_schedule` takes them; `key_SKM` smallest first, in reverse time.
    """
    stages, ranks, M = rank_S.shape[0], first_P.shape[0] - 1, key_SKM.shape[2]
    hop_f_S, hop_i_S = send_f_S2[:, 0] + send_f_S2[:, 1], send_i_S2[:, 0] + send_i_S2[:, 1]
    done = np.zeros((stages, 3), np.int64)  # counted from the last microbatch
    ready = np.full((stages, 3), NEVER)
    clock, when = np.zeros(ranks), np.full(ranks, NEVER)
    choice = np.zeros(ranks, np.int64)
    total = 0
    for s in range(stages):
        total += (2 if fused_S[s] else 3) * M
        if not fused_S[s]:
            ready[s, W] = 0.0
        elif s == 0:
            ready[s, I] = 0.0
    for r in range(ranks):
        when[r], choice[r] = _choose(first_P[r], first_P[r + 1], held_S, ready, key_SKM, done, 0.0)
    length = 0.0
    for _ in range(total):
        r = 0
        for q in range(1, ranks):
            if when[q] < when[r]:
                r = q
        s, k = choice[r] // 3, choice[r] % 3
        d = done[s, k]
        m = M - 1 - d
        done[s, k] = d + 1
        end = when[r] + time_SK[s, k]
        stop_SKM[s, k, m] = end
        clock[r] = end
        length = max(length, end)
        ready[s, k] = _comes(s, k, done, stop_SKM, hop_f_S, hop_i_S, fused_S)
        other = -1
        if k == W:
            ready[s, I] = _comes(s, I, done, stop_SKM, hop_f_S, hop_i_S, fused_S)
        elif k == I:
            ready[s, F] = _comes(s, F, done, stop_SKM, hop_f_S, hop_i_S, fused_S)
            if s + 1 < stages:
                ready[s + 1, I] = _comes(s + 1, I, done, stop_SKM, hop_f_S, hop_i_S, fused_S)
                other = rank_S[s + 1]
        elif s > 0:
            ready[s - 1, F] = _comes(s - 1, F, done, stop_SKM, hop_f_S, hop_i_S, fused_S)
            other = rank_S[s - 1]
        when[r], choice[r] = _choose(first_P[r], first_P[r + 1], held_S, ready, key_SKM, done, end)
        if other >= 0 and other != r:
            when[other], choice[other] = _choose(
                first_P[other], first_P[other + 1], held_S, ready, key_SKM, done, clock[other]
            )
    return length


@njit(cache=True, nogil=True, error_model="numpy")
def _comes(s, k, done, stop_SKM, hop_f_S, hop_i_S, fused_S):
    """Returns when the next action of a stage and kind may run; never if it has to wait for one
    that is not placed yet.
    """
    M = stop_SKM.shape[2]
    d = done[s, k]
    if d == M:
        return NEVER
    m = M - 1 - d
    comes = 0.0
    if k == I:
        if not fused_S[s]:
            if done[s, W] <= d:
                return NEVER
            comes = stop_SKM[s, W, m]
        if s > 0:
            if done[s - 1, I] <= d:
                return NEVER
            comes = max(comes, stop_SKM[s - 1, I, m] + hop_i_S[s])
    elif k == F:
        if done[s, I] <= d:
            return NEVER
        comes = stop_SKM[s, I, m]
        if s + 1 < stop_SKM.shape[0]:
            if done[s + 1, F] <= d:
                return NEVER
            comes = max(comes, stop_SKM[s + 1, F, m] + hop_f_S[s])
    return comes


@njit(cache=True, nogil=True, error_model="numpy")
def _choose(first, last, held_S, ready, key_SKM, done, now):
    """Returns `(start, 3 * stage + kind)` of what a rank that is free at `now` runs next."""
    M = key_SKM.shape[2]
    best, best_key, choice = NEVER, NEVER, 0
    for at in range(first, last):
        s = held_S[at]
        for k in range(3):
            if ready[s, k] == NEVER:
                continue
            comes = max(ready[s, k], now)
            if comes > best:
                continue
            key = key_SKM[s, k, M - 1 - done[s, k]]
            if comes < best or key < best_key:
                best, best_key, choice = comes, key, 3 * s + k
    return best, choice
