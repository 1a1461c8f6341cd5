"""Forward-backward improvement: never worse, and dense at the end what was dense at the start."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octojax.ir import LayerCost, Machine, Profile
from octojax.simulate import simulate
from octojax.tune.candidate import Candidate
from octojax.tune.justify import justified
from octojax.tune.keys import FORMULAS, by_formula
from octojax.tune.measure import run, to_plan
from octojax.tune.problem import Problem


def problem_of(seed: int, ranks: int, microbatches: int) -> Problem:
    rng = np.random.default_rng(seed)
    layers = tuple(
        LayerCost("x", *map(float, rng.uniform(0.5, 3, 3)), output_bytes=1)
        for _ in range(3 * ranks)
    )
    machine = Machine(latency_s=0.05, bandwidth_bytes_per_s=20.0)
    return Problem.of(Profile("p", layers, machine), ranks, microbatches)


@settings(deadline=None, max_examples=25)
@given(st.integers(0, 1000), st.integers(2, 4), st.integers(1, 6), st.integers(0, 7))
def test_never_worse_and_still_what_the_simulator_says(seed, ranks, microbatches, row):
    problem = problem_of(seed, ranks, microbatches)
    rank_L = np.arange(problem.num_layers) % ranks
    found = Candidate.of(rank_L, by_formula(problem, FORMULAS[row]))
    before = run(found, problem)[0]
    makespan, better = justified(found, before, problem)
    assert makespan <= before
    assert simulate(to_plan(better, problem), problem.profile).makespan_s == pytest.approx(
        makespan, rel=1e-12
    )


def test_it_does_improve():
    """On most random orders something is gained."""
    gains = 0
    for seed in range(20):
        problem = problem_of(seed, 3, 6)
        keys = np.random.default_rng(seed).uniform(0, 30, (9, 3, 6))
        found = Candidate.of(np.arange(9) % 3, keys)
        before = run(found, problem)[0]
        gains += justified(found, before, problem)[0] < before * 0.999
    assert gains >= 10
