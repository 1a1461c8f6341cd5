"""A point of the search: which rank holds each layer, where stages end, and priorities.

Layers are the unit: `rank_L[l]` holds layer l, `cut_L[l]` is true where a stage begins at
layer l though its rank does not change. `key_LKM[l, k, m]` is when layer l would like to run
kind k (F, I, W) of microbatch m: a stage takes the keys of the layer it meets first. All are
flat arrays, so that the search stays inside compiled code.
"""

from dataclasses import dataclass

import numpy as np
from numba import njit

from octojax.simulate.jit import CALLED
from octojax.tune.list_schedule import FORWARD, list_schedule
from octojax.tune.problem import Problem

LATE_S = 1e6
"""Added to the keys of W: it comes after every F and I that is ready."""


@dataclass(frozen=True, eq=False)
class Candidate:
    """See the module's text. `recompute_L`, `fused_L` are read at a stage's first layer.

    `patience_s` has one entry: how long a rank waits for an F or I rather than start a W.
    """

    rank_L: np.ndarray
    cut_L: np.ndarray
    recompute_L: np.ndarray
    fused_L: np.ndarray
    key_LKM: np.ndarray
    patience_s: np.ndarray

    @classmethod
    def of(
        cls,
        rank_L: np.ndarray,
        key_LKM: np.ndarray,
        cut_L: np.ndarray | None = None,
        patience_s: float = 0.0,
    ) -> "Candidate":
        """Returns the candidate with nothing recomputed or fused; stages as long as can be."""
        none = np.zeros(len(rank_L), np.bool_)
        return cls(
            np.asarray(rank_L, np.int64).copy(),
            none.copy() if cut_L is None else cut_L.copy(),
            none.copy(),
            none.copy(),
            np.ascontiguousarray(key_LKM, float),
            np.array([patience_s]),
        )

    @property
    def arrays(self) -> tuple[np.ndarray, ...]:
        """The fields in the order that compiled functions take them."""
        return (
            self.rank_L, self.cut_L, self.recompute_L, self.fused_L, self.key_LKM,
            self.patience_s,
        )  # fmt: skip


def problem_arrays(problem: Problem, free_bytes: np.ndarray | None = None) -> tuple:
    """Returns what compiled functions need of a problem, in the order they take it.

    `free_bytes` replaces the capacities (less, where transfer buffers need room).
    """
    p = problem
    costs_4L = np.array([p.forward_s, p.input_grad_s, p.weight_grad_s, p.backward_s])
    bytes_4L = np.array([p.residual_bytes, p.weight_residual_bytes, p.output_bytes, p.state_bytes])
    capacity = p.capacity_bytes if free_bytes is None else free_bytes
    return (
        costs_4L, bytes_4L, p.speeds, p.latency_s, p.s_per_byte, p.host_cost_s, capacity,
        p.microbatches,
    )  # fmt: skip


