"""Partition and recompute decided together, a stage at a time, as AdaPipe and Mist do."""

import math
from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from octojax.errors import CapacityError
from octojax.ir.plan import Plan
from octojax.partitioners import Chain
from octojax.partitioners.chain import spans
from octojax.partitioners.cut import cut
from octojax.schedules import generate
from octojax.tune.measure import fits, measure
from octojax.tune.problem import Problem
from octojax.tune.table_forms import split

TRIES = 4
"""Times that memory is set aside for what the partitioner does not count (transfer buffers)."""


def chain_of(problem: Problem) -> Chain:
    """Returns the layers as partitioners see them, within the problem's memory and recompute."""
    p = problem
    chain = replace(Chain.of(p.profile), capacity_bytes=min(p.capacities_bytes))
    if p.recompute.mode != "all":
        return chain
    again = tuple(b + f for b, f in zip(chain.backward_s, chain.forward_s, strict=True))
    return replace(chain, backward_s=again, residual_bytes=(0.0,) * chain.num_layers)


def with_recompute(
    problem: Problem, name: str, window: int | None = None, borders: bool = False
) -> Iterator[Plan]:
    """Yields 1F1B on the partition of least `sum(t) + (m-1) max(t)`, where a stage that memory
    cannot hold is recomputed, and its t a forward longer.

    Stage s keeps min(p-s, m) microbatches. `window`: layers per stage within that of the mean
    (wider where nothing is allowed), as Mist prunes its program. `borders` adds a transfer each
    way to t. Where the simulator counts more than the capacity, it is tried again with less.
    Raises `CapacityError` where no partition is allowed.
    """
    p = problem
    table = generate("1f1b", p.ranks, p.microbatches)
    short = 0.0
    for _ in range(TRIES):
        cut = _least(p, window, borders, short)
        if cut is None:
            break
        sizes, flags = cut
        flags = p.recompute.flags(p.ranks, flags if any(flags) else ())
        plan = Plan(sizes, table.placement, table, flags, name)
        yield plan
        evaluation = measure(plan.with_schedule(split(table)), p)  # which keeps more
        if fits(evaluation, p):
            return
        short += 1.01 * float((evaluation.peak_bytes - p.capacity_bytes).max())
    if not short:
        raise CapacityError(
            f"no partition of {p.num_layers} layers into {p.ranks} stages fits into memory, "
            f"recompute {p.recompute}"
        )


def _least(problem: Problem, window: int | None, borders: bool, short: float):
    """Returns the partition and each stage's recompute with `short` bytes less on every rank."""
    p = problem
    chain = Chain.of(p.profile)
    capacity = min(p.capacities_bytes) - short
    total, forward = chain.compute_s(), spans(chain.forward_s)
    state, residual = spans(chain.state_bytes), spans(chain.residual_bytes)
    received = np.array([0.0, *(x.output_bytes for x in p.profile.layers[:-1]), 0.0])[:, None]
    hops = np.zeros(p.num_layers + 1)
    if borders:
        hops[1:-1] = 2 * np.array(chain.border_s[:-1])
    layers = spans(np.ones(p.num_layers))
    forced = p.recompute.array(p.ranks)
    times = np.full((p.ranks, p.num_layers + 1, p.num_layers + 1), math.inf)
    again = np.zeros_like(times, dtype=np.bool_)
    for s in range(p.ranks):
        copies = min(p.ranks - s, p.microbatches)
        keeps = state + copies * residual <= capacity
        rebuilds = state + copies * received + residual <= capacity
        if len(forced):
            keeps, rebuilds = keeps & ~forced[s], rebuilds & forced[s]
        times[s] = np.where(keeps, total, np.where(rebuilds, total + forward, math.inf)) + hops
        again[s] = rebuilds & ~keeps
    even = round(p.num_layers / p.ranks)
    for width in range(window, p.num_layers) if window is not None else (p.num_layers,):
        near = np.where(np.abs(layers - even) <= width, times, math.inf)
        best = cut(near, None, p.ranks, p.microbatches - 1)
        if best is not None:
            partition = best[0]
            bounds = partition.bounds
            flags = tuple(bool(again[s, bounds[s], bounds[s + 1]]) for s in range(p.ranks))
            return partition, flags
    return None
