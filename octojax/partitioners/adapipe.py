"""AdaPipe: which layers form a stage, and which of them are recomputed, decided together."""

import math
from functools import cache

import numpy as np

from octojax.errors import CapacityError
from octojax.partitioners.chain import Chain, spans
from octojax.partitioners.cut import Division, cut
from octojax.partitioners.family import Partitioner


def adapipe(chain: Chain, stages: int, microbatches: int) -> Division:
    """Returns the least `sum(t) + (m-1) max(t)` where each stage saves what its memory allows.

    Stage s of 1F1B keeps min(p-s, m) microbatches. A layer whose residuals are not saved is
    run forward again before its backward; per stage a knapsack saves the most seconds within
    what the states leave of the capacity. Exact in both levels. Raises `CapacityError` where
    not even full recomputation fits.
    """
    n = chain.num_layers
    saving = _saver(chain)
    total, state, residual = (
        chain.compute_s(),
        spans(chain.state_bytes),
        spans(chain.residual_bytes),
    )
    times = np.full((stages, n + 1, n + 1), math.inf)
    for stage in range(stages):
        copies = min(stages - stage, microbatches)
        whole = state + copies * residual <= chain.capacity_bytes
        times[stage][whole] = total[whole]
        for start, stop in np.argwhere((state <= chain.capacity_bytes) & ~whole).tolist():
            saved = saving(start, stop, copies)
            if saved is not None:
                again = sum(chain.forward_s[i] for i in range(start, stop) if i not in saved)
                times[stage, start, stop] = total[start, stop] + again
    best = cut(times, None, stages, microbatches - 1)
    if best is None:
        state = max(chain.state_bytes)
        raise CapacityError(
            f"no partition of {n} layers into {stages} stages fits into "
            f"{chain.capacity_bytes / 2**30:.2f} GiB per rank even if every layer is recomputed: "
            f"all states are {sum(chain.state_bytes) / 2**30:.2f} GiB, the largest layer's "
            f"{state / 2**30:.2f} GiB. Use more ranks or more memory"
        )
    partition, value = best
    recompute = [False] * n
    for stage in range(stages):
        layers = partition.layers(stage)
        saved = saving(layers.start, layers.stop, min(stages - stage, microbatches))
        assert saved is not None
        for layer in layers:
            recompute[layer] = layer not in saved
    return Division(partition, value, tuple(recompute))


def _saver(chain: Chain):
    """Returns `saved(start, stop, copies)`: the layers whose residuals stay, None if too large.

    While a recomputed layer's backward runs, its own residuals are there once.
    """

    @cache
    def knapsack(start: int, stop: int, copies: int) -> frozenset[int] | None:
        layers = range(start, stop)
        room = chain.capacity_bytes - sum(chain.state_bytes[i] for i in layers)
        if room < 0:
            return None
        need = sum(chain.residual_bytes[i] for i in layers) * copies
        if need <= room:
            return frozenset(layers)
        transient = max(chain.residual_bytes[i] for i in layers)
        return None if transient > room else _most_saved(chain, layers, copies, room - transient)

    return knapsack


def _most_saved(chain: Chain, layers: range, copies: int, room: float) -> frozenset[int]:
    """Returns the layers to save, worth the most forward seconds within `room` bytes. Exact.

    A list of (bytes, seconds, layers) in which more bytes always mean more seconds.
    """
    front: list[tuple[float, float, tuple[int, ...]]] = [(0.0, 0.0, ())]
    for layer in layers:
        weight, worth = chain.residual_bytes[layer] * copies, chain.forward_s[layer]
        taken = [
            (b + weight, s + worth, (*kept, layer)) for b, s, kept in front if b + weight <= room
        ]
        merged = sorted([*front, *taken], key=lambda option: (option[0], -option[1]))
        front = []
        for option in merged:
            if not front or option[1] > front[-1][1] * (1 + 1e-12):
                front.append(option)
    return frozenset(front[-1][2])


FAMILIES = (
    Partitioner(
        "adapipe",
        "sum(t) + (m-1) max(t), recomputing the layers that memory cannot hold",
        "Sun et al., AdaPipe, ASPLOS 2024, sections 4 and 5 (own knapsack)",
        adapipe,
    ),
)