@njit(**CALLED)
def stage_arrays(
    rank_L, cut_L, recompute_L, fused_L, key_LKM, costs_4L, bytes_4L, speed_P, latency_PP,
    s_per_byte_PP, host_s, capacity_P,
):  # fmt: skip
    """Returns the first layer of each stage, and the arrays that `list_schedule` takes.

    `costs_4L` rows: forward, input gradient, weight gradient, fused backward. `bytes_4L`
    rows: residual, weight residual, output, state. A recomputed stage keeps its input only,
    and its backward takes a forward longer.
    """
    layers, ranks = rank_L.shape[0], speed_P.shape[0]
    first_S = np.empty(layers + 1, np.int64)
    stages = 0
    for layer in range(layers):
        if layer == 0 or cut_L[layer] or rank_L[layer] != rank_L[layer - 1]:
            first_S[stages] = layer
            stages += 1
    first_S[stages] = layers
    rank_S = np.empty(stages, np.int64)
    time_SK = np.zeros((stages, 3))
    send_f_S2, send_i_S2 = np.zeros((stages, 2)), np.zeros((stages, 2))
    hold_f_S, hold_w_S, surge_S = np.zeros(stages), np.zeros(stages), np.zeros(stages)
    fused_S = np.zeros(stages, np.bool_)
    key_SKM = np.empty((stages, 3, key_LKM.shape[2]))
    count_P = np.zeros(ranks + 1, np.int64)
    free_P = capacity_P.copy()
    for s in range(stages):
        a, b = first_S[s], first_S[s + 1]
        r = rank_L[a]
        rank_S[s] = r
        count_P[r + 1] += 1
        fused = fused_L[a]
        fused_S[s] = fused
        f = i = w = keep_f = keep_w = 0.0
        for layer in range(a, b):
            f += costs_4L[0, layer]
            i += costs_4L[3, layer] if fused else costs_4L[1, layer]
            w += 0.0 if fused else costs_4L[2, layer]
            keep_f += bytes_4L[0, layer]
            keep_w += bytes_4L[1, layer]
            free_P[r] -= bytes_4L[3, layer]
        if recompute_L[a]:
            i += f
            surge_S[s] = keep_f
            keep_f = bytes_4L[2, a - 1] if a > 0 else 0.0
        before = a > 0 and rank_L[a - 1] != r
        after = b < layers and rank_L[b] != r
        host = (host_s if before else 0.0) + (host_s if after else 0.0)
        time_SK[s, 0] = f / speed_P[r] + host
        time_SK[s, 1] = i / speed_P[r] + host
        time_SK[s, 2] = w / speed_P[r]
        hold_f_S[s], hold_w_S[s] = keep_f, keep_w
        if after:
            q = rank_L[b]
            send_f_S2[s, 0] = bytes_4L[2, b - 1] * s_per_byte_PP[r, q]
            send_f_S2[s, 1] = latency_PP[r, q]
        if before:
            q = rank_L[a - 1]
            send_i_S2[s, 0] = bytes_4L[2, a - 1] * s_per_byte_PP[r, q]
            send_i_S2[s, 1] = latency_PP[r, q]
        for m in range(key_SKM.shape[2]):
            key_SKM[s, 0, m] = key_LKM[a, 0, m]
            key_SKM[s, 1, m] = key_LKM[b - 1, 1, m]
            key_SKM[s, 2, m] = key_LKM[b - 1, 2, m]
    for r in range(ranks):
        count_P[r + 1] += count_P[r]
    first_P = count_P.copy()
    held_S = np.empty(stages, np.int64)
    for s in range(stages):
        r = rank_S[s]
        held_S[count_P[r]] = s
        count_P[r] += 1
    return (
        first_S[: stages + 1], rank_S[:stages], first_P, held_S, time_SK, send_f_S2, send_i_S2,
        key_SKM, fused_S, hold_f_S, hold_w_S, surge_S, free_P,
    )  # fmt: skip


@njit(**CALLED)
def is_possible(first_P, free_P):
    """Whether every rank has a stage, and room for the state of its own."""
    for r in range(free_P.shape[0]):
        if free_P[r] < 0.0 or first_P[r] == first_P[r + 1]:
            return False
    return True


def evaluate(
    candidate: Candidate, arrays: tuple, microbatches: int, out_N4: np.ndarray, start_N: np.ndarray,
    peak_P: np.ndarray,
) -> float:  # fmt: skip
    """Returns the makespan of a candidate in seconds, and fills the last three arguments as
    `list_schedule` does; infinity where it does not fit. `arrays` are `problem_arrays`.
    """
    a = stage_arrays(*candidate.arrays[:5], *arrays[:7])
    if not is_possible(a[2], a[12]):
        return np.inf
    patience_s = float(candidate.patience_s[0])
    return list_schedule(
        *a[1:13], microbatches, patience_s, np.inf, FORWARD, out_N4, start_N, peak_P
    )


@njit(**CALLED)
def anchored(rank_L, cut_L, key_LKM, out_N4, start_N, actions):
    """Returns keys that say when each action did run: the same schedule, in comparable units.

    W keeps its distance `LATE_S` unless it was asked for earlier.
    """
    layers = rank_L.shape[0]
    stage_L = np.empty(layers, np.int64)
    stages = -1
    for layer in range(layers):
        if layer == 0 or cut_L[layer] or rank_L[layer] != rank_L[layer - 1]:
            stages += 1
        stage_L[layer] = stages
    when = np.zeros((stages + 1, 3, key_LKM.shape[2]))
    for n in range(actions):
        when[out_N4[n, 1], out_N4[n, 2], out_N4[n, 3]] = start_N[n]
    keys = key_LKM.copy()
    for layer in range(layers):
        for m in range(key_LKM.shape[2]):
            keys[layer, 0, m] = when[stage_L[layer], 0, m] + 1e-9 * layer
            keys[layer, 1, m] = when[stage_L[layer], 1, m] - 1e-9 * layer
            if keys[layer, 2, m] > 0.5 * LATE_S:
                keys[layer, 2, m] = LATE_S + when[stage_L[layer], 2, m]
    return keys
