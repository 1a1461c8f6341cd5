"""The sweep over published ways: what is left out could not have been the best of anything."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octojax.ir import LayerCost, Machine, Profile, uniform_partition
from octojax.schedules import SCHEDULES
from octojax.simulate import StageCosts, simulate
from octojax.simulate.table import Table
from octojax.tune.baselines import least_s, outcomes, published, summary
from octojax.tune.measure import fits
from octojax.tune.problem import Problem
from octojax.tune.recompute_rule import RecomputeRule
from octojax.tune.table_forms import split, split_table


def random_problem(seed: int) -> Problem:
    rng = np.random.default_rng(seed)
    ranks = int(rng.integers(2, 5))
    count = int(rng.integers(ranks, 5 * ranks))
    layers = tuple(
        LayerCost("x", *map(float, rng.choice([0.5, 1.0, 2.0, 4.0], 3)), 0, 1,
                  residual_bytes=int(rng.integers(1, 9)), output_bytes=1)
        for _ in range(count)
    )  # fmt: skip
    capacity = float(rng.choice([math.inf, 30 * count / ranks, 12 * count / ranks]))
    speeds = (1.0,) * (ranks - 1) + (float(rng.choice([1.0, 0.5])),)
    machine = Machine(latency_s=0.01, capacity_bytes=capacity, speeds=speeds)
    rule = RecomputeRule(str(rng.choice(["auto", "all", "none"])))
    microbatches = int(rng.integers(1, 3)) * ranks
    return Problem.of(Profile("p", layers, machine), ranks, microbatches, None, rule)


@settings(deadline=None, max_examples=12)
@given(st.integers(0, 10_000))
def test_what_is_left_out_is_the_best_of_nothing(seed):
    problem = random_problem(seed)
    every = list(outcomes(problem, hopeless=lambda name, least: False))
    some = list(outcomes(problem))
    assert {o.name for o in some} <= {o.name for o in every}
    assert summary(some, problem) == summary(every, problem)

    def best_held_once(measured):
        return min(
            (o.evaluation.makespan_s for o in measured
             if fits(o.evaluation, problem) and not o.replicated),
            default=None,
        )  # fmt: skip

    assert best_held_once(some) == best_held_once(every)


@settings(deadline=None, max_examples=6)
@given(st.integers(0, 10_000))
def test_every_plan_takes_what_was_measured_and_no_less_than_its_bound(seed):
    problem = random_problem(seed)
    for name, plan, evaluation in published(problem):
        assert plan.name == name
        makespan = simulate(plan, problem.profile).makespan_s
        assert makespan == pytest.approx(evaluation.makespan_s, rel=1e-12)
        assert least_s(problem, plan.placement, plan.partition) <= makespan


@pytest.mark.parametrize("name", SCHEDULES)
def test_tables_split_as_schedules_do(name):
    family = SCHEDULES[name]
    table = family.generate(4, 8)
    place = family.place(4, None)
    assert place == table.placement
    once = split_table(Table.of(table, place))
    twice = Table.of(split(table), place)
    assert (once.items == twice.items).all()
    assert (once.rank_start == twice.rank_start).all()
    assert once.items.dtype == twice.items.dtype
    assert once.to_schedule() == split(table)


def test_1f1b_is_always_measured():
    problem = random_problem(3)
    names = [o.name for o in outcomes(problem, enough=lambda: True)]
    assert names == ["1f1b/uniform", "1f1b-split/uniform", "1f1b-fill/uniform"]
    uniform = uniform_partition(problem.profile.kinds, problem.ranks)
    table = SCHEDULES["1f1b"].generate(problem.ranks, problem.microbatches)
    again = problem.recompute.flags(problem.ranks)
    costs = StageCosts.of(problem.profile, uniform, again)
    first = next(outcomes(problem))
    whole = simulate(table, costs, problem.profile.machine)
    assert first.evaluation.makespan_s == pytest.approx(whole.makespan_s)
