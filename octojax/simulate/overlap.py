"""How much of each transfer is hidden behind computation, compiled."""

import numpy as np
from numba import njit

from octojax.simulate.engine import OPTIONS


@njit(**OPTIONS)
def _first_after(end, low, high, when):
    """Returns the first item in `low..high` that ends after `when`."""
    while low < high:
        middle = (low + high) // 2
        if end[middle] > when:
            high = middle
        else:
            low = middle + 1
    return low


@njit(**OPTIONS)
def overlaps(rank_start, start, end, sent, arrived, target, rank_of):
    """Returns how long both ranks of each transfer compute while it is under way, (items, 2),
    and how long its sender does, (items, 2).
    """
    both = np.zeros(sent.shape)
    sender = np.zeros(sent.shape)
    for i in range(len(start)):
        for slot in range(2):
            j = target[i, slot]
            if j < 0:
                continue
            begin, stop = sent[i, slot], arrived[i, slot]
            x_end, y_end = rank_start[rank_of[i] + 1], rank_start[rank_of[j] + 1]
            x = _first_after(end, rank_start[rank_of[i]], x_end, begin)
            y = _first_after(end, rank_start[rank_of[j]], y_end, begin)
            for k in range(x, x_end):
                if start[k] >= stop:
                    break
                sender[i, slot] += max(0.0, min(end[k], stop) - max(start[k], begin))
            while x < x_end and y < y_end and start[x] < stop and start[y] < stop:
                low = max(start[x], start[y], begin)
                high = min(end[x], end[y], stop)
                if high > low:
                    both[i, slot] += high - low
                if end[x] <= end[y]:
                    x += 1
                else:
                    y += 1
    return both, sender
