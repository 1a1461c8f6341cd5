"""Cuts of a chain of layers into consecutive stages, optimal by dynamic programming."""

import numpy as np
from numba import njit


def min_max(work_s: np.ndarray, stages: int) -> tuple[int, ...]:
    """Returns the sizes of stages whose largest work is least; ties by the sum of squares."""
    return tuple(_cut(np.asarray(work_s, float), np.zeros(stages), 2.0).tolist())


def mist(work_s: np.ndarray, stages: int) -> tuple[int, ...]:
    """Returns sizes that minimise (m - 1) * max + sum (Mist, Alpa, DAPPLE), for any m.

    The sum does not depend on the cut, so the heaviest stage decides; among equal ones, work
    is pushed to the front, where 1F1B waits least.
    """
    return tuple(_cut(np.asarray(work_s, float), np.arange(stages) * 1.0, 1.0).tolist())


@njit(cache=True)
def _cut(work_s, weight_S, power):
    """Returns the sizes with the least maximum, then the least sum of weight * work, or of
    work ** power where all weights are zero.
    """
    layers, stages = work_s.shape[0], weight_S.shape[0]
    plain = not weight_S.any()
    before = np.zeros(layers + 1)
    for layer in range(layers):
        before[layer + 1] = before[layer] + work_s[layer]
    top = np.full((stages + 1, layers + 1), np.inf)
    tie = np.full((stages + 1, layers + 1), np.inf)
    choice = np.zeros((stages + 1, layers + 1), np.int64)
    top[0, 0] = tie[0, 0] = 0.0
    for s in range(1, stages + 1):
        for end in range(s, layers - (stages - s) + 1):
            for start in range(end - 1, s - 2, -1):
                work = before[end] - before[start]
                if work > top[s, end] * (1 + 1e-12):
                    break  # longer stages only get heavier
                if top[s - 1, start] == np.inf:
                    continue
                most = max(top[s - 1, start], work)
                more = tie[s - 1, start]
                more += work**power if plain else weight_S[s - 1] * work
                close = abs(most - top[s, end]) <= 1e-12 * most
                if (most < top[s, end] and not close) or (close and more < tie[s, end]):
                    top[s, end], tie[s, end], choice[s, end] = most, more, start
    sizes = np.zeros(stages, np.int64)
    end = layers
    for s in range(stages, 0, -1):
        sizes[s - 1] = end - choice[s, end]
        end = choice[s, end]
    return sizes
