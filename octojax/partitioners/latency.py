"""Partitions by the latency of 1F1B as Alpa, DAPPLE, PipeDream and Mist estimate it."""

import math

import numpy as np

from octojax.errors import CapacityError
from octojax.ir.partition import Partition
from octojax.partitioners.chain import Array, Chain, spans
from octojax.partitioners.cut import TOLERANCE, Division, cut, least_maximum, objective
from octojax.partitioners.family import Partitioner
from octojax.partitioners.ties import quickest


def alpa(chain: Chain, stages: int, microbatches: int) -> Division:
    """Returns the least `sum(t) + (m-1) max(t)`, every stage within memory.

    Stage s keeps the activations of the p-s microbatches that 1F1B has in flight there. A
    stage's time includes the transfer of its output and the gradient's way back.
    """
    times = chain.compute_s() + 2 * _border(chain)
    return _least(chain, _fitting(chain, times, stages), None, stages, microbatches)


def dapple(chain: Chain, stages: int, microbatches: int) -> Division:
    """Returns the least warm-up + (m-1) pivot + ending, with transfers as stages of their own.

    Without replication that is `sum(t) + sum(c) + (m-1) max(t, c)` with c both ways of a border.
    """
    compute, border = chain.compute_s(), 2 * _border(chain)
    return _least(chain, compute + border, np.maximum(compute, border), stages, microbatches)


def pipedream(chain: Chain, stages: int, microbatches: int) -> Division:
    """Returns the least time of the slowest stage or border (both ways), within memory.

    One rank per stage; PipeDream's replication of stages is data parallelism, not decided here.
    """
    slowest = _fitting(chain, np.maximum(chain.compute_s(), 2 * _border(chain)), stages)
    least = least_maximum(slowest, chain.compute_s(), stages)
    if least is None:
        raise _too_large(chain, stages)
    return _settled(*least, chain, np.zeros_like(slowest), slowest, 1, microbatches)


def mist(chain: Chain, stages: int, microbatches: int, spread: int = 2) -> Division:
    """Returns the least `(m-1) max(t) + sum(t)` with layers per stage within n/p +- `spread`.

    Mist prunes its integer program so; where that leaves nothing, the window widens.
    """
    even = round(chain.num_layers / stages)
    layers = spans(np.ones(chain.num_layers))
    times = chain.compute_s() + 2 * _border(chain)
    for window in range(max(0, spread), chain.num_layers + 1):
        near = np.where(np.abs(layers - even) <= window, times, math.inf)
        if cut(near, None, stages, 0.0) is not None:
            return _least(chain, near, None, stages, microbatches)
    raise AssertionError("a window of all layers allows every partition")


def _border(chain: Chain) -> Array:
    """Returns `(n+1, n+1)`: the transfer after layer j-1, none after the last layer."""
    n = chain.num_layers
    after = np.array([0.0, *chain.border_s[:-1], 0.0])
    return np.broadcast_to(after, (n + 1, n + 1)).copy()


def _fitting(chain: Chain, times: Array, stages: int) -> Array:
    """Returns `times` per place in the pipeline, infinite where the stage overflows memory."""
    if math.isinf(chain.capacity_bytes):
        return times
    state, residual = spans(chain.state_bytes), spans(chain.residual_bytes)
    return np.stack(
        [
            np.where(state + (stages - s) * residual <= chain.capacity_bytes, times, math.inf)
            for s in range(stages)
        ]
    )


def _least(
    chain: Chain, sums: Array, maxima: Array | None, stages: int, microbatches: int
) -> Division:
    least = cut(sums, maxima, stages, microbatches - 1)
    if least is None:
        raise _too_large(chain, stages)
    return _settled(*least, chain, sums, maxima, microbatches - 1, microbatches)


def _settled(
    partition: Partition,
    value_s: float,
    chain: Chain,
    sums: Array,
    maxima: Array | None,
    weight: float,
    microbatches: int,
) -> Division:
    """Returns the quickest of the partitions with the same objective."""
    limit = value_s * (1 + TOLERANCE)
    best = quickest(
        partition,
        chain,
        microbatches,
        lambda other: objective(sums, maxima, weight, other) <= limit,
    )
    return Division(best, value_s)


def _too_large(chain: Chain, stages: int) -> CapacityError:
    state, residual = sum(chain.state_bytes), sum(chain.residual_bytes)
    return CapacityError(
        f"no partition of {chain.num_layers} layers into {stages} stages fits into "
        f"{chain.capacity_bytes / 2**30:.2f} GiB per rank: all states are {state / 2**30:.2f} GiB, "
        f"the residuals of one microbatch {residual / 2**30:.2f} GiB, and stage 0 keeps {stages} "
        f"microbatches. Try the partitioner adapipe (it recomputes), more ranks, or smaller "
        f"microbatches"
    )


FAMILIES = (
    Partitioner(
        "alpa",
        "sum(t) + (m-1) max(t) within memory",
        "Zheng et al., Alpa, OSDI 2022, arXiv:2201.12023, section 5",
        alpa,
    ),
    Partitioner(
        "dapple",
        "warm-up + (m-1) pivot + ending, borders as stages",
        "Fan et al., DAPPLE, PPoPP 2021, arXiv:2007.01045, section 4",
        dapple,
    ),
    Partitioner(
        "pipedream",
        "slowest stage or border, within memory",
        "Narayanan et al., PipeDream, SOSP 2019, section 3.1",
        pipedream,
    ),
    Partitioner(
        "mist",
        "(m-1) max(t) + sum(t), layers per stage near the mean",
        "Zhu et al., Mist, EuroSys 2025, arXiv:2503.19050",
        mist,
        (("spread", 2),),
    ),
)
