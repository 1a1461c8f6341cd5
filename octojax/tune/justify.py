"""Schedules seen from their end: forward-backward improvement of priorities.

A schedule made from the front is dense there and thin at its end. Scheduled once more from the
end, in reverse and latest action first, it is dense at the end; its start times, as priorities,
make a schedule from the front that keeps much of both (double justification, known from
project scheduling: Valls, Ballestin and Quintanilla, 2005).
"""

from dataclasses import replace

import numpy as np
from numba import njit

from octojax.simulate.jit import CALLED, INNER
from octojax.tune.candidate import (
    LATE_S,
    Candidate,
    is_possible,
    problem_arrays,
    stage_arrays,
)
from octojax.tune.list_schedule import FORWARD, NEVER, REVERSE, list_schedule
from octojax.tune.problem import Problem

ROUNDS = 3
"""At most so many times is a candidate justified: later ones gain nothing."""
PROMISING, CLOSER = 0.006, 0.4
"""A candidate is justified if its score is at most so much above the one to beat, and each further
time only if it is closer by that factor: a justification seldom gains more."""
TAIL = 1.0
"""Weight of the ranks' ends (root mean square) beside the makespan in `judged`'s score: a
plan in which more ranks end early has more room for the next change."""


def justified(
    candidate: Candidate, makespan_s: float, problem: Problem, arrays: tuple | None = None
) -> tuple[float, Candidate]:
    """Returns the better of a candidate and its justified forms, with its makespan."""
    layers, microbatches = problem.num_layers, problem.microbatches
    rows = np.zeros((3 * layers * microbatches, 4), np.int64)
    starts, peaks = np.zeros(len(rows)), np.zeros(problem.ranks)
    arrays = problem_arrays(problem) if arrays is None else arrays
    best = makespan_s, candidate
    for late_s in (0.0, LATE_S):
        arguments = (*candidate.arrays, *arrays, rows, starts, peaks, ROUNDS, np.inf, late_s)
        _, makespan, first_S, key_SKM = judged(*arguments)
        if makespan < best[0]:
            keys = keys_of_layers(first_S, key_SKM, layers)
            best = makespan, replace(candidate, key_LKM=keys)
    return best


@njit(**INNER)
def from_the_end(a, key_SKM, makespan_s, microbatches, out_N4, start_N, peak_P, actions):
    """Fills `key_SKM` with when each action starts in the schedule built from the end.

    `a` are the arrays that `stage_arrays` returns; `out_N4`, `start_N` hold the schedule built from
    the front, of `actions` actions, and are overwritten.
    """
    for n in range(actions):
        s, k, m = out_N4[n, 1], out_N4[n, 2], out_N4[n, 3]
        key_SKM[s, k, m] = makespan_s - start_N[n] - a[4][s, k]
    length = list_schedule(
        a[1], a[2], a[3], a[4], a[5], a[6], key_SKM, a[8], a[9], a[10], a[11], a[12], microbatches,
        -NEVER, NEVER, REVERSE, out_N4, start_N, peak_P,
    )  # fmt: skip
    for s in range(key_SKM.shape[0]):
        for m in range(microbatches):
            key_SKM[s, 2, m] = length  # of a W that does not exist
    for n in range(actions):
        s, k, m = out_N4[n, 1], out_N4[n, 2], out_N4[n, 3]
        key_SKM[s, k, m] = length - (start_N[n] + a[4][s, k])


