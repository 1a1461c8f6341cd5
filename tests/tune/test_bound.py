"""The lower bound: never above the exact optimum, tight where it should be, valid for any plan."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octojax.ir import LayerCost, Machine, Profile
from octojax.tune.bound import UNITS, _Fill, average_load_s, entries_s, lower_bound
from octojax.tune.exact import solve
from octojax.tune.problem import Problem
from octojax.tune.starts import starting_points

BACKWARDS = "whole backwards after the first gradient"


def problem_of(costs, ranks, microbatches, machine=None) -> Problem:
    layers = tuple(LayerCost("x", *c) for c in costs)
    return Problem.of(Profile("p", layers, machine or Machine()), ranks, microbatches)


def test_fig3_joint_plan_of_19_is_optimal():
    """Six layers of 1T on two ranks, two microbatches: 19, where the paper's figure shows 20."""
    problem = problem_of([(1, 1, 1)] * 6, 2, 2)
    found = solve(problem)
    assert found.proven
    assert found.makespan_s == 19
    assert lower_bound(problem).seconds == pytest.approx(19, rel=1e-9)
    assert lower_bound(problem).binding in ("whole layers and fill", BACKWARDS)


@pytest.mark.parametrize(
    ("costs", "ranks", "microbatches", "optimum"),
    [
        ([(1, 2, 1)] * 4, 2, 2, 18),
        ([(1, 2, 2)] * 3, 3, 2, 15),
        ([(1, 1, 1)] * 4, 4, 3, 13),
        ([(1, 1, 3)] * 3, 3, 2, 13),
    ],
)
def test_few_microbatches_wait_for_their_first_gradient(costs, ranks, microbatches, optimum):
    problem = problem_of(costs, ranks, microbatches)
    found, bound = solve(problem, nodes=300_000), lower_bound(problem)
    assert found.proven
    assert found.makespan_s == optimum
    assert bound.seconds == pytest.approx(optimum, rel=1e-9)
    assert bound.binding == BACKWARDS
    others = [value for name, value in bound.parts if name != BACKWARDS]
    assert max(others) <= optimum - 1


def test_pigeonhole_of_whole_layers_is_seen():
    """Seven layers on two ranks: one rank has four of them, though the mean is 3.5."""
    problem = problem_of([(1, 1, 1)] * 7, 2, 10)
    assert average_load_s(problem) == pytest.approx(105.5)
    assert lower_bound(problem).seconds == pytest.approx(120, rel=1e-9)


def test_heavy_layer_binds():
    problem = problem_of([(1, 1, 1)] * 5 + [(20, 20, 20)], 3, 4)
    bound = lower_bound(problem)
    assert bound.seconds == pytest.approx(5 + 4 * 60, rel=1e-9)
    assert bound.replicated_s < bound.seconds


@settings(deadline=None, max_examples=40)
@given(
    st.lists(
        st.tuples(st.integers(1, 9), st.integers(0, 9), st.integers(0, 5)), min_size=2, max_size=4
    ),
    st.integers(1, 3),
    st.sampled_from([0.0, 0.5]),
    st.sampled_from([0.0, 0.25]),
    st.sampled_from([(), (), (1.0, 2.0, 1.5)]),
    st.sampled_from([2, 3]),
)
def test_never_above_the_exact_optimum(costs, microbatches, latency, host, speeds, ranks):
    ranks = min(ranks, len(costs))
    machine = Machine(latency_s=latency, host_cost_s=host, speeds=speeds[:ranks])
    problem = problem_of(costs, ranks, microbatches, machine)
    found = solve(problem, nodes=300_000)
    if found.proven:
        assert lower_bound(problem).seconds <= found.makespan_s * (1 + 1e-12)


@settings(deadline=None, max_examples=10)
@given(st.integers(0, 10_000))
def test_never_above_plans_that_were_found(seed):
    from octojax.tune.measure import measure, to_plan

    rng = np.random.default_rng(seed)
    costs = rng.uniform(0.5, 3, (int(rng.integers(6, 30)), 3))
    problem = problem_of(costs.tolist(), int(rng.integers(2, 6)), int(rng.integers(1, 9)))
    found = starting_points(problem, steps=2000)[0]
    made = measure(to_plan(found, problem), problem).makespan_s
    assert lower_bound(problem).seconds <= made * (1 + 1e-12)


def test_rounded_sums_never_fall_below_the_exact_ones():
    """With many different layers sums are rounded, towards a weaker bound only."""
    rng = np.random.default_rng(3)
    few = problem_of([(1, 1, 1)] * 4 + [(2, 1, 0.5)] * 5 + [(4, 4, 4)], 3, 4)
    fill, rounded = (_Fill(few, few.compute_s, entries_s(few), 0, 2) for _ in range(2))
    others = [float(w) for w in few.compute_s[1:-1]]
    rounded.exact = None
    rounded.smallest = np.cumsum(sorted(others))
    bits = 1
    for w in others:
        bits |= bits << int(w / rounded.unit)
    rounded.rounded = bits & ((1 << (4 * UNITS)) - 1)
    for room in rng.uniform(0, 20, 50):
        assert rounded.most(room) >= fill.most(room)
        assert rounded.most(room) <= room
