"""The compiled list scheduler against the simulator: same makespan, same memory, always valid."""

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octojax.ir import LayerCost, Machine, Profile
from octojax.simulate import check_capacity, simulate
from octojax.tune.anneal import anneal, least_makespan
from octojax.tune.best import move_chances
from octojax.tune.candidate import Candidate, problem_arrays
from octojax.tune.constraints import Constraints
from octojax.tune.justify import ROUNDS
from octojax.tune.keys import FORMULAS, by_formula
from octojax.tune.measure import measure, run, to_plan
from octojax.tune.problem import Problem
from octojax.tune.search import PHASES

TIMES = st.sampled_from([0.25, 0.5, 1.0, 1.75, 3.0, 8.0])


@st.composite
def problems(draw, least=1, most=4):
    """Small heterogeneous problems, with links, host cost, unequal ranks and nodes or not."""
    p = draw(st.integers(least, most))
    layers = draw(
        st.lists(
            st.builds(
                LayerCost,
                st.just("x"),
                TIMES,
                st.sampled_from([0.0, 0.5, 2.0]),
                st.sampled_from([0.0, 0.25, 1.0]),
                state_bytes=st.integers(0, 30),
                residual_bytes=st.integers(0, 20),
                weight_residual_bytes=st.integers(0, 30),
                output_bytes=st.integers(0, 6),
            ),
            min_size=p,
            max_size=9,
        )
    )
    machine = Machine(
        latency_s=draw(st.sampled_from([0.0, 0.125, 1.0])),
        bandwidth_bytes_per_s=draw(st.sampled_from([math.inf, 4.0])),
        host_cost_s=draw(st.sampled_from([0.0, 0.0625])),
        speeds=draw(st.sampled_from([(), (1.0, 2.0, 0.5, 1.0)])),
        ranks_per_node=draw(st.sampled_from([None, 2])),
        inter_latency_s=0.5,
    )
    return Problem.of(Profile("small", tuple(layers), machine), p, draw(st.integers(1, 5)))


@st.composite
def candidates(draw, problem):
    layers = problem.num_layers
    ranks = draw(st.permutations(range(problem.ranks)))
    more = st.lists(
        st.integers(0, problem.ranks - 1),
        min_size=layers - problem.ranks,
        max_size=layers - problem.ranks,
    )
    seed = draw(st.integers(0, 99))
    rng = np.random.default_rng(seed)
    keys = by_formula(problem, FORMULAS[draw(st.integers(0, len(FORMULAS) - 1))])
    keys += rng.normal(size=keys.shape) * draw(st.sampled_from([0.0, 1.0, 1e7]))
    found = Candidate.of(np.array([*ranks, *draw(more)]), keys, rng.random(layers) < 0.4)
    stage = np.cumsum(np.concatenate([[1], (np.diff(found.rank_L) != 0) | found.cut_L[1:]])) - 1
    return Candidate(
        found.rank_L,
        found.cut_L,
        (rng.random(layers) < 0.3)[stage],
        (rng.random(layers) < 0.2)[stage],
        found.key_LKM,
        np.array([draw(st.sampled_from([0.0, 0.5, 5.0]))]),
    )


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_makespan_and_plan_are_the_simulators(data):
    problem = data.draw(problems())
    found = data.draw(candidates(problem))
    makespan, rows, starts, _ = run(found, problem)
    timeline = simulate(to_plan(found, problem), problem.profile)
    assert timeline.makespan_s == pytest.approx(makespan, rel=1e-12)
    assert (np.diff(starts) >= 0).all()
    begun = sorted(span.start_s for span in timeline.actions)
    assert begun == pytest.approx(sorted(starts.tolist()), rel=1e-12, abs=1e-12)
    assert len(rows) == len(timeline.actions)


@settings(deadline=None, max_examples=40)
@given(st.data())
def test_residual_peaks_are_the_simulators_where_nothing_is_sent(data):
    """Transfer buffers are left to the simulator; without any, peaks agree to the byte."""
    problem = data.draw(problems())
    layers = tuple(replace(x, output_bytes=0) for x in problem.profile.layers)
    problem = Problem.of(
        replace(problem.profile, layers=layers), problem.ranks, problem.microbatches
    )
    found = data.draw(candidates(problem))
    _, _, _, peaks = run(found, problem)
    state = np.bincount(found.rank_L, problem.state_bytes, problem.ranks)
    simulated = measure(to_plan(found, problem), problem).peak_bytes
    assert (peaks + state >= simulated).all()
    if (problem.input_grad_s > 0).all() and (problem.weight_grad_s > 0).all():
        # The simulator counts all changes of an instant as one, so work of no duration is free.
        assert (peaks + state).tolist() == simulated.tolist()


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_a_schedule_made_within_a_capacity_stays_within_it(data):
    problem = data.draw(problems())
    layers = tuple(replace(x, output_bytes=0) for x in problem.profile.layers)
    free = Problem.of(replace(problem.profile, layers=layers), problem.ranks, problem.microbatches)
    found = data.draw(candidates(free))
    peak = measure(to_plan(found, free), free).peak_bytes.max()
    capacity = max(1.0, float(peak) * data.draw(st.sampled_from([0.5, 0.7, 0.9, 1.0])))
    arrays = problem_arrays(free, np.full(free.ranks, capacity))
    makespan, _, _, _ = run(found, free, arrays)
    if makespan < np.inf:
        plan = to_plan(found, free, arrays)
        assert measure(plan, free).makespan_s == pytest.approx(makespan, rel=1e-12)
        machine = replace(free.profile.machine, capacity_bytes=capacity)
        check_capacity(plan, free.profile.on(machine))


@settings(deadline=None, max_examples=40)
@given(st.data())
def test_hope_is_below_every_schedule(data):
    """What the annealing drops unseen could never have been better."""
    problem = data.draw(problems())
    found = data.draw(candidates(problem))
    arrays = problem_arrays(problem)
    hope = least_makespan(
        found.rank_L, arrays[0], problem.speeds, problem.host_cost_s, problem.microbatches
    )
    assert hope <= run(found, problem)[0] * (1 + 1e-12)


@settings(deadline=None, max_examples=100)
@given(st.data())
def test_annealing_only_returns_what_it_measured(data):
    problem = data.draw(problems(2, 3))
    found = data.draw(candidates(problem))
    arrays = problem_arrays(problem)
    before = run(found, problem)[0]
    weights = move_chances(problem, frozenset(PHASES))
    rounds = data.draw(st.sampled_from([0, ROUNDS]))
    arguments = (*found.arrays, *arrays, *Constraints().arrays, weights, rounds, 60, 0.3, 0.01, 5)
    made = [anneal(*arguments) for _ in range(2)]
    best_s, best, last_s, last, counts = made[0]
    assert best_s == made[1][0]
    assert best_s <= before
    assert run(Candidate(*best), problem)[0] == best_s
    assert run(Candidate(*last), problem)[0] == last_s
    assert counts.sum() <= 60
    for flag in (best[2], best[3]):
        same = (np.diff(best[0]) == 0) & ~best[1][1:]
        assert (flag[1:][same] == flag[:-1][same]).all()