@njit(**CALLED)
def judged(
    rank_L, cut_L, recompute_L, fused_L, key_LKM, patience_s, costs_4L, bytes_4L, speed_P,
    latency_PP, s_per_byte_PP, host_s, capacity_P, microbatches, out_N4, start_N, peak_P, rounds,
    beat, late_s,
):  # fmt: skip
    """Returns `(score, makespan, first layer of each stage, stage keys)` of a candidate after at
    most `rounds` justifications, as long as each improves the score and it may yet `beat` that
    score; infinite scores where it is sure that it cannot.

    `late_s` is added to the keys of W: with `LATE_S` a justified W comes after every F and I that
    is ready, with 0 when its time has come.
    """
    a = stage_arrays(
        rank_L, cut_L, recompute_L, fused_L, key_LKM, costs_4L, bytes_4L, speed_P, latency_PP,
        s_per_byte_PP, host_s, capacity_P,
    )  # fmt: skip
    best_SKM = a[7]
    if not is_possible(a[2], a[12]):
        return np.inf, np.inf, a[0], best_SKM
    actions, work_s = 3 * a[1].shape[0] * microbatches, 0.0
    for s in range(a[1].shape[0]):
        actions -= microbatches if a[8][s] else 0
        work_s += microbatches * (a[4][s, 0] + a[4][s, 1] + a[4][s, 2])
    limit = beat * (1 + PROMISING)
    # Ranks end no earlier than their work is long, whose mean is below its root mean square.
    longest = (limit - TAIL * work_s / speed_P.shape[0]) * (1 + 1e-9)
    makespan = list_schedule(
        a[1], a[2], a[3], a[4], a[5], a[6], a[7], a[8], a[9], a[10], a[11], a[12],
        microbatches, patience_s[0], longest, FORWARD, out_N4, start_N, peak_P,
    )  # fmt: skip
    if makespan == np.inf:
        return np.inf, np.inf, a[0], best_SKM
    score = makespan + TAIL * _ends(out_N4, start_N, a[4], actions, speed_P.shape[0])
    span = makespan
    for n in range(rounds):
        if score > beat * (1 + PROMISING * CLOSER**n):
            break
        key_SKM = np.zeros_like(best_SKM)
        from_the_end(a, key_SKM, span, microbatches, out_N4, start_N, peak_P, actions)
        for s in range(key_SKM.shape[0]):
            for m in range(microbatches):
                key_SKM[s, 2, m] += late_s
        span = list_schedule(
            a[1], a[2], a[3], a[4], a[5], a[6], key_SKM, a[8], a[9], a[10], a[11], a[12],
            microbatches, patience_s[0], longest, FORWARD, out_N4, start_N, peak_P,
        )  # fmt: skip
        if span == np.inf:
            break
        other = span + TAIL * _ends(out_N4, start_N, a[4], actions, speed_P.shape[0])
        if other >= score * (1 - 1e-9):
            break
        score, makespan, best_SKM = other, span, key_SKM
    return score, makespan, a[0], best_SKM


@njit(**INNER)
def _ends(out_N4, start_N, time_SK, actions, ranks):
    """Returns the root mean square of when the ranks' last actions end."""
    end_P = np.zeros(ranks)
    for n in range(actions):
        end = start_N[n] + time_SK[out_N4[n, 1], out_N4[n, 2]]
        end_P[out_N4[n, 0]] = max(end_P[out_N4[n, 0]], end)
    square = 0.0
    for r in range(ranks):
        square += end_P[r] * end_P[r]
    return np.sqrt(square / ranks)


@njit(**CALLED)
def keys_of_layers(first_S, key_SKM, layers):
    """Returns stage keys spread to layers; within a stage forward and backward stay in order.

    The stage's keys read from these layers (`stage_arrays`) are the given ones to the bit: ties
    between stages break as they did in the schedule that was measured.
    """
    key_LKM = np.empty((layers, 3, key_SKM.shape[2]))
    for s in range(key_SKM.shape[0]):
        first, last = first_S[s], first_S[s + 1] - 1
        for layer in range(first, last + 1):
            for m in range(key_SKM.shape[2]):
                key_LKM[layer, 0, m] = key_SKM[s, 0, m] + 1e-9 * (layer - first)
                key_LKM[layer, 1, m] = key_SKM[s, 1, m] + 1e-9 * (last - layer)
                key_LKM[layer, 2, m] = key_SKM[s, 2, m]
    return key_LKM
