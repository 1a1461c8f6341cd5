"""Schedules seen from their end: forward-backward improvement of priorities.

A schedule made from the front is dense there and thin at its end. Scheduled once more from the
end, in reverse and latest action first, it is dense at the end; its start times, as priorities,
make a schedule from the front that keeps much of both (double justification, known from
project scheduling: Valls, Ballestin and Quintanilla, 2005).
"""

from dataclasses import replace

import numpy as np
from numba import njit

from octojax.tune.candidate import LATE_S, Candidate, problem_arrays, stage_arrays
from octojax.tune.measure import quick_makespan, run
from octojax.tune.problem import Problem


def justified(
    found: Candidate, makespan_s: float, problem: Problem, arrays: tuple | None = None
) -> tuple[float, Candidate]:
    """Returns the better of a candidate and its justified forms, with its makespan."""
    if found.fused_L.any() or makespan_s == np.inf:
        return makespan_s, found
    arrays = problem_arrays(problem) if arrays is None else arrays
    best = makespan_s, found
    for _ in range(3):
        improved = False
        for candidate in _forms(best[1], best[0], problem, arrays):
            made = quick_makespan(candidate, problem, arrays)
            if made < best[0] * (1 - 1e-9):
                best, improved = (made, candidate), True
        if not improved:
            break
    return best


def _forms(found: Candidate, makespan_s: float, problem: Problem, arrays: tuple):
    """Yields the candidate with keys from the end: W as late as ever, or when its time comes."""
    _, rows, starts, _ = run(found, problem, arrays)
    a = stage_arrays(*found.arrays[:5], *arrays[:7])
    first, rank_S, time_SK = a[0], a[1], a[4]
    shape = (len(rank_S), 3, problem.microbatches)
    end = np.zeros(shape)
    end[rows[:, 1], rows[:, 2], rows[:, 3]] = starts + time_SK[rows[:, 1], rows[:, 2]]
    begin = makespan_s - backward(
        rank_S, time_SK, a[5].sum(axis=1), a[6].sum(axis=1), makespan_s - end, problem.ranks
    )
    stage_L = np.repeat(np.arange(len(rank_S)), np.diff(first))
    keys = np.ascontiguousarray(begin[stage_L])
    keys[:, 0] += 1e-9 * np.arange(len(stage_L))[:, None]
    yield replace(found, key_LKM=keys)
    late = keys.copy()
    late[:, 2] += LATE_S
    yield replace(found, key_LKM=late)


@njit(cache=True, nogil=True)
def backward(rank_S, time_SK, hop_f_S, hop_i_S, key_SKM, ranks):
    """Returns when each action ends, counted back from the end, in a schedule built in reverse.

    `key_SKM` smallest first, in reverse time. In reverse, W has nothing before it, I of a stage
    waits for its W and for I of the stage before it, F for its I and for F of the stage behind.
    Microbatches of a stage keep their order.
    """
    S, M = rank_S.shape[0], key_SKM.shape[2]
    done = np.zeros((S, 3), np.int64)  # counted from the last microbatch
    stop = np.full((S, 3, M), np.inf)  # reverse time at which an action is over
    clock = np.zeros(ranks)
    for _ in range(3 * S * M):
        best, best_key, stage, kind = np.inf, np.inf, 0, 0
        for s in range(S):
            now = clock[rank_S[s]]
            if now > best:
                continue
            for k in range(3):
                m = M - 1 - done[s, k]
                if m < 0:
                    continue
                ready = 0.0
                if k == 1:
                    ready = stop[s, 2, m]
                    if s > 0:
                        ready = max(ready, stop[s - 1, 1, m] + hop_i_S[s])
                elif k == 0:
                    ready = stop[s, 1, m]
                    if s < S - 1:
                        ready = max(ready, stop[s + 1, 0, m] + hop_f_S[s])
                ready = max(ready, now)
                if ready < best or (ready == best and key_SKM[s, k, m] < best_key):
                    best, best_key, stage, kind = ready, key_SKM[s, k, m], s, k
        m = M - 1 - done[stage, kind]
        done[stage, kind] += 1
        stop[stage, kind, m] = best + time_SK[stage, kind]
        clock[rank_S[stage]] = stop[stage, kind, m]
    return stop
