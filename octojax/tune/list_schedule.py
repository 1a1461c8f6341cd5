"""List scheduling on flat arrays: priorities in, a whole schedule and its makespan out.

Every rank, whenever it is free, takes the ready action with the smallest key; if none is
ready it waits for the first to come. One pass gives a schedule and its times under the
simulator's meaning: asynchronous transfers, one at a time per directed link in the sender's
order; host cost on both ends; memory held from F to I, and from I to W.

Time runs `forward`, or from the end of the step to its front, the last action first:

    forward   F of a stage waits for F of the stage before it; I for its own F and for I of the
              stage behind; W for its own I
    reverse   W waits for nothing; I for its own W and for I of the stage before it; F for its own
              I and for F of the stage behind. Links are not shared and memory is not counted: the
              outcome serves as priorities, not as a plan

Within a stage, microbatches keep their order, so a stage offers at most three actions at any
time (the next F, I and W): choosing is one scan over the few stages of a rank.

Legend: S stages, P ranks, M microbatches, K kinds (F=0, I=1, W=2), N actions.
"""

import numpy as np
from numba import njit

from octojax.simulate.jit import CALLED, INNER

F, I, W = 0, 1, 2  # noqa: E741
NEVER = np.inf
FORWARD, REVERSE = 1.0, -1.0
"""Directions of time; no whole numbers, of which the compiler would make a copy of all each."""


