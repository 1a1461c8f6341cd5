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
    last = stages - 1
    done = np.zeros((stages, 3), np.int64)  # counted from the last microbatch
    # What each stage offers next: by position in `held_S`, so that a rank's offers are adjacent.
    place_S = np.empty(stages, np.int64)
    ready, key = np.full(3 * stages, NEVER), np.empty(3 * stages)
    for at in range(stages):
        s = held_S[at]
        place_S[s] = at
        for k in range(3):
            key[3 * at + k] = key_SKM[s, k, M - 1]
        if not fused_S[s]:
            ready[3 * at + W] = 0.0
        elif s == 0:
            ready[3 * at + I] = 0.0
    total = 0
    for s in range(stages):
        total += (2 if fused_S[s] else 3) * M
    clock, when = np.zeros(ranks), np.full(ranks, NEVER)
    choice = np.zeros(ranks, np.int64)  # 3 * place + kind
    for r in range(ranks):
        when[r], choice[r] = _choose(3 * first_P[r], 3 * first_P[r + 1], ready, key, 0.0)
    length = 0.0
    for _ in range(total):
        r = 0
        for q in range(1, ranks):
            if when[q] < when[r]:
                r = q
        spot = choice[r]
        s, k = held_S[spot // 3], spot % 3
        d = done[s, k]
        m = M - 1 - d
        done[s, k] = d + 1
        end = when[r] + time_SK[s, k]
        stop_SKM[s, k, m] = end
        clock[r] = end
        length = max(length, end)
        if m > 0:
            key[spot] = key_SKM[s, k, m - 1]
        # The next of its kind, then what waited for this one: here, and in the stage beside it.
        to, comes = -1, NEVER
        if k == W:
            ready[spot] = 0.0 if m > 0 else NEVER
            if done[s, I] == d:
                ready[spot - 1] = _input_grad(s, d, m, done, stop_SKM, hop_i_S, fused_S)
        elif k == I:
            ready[spot] = _input_grad(s, d + 1, m - 1, done, stop_SKM, hop_i_S, fused_S)
            if done[s, F] == d:
                ready[spot - 1] = _forward(s, d, m, done, stop_SKM, hop_f_S)
            if s < last and done[s + 1, I] == d:
                to = s + 1
                comes = _input_grad(to, d, m, done, stop_SKM, hop_i_S, fused_S)
        else:
            ready[spot] = _forward(s, d + 1, m - 1, done, stop_SKM, hop_f_S)
            if s > 0 and done[s - 1, F] == d:
                to = s - 1
                comes = _forward(to, d, m, done, stop_SKM, hop_f_S)
        if to >= 0 and comes < NEVER:
            there = 3 * place_S[to] + k
            ready[there] = comes
            q = rank_S[to]
            if q != r:
                comes = max(comes, clock[q])
                if comes < when[q] or (comes == when[q] and key[there] < key[choice[q]]):
                    when[q], choice[q] = comes, there
        when[r], choice[r] = _choose(3 * first_P[r], 3 * first_P[r + 1], ready, key, end)
    return length


@njit(cache=True, nogil=True, error_model="numpy")
def _input_grad(s, d, m, done, stop_SKM, hop_i_S, fused_S):
    """Returns when I number `d` from the end, of microbatch `m`, may run; never if it has to
    wait for one that is not placed yet.
    """
    if m < 0 or (not fused_S[s] and done[s, W] <= d) or (s > 0 and done[s - 1, I] <= d):
        return NEVER
    comes = 0.0 if fused_S[s] else stop_SKM[s, W, m]
    if s > 0:
        comes = max(comes, stop_SKM[s - 1, I, m] + hop_i_S[s])
    return comes


@njit(cache=True, nogil=True, error_model="numpy")
def _forward(s, d, m, done, stop_SKM, hop_f_S):
    """Returns when F number `d` from the end, of microbatch `m`, may run, as `_input_grad`."""
    last = done.shape[0] - 1
    if m < 0 or done[s, I] <= d or (s < last and done[s + 1, F] <= d):
        return NEVER
    comes = stop_SKM[s, I, m]
    if s < last:
        comes = max(comes, stop_SKM[s + 1, F, m] + hop_f_S[s])
    return comes


@njit(cache=True, nogil=True, error_model="numpy")
def _choose(first, last, ready, key, now):
    """Returns `(start, place of the offer)` of what a rank that is free at `now` runs next."""
    best, best_key, choice = NEVER, NEVER, 0
    for spot in range(first, last):
        comes = ready[spot]
        if comes == NEVER:
            continue
        comes = max(comes, now)
        if comes < best or (comes == best and key[spot] < best_key):
            best, best_key, choice = comes, key[spot], spot
    return best, choice
