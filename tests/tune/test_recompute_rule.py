"""Recompute as asked for: in plans, in what they are compared with, in the bound."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octojax.errors import CapacityError
from octojax.ir import LayerCost, Machine, Partition, Plan, Profile
from octojax.passes import Recompute
from octojax.schedules import generate
from octojax.simulate import simulate
from octojax.tune import lower_bound, tune
from octojax.tune.exact import solve
from octojax.tune.problem import Problem
from octojax.tune.recompute_rule import RecomputeRule

LAYERS = tuple(
    LayerCost("x", 1.0, 1.0, 1.0, 0, 1, residual_bytes=100, output_bytes=1) for _ in range(8)
)
EIGHT = Profile("eight", LAYERS, Machine())


@settings(deadline=None, max_examples=100)
@given(st.sets(st.integers(0, 30), min_size=1))
def test_rules_read_back_as_they_print(stages):
    rule = RecomputeRule.of(stages)
    assert RecomputeRule.of(str(rule)) == rule
    assert {s for s, again in enumerate(rule.flags(31)) if again} == stages
    assert rule.array(31).tolist() == list(rule.flags(31))


@pytest.mark.parametrize(
    "wrong", ["some", "3-1", "-1", "1,,2", "1.5", "", [], [-1], [True], ["1"], "0-99999999999"]
)
def test_other_rules_are_refused(wrong):
    with pytest.raises(ValueError, match=r"expected auto .*all, none, or stages such as 0-3,7"):
        RecomputeRule.of(wrong)


@pytest.mark.parametrize("method", ["best", "octopipe", "random"])
@pytest.mark.parametrize(
    ("rule", "expected"),
    [
        ("all", lambda s: True),
        ("none", lambda s: False),
        ("0-1,3", lambda s: s in (0, 1, 3)),
    ],
)
def test_plans_and_baselines_recompute_what_was_asked(method, rule, expected):
    result = tune(EIGHT, 2, 4, recompute=rule, method=method, iterations=2, replicated=False)
    plan = result.plan
    assert plan.recomputes == tuple(expected(s) for s in range(plan.num_stages))
    assert result.recompute == result.to_json()["recompute"] == rule
    table = generate("1f1b", 2, 4)
    again = (expected(0), expected(1))
    fused = simulate(Plan(Partition((4, 4)), table.placement, table, again), EIGHT)
    assert result.baselines["1f1b"] == fused.makespan_s
    assert simulate(plan, EIGHT).makespan_s == pytest.approx(result.makespan_s)


def test_filled_1f1b_recomputes_too():
    """What fills its bubbles goes by the times of a backward with the forward once more."""
    plain = tune(EIGHT, 2, 4, iterations=0, recompute="none").baselines
    again = tune(EIGHT, 2, 4, iterations=0, recompute="all").baselines
    for name in ("1f1b", "1f1b-split", "1f1b-fill"):
        assert again[name] >= plain[name] + 4 * 4.0, name  # a forward of four layers, four times


@settings(deadline=None, max_examples=40)
@given(st.data())
def test_the_bound_holds_where_all_is_recomputed(data):
    times = st.integers(1, 8).map(float)
    layers = data.draw(st.integers(2, 4))
    costs = [[data.draw(times) for _ in range(3)] for _ in range(layers)]
    profile = Profile("p", tuple(LayerCost("x", *c) for c in costs), Machine())
    ranks, microbatches = data.draw(st.integers(1, 2)), data.draw(st.integers(1, 2))
    problem = Problem.of(profile, ranks, microbatches, recompute=RecomputeRule("all"))
    exact = solve(problem, nodes=100_000)
    bound = lower_bound(problem)
    assert bound.seconds <= exact.makespan_s * (1 + 1e-12)
    assert bound.seconds >= lower_bound(Problem.of(profile, ranks, microbatches)).seconds
    if exact.plan is not None:
        assert all(exact.plan.recomputes)
        assert simulate(exact.plan, profile).makespan_s == pytest.approx(exact.makespan_s)
    longer = Profile("p", tuple(LayerCost("x", f, i + f, w) for f, i, w in costs), Machine())
    assert exact.makespan_s == solve(Problem.of(longer, ranks, microbatches)).makespan_s


@settings(deadline=None, max_examples=30)
@given(st.integers(0, 10_000), st.sampled_from(["1f1b", "zb-h1", "gpipe"]))
def test_the_bound_holds_where_recompute_runs_ahead(seed, name):
    """With R in the table a gradient does not wait for the forward that is run again."""
    rng = np.random.default_rng(seed)
    costs = rng.integers(1, 9, (6, 3))
    profile = Profile("p", tuple(LayerCost("x", *map(float, c)) for c in costs), Machine())
    ranks, microbatches = int(rng.integers(1, 4)), int(rng.integers(3, 6))
    table = generate(name, ranks, microbatches)
    plan = Plan(Partition((6 - ranks + 1,) + (1,) * (ranks - 1)), table.placement, table)
    plan = Recompute(costs=profile, drop_redundant=False)(plan)
    assert all(plan.recomputes)
    problem = Problem.of(profile, ranks, microbatches, recompute=RecomputeRule("all"))
    assert lower_bound(problem).seconds <= simulate(plan, profile).makespan_s * (1 + 1e-12)


def test_what_does_not_fit_without_recompute_says_the_way_out():
    tight = EIGHT.on(replace(EIGHT.machine, capacity_bytes=260))
    assert any(tune(tight, 2, 4, iterations=1, replicated=False).plan.recomputes)
    with pytest.raises(CapacityError, match=r"nothing recomputed(.|\n)*--recompute auto"):
        tune(tight, 2, 4, iterations=1, recompute="none", replicated=False)


def test_a_plan_that_is_a_start_recomputes_as_asked():
    table = generate("1f1b", 2, 4)
    plan = Recompute(stages=(0,))(Plan(Partition((4, 4)), table.placement, table))
    assert plan.recomputes == (True, False)
    for rule, flags in (("auto", (True, False)), ("none", (False, False)), ("1", (False, True))):
        result = tune(
            EIGHT, 2, 4, start=plan, recompute=rule, phases={"partition"}, iterations=1,
        )  # fmt: skip
        assert result.plan.recomputes == flags


def test_stages_that_no_plan_has_are_refused():
    with pytest.raises(ValueError, match="at most stages 0 to 7, so there is no stage 8, 9"):
        tune(EIGHT, 2, 4, recompute="0,8-9", iterations=0)
    with pytest.raises(ValueError, match="exact method makes every layer a stage"):
        tune(Profile("p", LAYERS[:3]), 2, 2, recompute="0", method="exact")


def test_the_exact_method_recomputes_all():
    few = Profile("few", LAYERS[:3])
    result = tune(few, 2, 2, recompute="all", method="exact")
    assert all(result.plan.recomputes)
    assert result.lower_bound_s <= result.makespan_s
