"""Cuts of a chain of layers into consecutive stages, optimal for two objectives."""

import numpy as np


def min_max(work_s: np.ndarray, stages: int) -> tuple[int, ...]:
    """Returns the sizes of stages whose largest work is least; ties by the sum of squares."""
    return _cut(work_s, stages, lambda so_far, stage: (max(so_far[0], stage), so_far[1] + stage**2))


def mist(work_s: np.ndarray, stages: int, microbatches: int) -> tuple[int, ...]:
    """Returns the sizes that minimise (m - 1) * max + sum (Mist, Alpa, DAPPLE).

    The sum does not depend on the cut, so the heaviest stage decides; among equal ones the
    work before it is pushed to the back, where 1F1B waits least.
    """
    del microbatches  # the optimum is the same for all of them
    weights = 1 + 1e-9 * np.arange(stages)
    return _cut(
        work_s,
        stages,
        lambda so_far, stage: (max(so_far[0], stage), so_far[1] + stage * weights[so_far[2]]),
    )


def _cut(work_s: np.ndarray, stages: int, add) -> tuple[int, ...]:
    """Returns the best sizes by dynamic programming over (stages, layers)."""
    layers = len(work_s)
    before = np.concatenate([[0.0], np.cumsum(work_s)])
    best: list[tuple | None] = [None] * (layers + 1)
    best[0] = (0.0, 0.0, 0)
    choice = np.zeros((stages + 1, layers + 1), np.int64)
    for s in range(1, stages + 1):
        row: list[tuple | None] = [None] * (layers + 1)
        for end in range(s, layers - (stages - s) + 1):
            for start in range(end - 1, s - 2, -1):
                known = best[start]
                if known is None:
                    continue
                stage = float(before[end] - before[start])
                made = (*add(known, stage), s)
                if row[end] is None or made[:2] < row[end][:2]:
                    row[end] = made
                    choice[s, end] = start
                if stage > (row[end][0] if row[end] else np.inf):
                    break  # longer stages only get heavier
        best = row
    sizes, end = [], layers
    for s in range(stages, 0, -1):
        start = int(choice[s, end])
        sizes.append(end - start)
        end = start
    return tuple(reversed(sizes))
