"""Timelines for tests of the page: small ones by hand, and large ones."""

import numpy as np

from octojax.ir import Machine, Timeline
from octojax.schedules import generate
from octojax.simulate import StageCosts, simulate


def uneven(name: str, ranks: int, microbatches: int) -> Timeline:
    """A step whose stages cost up to 1.3 times as much as others, with memory and transfers."""
    schedule = generate(name, ranks, microbatches)
    stages = schedule.num_stages
    costs = StageCosts.unit(stages, 1.0, 1.0, 0.7)
    more = 1 + 0.3 * np.random.default_rng(0).random((stages, 1))
    nbytes = np.tile([[3e8, 1e8, 2e7, 2e7, 4e9]], (stages, 1))
    nbytes[-1, 2] = nbytes[0, 3] = 0.0
    costs = StageCosts(costs.seconds * more * 1e-3, nbytes, costs.recompute)
    machine = Machine(latency_s=1e-4, bandwidth_bytes_per_s=1e11)
    return simulate(schedule, costs, machine)


def layers(stages: int) -> tuple[str, ...]:
    """What `octopipe show` says of stages of three layers each."""
    kinds = ("moe", "attention")
    return tuple(f"layers {3 * i}-{3 * i + 2}: mamba, mlp, {kinds[i % 2]}" for i in range(stages))