@njit(**CALLED)
def list_schedule(
    rank_S, first_P, held_S, time_SK, send_f_S2, send_i_S2, key_SKM, fused_S, hold_f_S, hold_w_S,
    surge_S, free_P, microbatches, patience_s, cutoff_s, time, out_N4, start_N, peak_P,
):  # fmt: skip
    """Returns the makespan in seconds, or infinity when memory leaves nothing to run, or as soon
    as the makespan is sure to exceed `cutoff_s`.

    `rank_S` rank of each stage; rank r holds stages `held_S[first_P[r]:first_P[r + 1]]`.
    `time_SK` durations with host costs; `send_f_S2[s]` seconds on the link and latency of the
    transfer s -> s+1, `send_i_S2[s]` of s -> s-1 (zero within a rank). `key_SKM[s, k, m]` are
    the priorities, smallest first. `fused_S`: I does all the backward, W does not exist.
    Bytes: F takes `hold_f_S`, I `surge_S` more while it runs; I leaves `hold_w_S` for W; rank r
    has `free_P[r]` for all that.
    `time` is `FORWARD` or `REVERSE`.
    `patience_s`: a W is put off if an F or I comes within so many seconds.
    Filled: `out_N4` rows (rank, stage, kind, microbatch) in the order of their starts,
    `start_N` their starts (in reverse: seconds from the end of the step to their end), `peak_P`
    most bytes of residuals alive.
    """
    stages, ranks, M = rank_S.shape[0], first_P.shape[0] - 1, microbatches
    forward = time > 0
    toward = 1 if forward else -1  # the stage that an F hands its output to
    arrive_SKM = np.full((stages, 2, M), NEVER)  # of what the neighbouring stage hands on
    end_SKM = np.empty((stages, 3, M))
    for m in range(M):
        arrive_SKM[0 if forward else stages - 1, F, m] = 0.0
        arrive_SKM[stages - 1 if forward else 0, I, m] = 0.0
    done = np.zeros((stages, 3), np.int64)
    # What each stage offers next: by position in `held_S`, so that a rank's offers are adjacent.
    place_S = np.empty(stages, np.int64)
    for at in range(stages):
        place_S[held_S[at]] = at
    ready = np.full((stages, 3), NEVER)
    key = np.empty((stages, 3))
    for s in range(stages):
        for k in range(3):
            key[place_S[s], k] = key_SKM[s, k, 0 if forward else M - 1]
        if not forward and not fused_S[s]:
            ready[place_S[s], W] = 0.0
    if forward or fused_S[0]:
        ready[place_S[0], F if forward else I] = 0.0
    clock, used_P = np.zeros(ranks), np.zeros(ranks)
    link = np.zeros((ranks, ranks))
    tight = np.zeros(ranks, np.bool_)  # whether memory could bind at all
    left = np.zeros(ranks)  # seconds of work that are not scheduled yet
    total = 0
    for s in range(stages):
        left[rank_S[s]] += M * (time_SK[s, F] + time_SK[s, I] + time_SK[s, W])
        total += (2 if fused_S[s] else 3) * M
        used_P[rank_S[s]] += M * max(hold_f_S[s], hold_w_S[s]) + surge_S[s]
    when = np.full(ranks, NEVER)
    choice = np.zeros(ranks, np.int64)  # 3 * place + kind
    for r in range(ranks):
        tight[r] = forward and used_P[r] > free_P[r]
        used_P[r] = peak_P[r] = 0.0
    undecided, many = np.arange(ranks), ranks
    makespan = 0.0
    for n in range(total):
        for i in range(many):
            r = undecided[i]
            room, rest, oldest = NEVER, 0.0, 0
            if tight[r]:
                room = free_P[r] - used_P[r]
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
        d = done[s, k]  # its microbatch, counted from the last one in reverse
        done[s, k] = d + 1
        if d + 1 < M:
            key[at, k] = key_SKM[s, k, d + 1 if forward else M - 2 - d]
        end = begin + time_SK[s, k]
        clock[r] = end
        makespan = max(makespan, end)
        left[r] -= time_SK[s, k]
        if end + left[r] > cutoff_s:
            return NEVER
        out_N4[n, 0], out_N4[n, 1], out_N4[n, 2] = r, s, k
        out_N4[n, 3] = d if forward else M - 1 - d
        start_N[n] = begin
        end_SKM[s, k, d] = end
        if k == F:
            used_P[r] += hold_f_S[s]
        elif k == I:
            peak_P[r] = max(peak_P[r], used_P[r] + surge_S[s])
            used_P[r] += (0.0 if fused_S[s] else hold_w_S[s]) - hold_f_S[s]
        else:
            used_P[r] -= hold_w_S[s]
        peak_P[r] = max(peak_P[r], used_P[r])
        to, spot, also = s + toward if k == F else s - toward, -1, -1
        if k != W and 0 <= to < stages:
            spot = place_S[to]
            if forward and rank_S[to] != r:
                busy, latency = send_f_S2[s, 0], send_f_S2[s, 1]
                if k == I:
                    busy, latency = send_i_S2[s, 0], send_i_S2[s, 1]
                comes = max(end, link[r, rank_S[to]]) + busy
                link[r, rank_S[to]] = comes
                arrive_SKM[to, k, d] = comes + latency
            elif forward:
                arrive_SKM[to, k, d] = end
            elif k == F:
                arrive_SKM[to, k, d] = end + (send_f_S2[to, 0] + send_f_S2[to, 1])
            else:
                arrive_SKM[to, k, d] = end + (send_i_S2[to, 0] + send_i_S2[to, 1])
        # What may be ready now: the next of its kind, and what waited for this one, here and there.
        for j in range(3):
            s2 = to if j == 2 else s
            k2 = k + toward if j == 1 else k
            d2 = d + 1 if j == 0 else d
            if (j == 1 and (k2 < 0 or k2 > 2)) or (j == 2 and spot < 0) or done[s2, k2] != d2:
                continue
            comes = NEVER
            if d2 < M and not (k2 == W and fused_S[s2]):
                before = k2 - toward  # of its own stage
                comes = 0.0
                if 0 <= before < 3 and not (before == W and fused_S[s2]):
                    comes = end_SKM[s2, before, d2] if done[s2, before] > d2 else NEVER
                if k2 != W:
                    comes = max(comes, arrive_SKM[s2, k2, d2])
            ready[place_S[s2], k2] = comes
            if j == 2 and comes < NEVER and rank_S[to] != r:
                also = rank_S[to]
        undecided[0], many = r, 1
        if also < 0:
            continue
        q = also
        if tight[q]:
            undecided[1], many = q, 2
            continue
        comes = max(ready[spot, k], clock[q])
        weak = when[q] < NEVER and choice[q] % 3 == W and comes <= when[q] + patience_s
        known = key[choice[q] // 3, choice[q] % 3]
        if comes < when[q] or weak or (comes == when[q] and key[spot, k] < known):
            when[q], choice[q] = comes, 3 * spot + k
    return makespan


@njit(**INNER)
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


@njit(**INNER)
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
