"""`tune` as a whole: never worse than published ways, within memory, repeatable, clear errors."""

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octojax.errors import CapacityError, ProfileError
from octojax.ir import LayerCost, Machine, Plan, Profile, uniform_partition
from octojax.ir.verify import verify
from octojax.schedules import SCHEDULES
from octojax.simulate import StageCosts, check_capacity, simulate
from octojax.tune import PHASES, tune, tuner
from octojax.tune.exact import is_small, solve
from octojax.tune.problem import Problem
from octojax.tune.result import COMPILATION

DATA = Path(__file__).parents[1] / "data" / "profiles"
JAMBA = Profile.load(DATA / "jamba-s.calibrated.json")
NEMOTRON = Profile.load(DATA / "nemotron-h-s.calibrated.json")


def random_profile(seed: int, ranks: int, layers: int, tight: float = math.inf) -> Profile:
    """A heterogeneous chain with a head of up to twice a mean stage."""
    rng = np.random.default_rng(seed)
    kinds = rng.uniform(0.2e-3, 3e-3, (4, 3))
    rows = [kinds[k] for k in rng.integers(4, size=layers)]
    stage = sum(map(sum, rows)) / ranks
    rows[-1] = np.array([0.4, 0.4, 0.2]) * stage * rng.uniform(0.2, 2.0)
    made = tuple(
        LayerCost(
            "x", *map(float, row), state_bytes=1000, residual_bytes=int(1e5 * row[0] / 1e-3),
            weight_residual_bytes=int(8e4 * row[0] / 1e-3), output_bytes=20_000,
        )
        for row in rows
    )  # fmt: skip
    machine = Machine(
        latency_s=2e-5, bandwidth_bytes_per_s=2e10, capacity_bytes=tight,
        host_cost_s=float(rng.choice([0.0, 5e-5])),
    )  # fmt: skip
    return Profile(f"random {seed}", made, machine)


def published_makespans(profile: Profile, ranks: int, microbatches: int) -> dict[str, float]:
    """Every published table with its own chunks on the uniform partition, that fits; written
    apart from the tuner's own list.
    """
    found = {}
    for name, family in SCHEDULES.items():
        if ranks * microbatches > 40 and name in ("zb-auto", "hanayo", "tessel"):
            continue
        try:
            table = family.generate(ranks, microbatches)
            partition = uniform_partition(profile.kinds, table.num_stages)
        except ValueError:
            continue
        plan = Plan(partition, table.placement, table)
        try:
            check_capacity(plan, profile)
        except CapacityError:
            continue
        found[name] = simulate(table, StageCosts.of(profile, partition), profile.machine).makespan_s
    return found


def check(result, profile: Profile, ranks: int, microbatches: int) -> None:
    """The plan is complete, runs in the time and memory that the result states."""
    verify(result.plan, num_stages=result.plan.num_stages)
    assert result.plan.partition.num_layers == profile.num_layers
    assert (result.plan.num_ranks, result.plan.num_microbatches) == (ranks, microbatches)
    timeline = simulate(result.plan, profile)
    assert timeline.makespan_s == pytest.approx(result.makespan_s, rel=1e-12)
    assert [r.peak_bytes for r in timeline.ranks] == pytest.approx(list(result.peak_bytes))
    assert all(b <= c for b, c in zip(result.peak_bytes, result.capacity_bytes, strict=True))
    assert result.lower_bound_s <= result.makespan_s
    assert result.gap == result.makespan_s / result.lower_bound_s - 1


@settings(deadline=None, max_examples=8)
@given(
    st.integers(0, 10_000),
    st.integers(2, 4),
    st.integers(4, 20),
    st.integers(1, 4),
    st.sampled_from([math.inf, 4e6, 2e6, 1e6]),
)
def test_never_worse_than_published(seed, ranks, layers, times, tight):
    never_worse(seed, ranks, max(layers, ranks), times * ranks, tight)


@pytest.mark.slow
@settings(deadline=None, max_examples=60)
@given(
    st.integers(0, 10_000),
    st.integers(2, 16),
    st.integers(4, 60),
    st.integers(1, 4),
    st.sampled_from([math.inf, 4e6, 2e6, 1e6]),
)
def test_never_worse_than_published_large(seed, ranks, layers, times, tight):
    never_worse(seed, ranks, max(layers, ranks), times * ranks, tight)


def never_worse(seed: int, ranks: int, layers: int, microbatches: int, tight: float) -> None:
    profile = random_profile(seed, ranks, layers, tight)
    known = published_makespans(profile, ranks, microbatches)
    try:
        result = tune(profile, ranks, microbatches, iterations=1, seed=seed)
    except CapacityError:
        assert not known
        return
    check(result, profile, ranks, microbatches)
    for name, seconds in known.items():
        assert result.makespan_s <= seconds * (1 + 1e-12), name
    for name, seconds in result.baselines.items():
        assert result.makespan_s <= seconds * (1 + 1e-12), name


def test_published_baselines_are_the_known_ones():
    """Milliseconds per step of 1F1B and of the best partition under it, from the profile."""
    result = tune(NEMOTRON, iterations=0)
    ms = {name: round(s * 1e3) for name, s in result.baselines.items()}
    assert ms["1f1b"] == 638
    assert ms["1f1b-split"] == 623
    assert ms["partition-only-split"] == 572


@pytest.mark.parametrize("method", ["octopipe", "random"])
def test_algorithm_1_beats_every_single_phase(method):
    result = tune(NEMOTRON, method=method, iterations=12, seed=1)
    check(result, NEMOTRON, 4, 8)
    assert sum(result.iterations.values()) == 12
    assert result.speedup_over_1f1b > 1.26  # the paper's own figure on this configuration
    assert result.makespan_s < result.baselines["partition-only"]
    times = [entry[3] for entry in result.history]
    assert times == sorted(times, reverse=True)


def test_random_draws_every_phase_and_octopipe_begins_with_partition():
    first = tune(NEMOTRON, method="octopipe", iterations=1)
    assert first.iterations == {"partition": 1, "placement": 0, "schedule": 0}
    drawn = tune(JAMBA, method="random", iterations=20, seed=2)
    assert all(count > 0 for count in drawn.iterations.values())


def test_same_seed_same_plan_and_more_iterations_never_hurt():
    one, two = (tune(JAMBA, iterations=3, seed=7) for _ in range(2))
    assert one.plan == two.plan
    assert [h[1:] for h in one.history] == [h[1:] for h in two.history]
    assert one.evaluations == two.evaluations
    assert tune(JAMBA, iterations=0, seed=7).makespan_s >= one.makespan_s


def test_interrupt_returns_the_best_so_far():
    def stop(moment):
        if moment.iteration == 2:
            raise KeyboardInterrupt

    result = tune(JAMBA, iterations=50, progress=stop)
    assert result.stop == "interrupted"
    check(result, JAMBA, 4, 8)


def test_stops_at_the_gap_asked_for_and_reports_progress():
    seen = []
    result = tune(JAMBA, iterations=200, target_gap=0.045, progress=seen.append)
    assert result.stop == "gap"
    assert result.gap <= 0.045
    assert all(m.phase in (*PHASES, COMPILATION) for m in seen)


def test_the_first_plan_is_told_before_the_search_is_compiled(monkeypatch):
    """As on a machine that never ran it: the plan comes from the plain simulator."""
    seen = []
    tuner.warm_up.cache_clear()
    monkeypatch.setattr(tuner, "is_compiled", lambda: False)
    result = tune(JAMBA, iterations=1, progress=seen.append)
    first = seen[0]
    assert (first.phase, first.iteration, first.seconds) == (COMPILATION, 0, 0.0)
    assert first.makespan_s == result.baselines["1f1b-split"]
    assert first.gap == pytest.approx(first.makespan_s / result.lower_bound_s - 1)
    assert all(m.phase in PHASES for m in seen[1:])
    seen.clear()
    tune(JAMBA, iterations=1, progress=seen.append)
    assert all(m.phase in PHASES for m in seen)


def test_a_machine_whose_transfers_block_is_searched_without_overlap():
    blocking = JAMBA.on(replace(JAMBA.machine, blocking=True))
    asked, told = tune(JAMBA, iterations=1, overlap=False), tune(blocking, iterations=1)
    assert (told.makespan_s, told.plan.schedule) == (asked.makespan_s, asked.plan.schedule)


@pytest.mark.parametrize("share", [1.0, 0.75, 0.6])
@pytest.mark.parametrize("method", ["best", "octopipe"])
def test_every_plan_fits_under_a_cap(share, method):
    free = tune(JAMBA, iterations=2, capacity_bytes=1e15, replicated=False)
    cap = max(free.peak_bytes) * share
    result = tune(JAMBA, iterations=2, capacity_bytes=cap, method=method, replicated=False)
    assert max(result.peak_bytes) <= cap
    capped = JAMBA.on(replace(JAMBA.machine, capacity_bytes=cap))
    check_capacity(result.plan, capped)
    check(result, capped, 4, 8)


@settings(deadline=None, max_examples=15)
@given(st.integers(0, 1000), st.integers(2, 3), st.integers(500, 2500))
def test_transfer_buffers_never_cut_a_plan_short(seed, ranks, capacity):
    """Large payloads push plans over the cap after they were found: what is returned is whole."""
    rng = np.random.default_rng(seed)
    layers = tuple(
        LayerCost(
            "x", *map(float, rng.uniform(0.5, 2, 3)), residual_bytes=20, weight_residual_bytes=15,
            state_bytes=10, output_bytes=90,
        )
        for _ in range(3 * ranks)
    )  # fmt: skip
    machine = Machine(latency_s=0.05, bandwidth_bytes_per_s=1000.0, capacity_bytes=capacity)
    profile = Profile("buffers", layers, machine)
    try:
        result = tune(profile, ranks, 6, iterations=2, replicated=False)
    except CapacityError:
        return
    check(result, profile, ranks, 6)
    check_capacity(result.plan, profile)


def test_recompute_is_used_where_nothing_else_fits():
    layers = tuple(
        LayerCost("x", 1.0, 1.0, 1.0, 0, 1, residual_bytes=100, output_bytes=1) for _ in range(8)
    )
    profile = Profile("big residuals", layers, Machine(capacity_bytes=260))
    result = tune(profile, 2, 4, iterations=4, replicated=False)
    assert max(result.peak_bytes) <= 260
    assert any(result.plan.recomputes)


def test_the_exact_method_says_that_it_leaves_memory_out():
    layers = tuple(LayerCost("x", 1.0, 1.0, 1.0, residual_bytes=100) for _ in range(4))
    tight = Machine(capacity_bytes=250)
    with pytest.raises(CapacityError, match="leaves memory out, and the optimum that it found"):
        tune(Profile("tight", layers, tight), 2, 3, method="exact")


def test_very_many_layers_are_not_small():
    """16^300 assignments exceed any float."""
    many = Profile("many", (LayerCost("x", 1.0, 1.0, 1.0),) * 300)
    assert not is_small(Problem.of(many, 16, 1))
    with pytest.raises(ValueError, match=r"300 layers on 16 ranks are .*16\^300 assignments"):
        solve(Problem.of(many, 16, 1))


def test_no_plan_fits_says_what_lacks_and_what_helps():
    with pytest.raises(CapacityError, match=r"rank \d needs .* lacks .*\n.*help"):
        tune(JAMBA, iterations=1, capacity_bytes=2.2e9)


def test_phases_that_may_not_change_stay():
    uniform = uniform_partition(JAMBA.kinds, 4)
    schedule = tune(JAMBA, iterations=2, phases={"schedule"})
    assert schedule.plan.placement.stages == ((0,), (1,), (2,), (3,))
    assert schedule.plan.partition == uniform
    partition = tune(JAMBA, iterations=2, phases={"partition"})
    assert partition.plan.placement.stages == ((0,), (1,), (2,), (3,))
    assert partition.plan.partition != uniform
    every = tune(JAMBA, iterations=2)
    assert every.makespan_s < min(schedule.makespan_s, partition.makespan_s)


def test_unequal_ranks_and_links():
    """A rank of half the speed gets about half the work."""
    layers = tuple(LayerCost("x", 1.0, 1.0, 0.5, output_bytes=8) for _ in range(24))
    machine = Machine(speeds=(1.0, 1.0, 0.5), latency_s=0.01, ranks_per_node=2, inter_latency_s=0.1)
    result = tune(Profile("unequal", layers, machine), 3, 12, iterations=6)
    check(result, Profile("unequal", layers, machine), 3, 12)
    held = [0.0] * 3
    for stage, (rank,) in enumerate(result.plan.placement.stages):
        held[rank] += result.plan.partition.sizes[stage]
    assert held[2] < 0.7 * held[0]
    assert result.gap < 0.12


def test_fig3_is_tuned_to_19():
    fig3 = Profile("fig3", tuple(LayerCost("x", 1.0, 1.0, 1.0) for _ in range(6)), Machine(), 2, 2)
    result = tune(fig3, iterations=5, replicated=False)
    assert result.makespan_s == 19
    assert result.stop == "optimal"
    exact = tune(fig3, method="exact")
    assert exact.makespan_s == 19
    assert exact.stop == "optimal"


@settings(deadline=None, max_examples=8)
@given(st.integers(0, 10_000))
def test_within_a_few_percent_of_the_optimum(seed):
    rng = np.random.default_rng(seed)
    costs = rng.integers(1, 9, (int(rng.integers(3, 5)), 3))
    layers = tuple(LayerCost("x", *map(float, c)) for c in costs)
    profile = Profile("small", layers, Machine(), 2, int(rng.integers(1, 4)))
    exact = solve(Problem.of(profile), nodes=400_000)
    if exact.proven:
        result = tune(profile, iterations=3, seed=seed, replicated=False)
        assert exact.makespan_s <= result.makespan_s * (1 + 1e-12)
        assert result.makespan_s <= 1.06 * exact.makespan_s


def test_result_is_json():
    result = tune(JAMBA, iterations=0)
    data = json.loads(json.dumps(result.to_json()))
    assert Plan.from_json(data["plan"]) == result.plan
    assert data["gap"] == result.gap
    assert data["speedup_over_1f1b"] == result.speedups["1f1b-split"]
    assert "lower bound" in str(result)


LAYER = LayerCost("x", 1.0, 1.0, 1.0)


@pytest.mark.parametrize(
    ("profile", "arguments", "error", "message"),
    [
        (Profile("p", (LAYER,) * 3), {"ranks": 4, "microbatches": 2}, ValueError, "3 layers for 4"),
        (Profile("p", (LAYER,) * 3), {"microbatches": 2}, ValueError, "how many ranks"),
        (Profile("p", (LAYER,) * 3), {"ranks": 2}, ValueError, "how many microbatches"),
        (JAMBA, {"ranks": 0}, ValueError, "ranks = 0"),
        (JAMBA, {"microbatches": 1.5}, ValueError, "microbatches = 1.5"),
        (JAMBA, {"method": "annealing"}, ValueError, "unknown method 'annealing'; choose of best"),
        (JAMBA, {"phases": {"order"}}, ValueError, "order"),
        (JAMBA, {"seconds": -1}, ValueError, "seconds = -1"),
        (JAMBA, {"capacity_bytes": 0}, ValueError, "capacity_bytes = 0"),
        (JAMBA, {"capacity_bytes": 1e8}, CapacityError, "GiB lacking"),
        (JAMBA, {"method": "exact"}, ValueError, "432 actions"),
        (
            Profile("p", (LAYER, LayerCost("x", 0.0, 0.0, 0.0))),
            {"ranks": 2, "microbatches": 2},
            ProfileError,
            r"layers \[1\] have forward_s = 0",
        ),
        (
            Profile("p", (LAYER,) * 4, Machine(speeds=(1.0, 2.0))),
            {"ranks": 3, "microbatches": 2},
            ProfileError,
            "2 entries for 3 ranks",
        ),
    ],
)
def test_bad_input_is_named(profile, arguments, error, message):
    with pytest.raises(error, match=message):
        tune(profile, iterations=1, **arguments) if "seconds" not in arguments else tune(
            profile, **arguments
        )


def test_the_bound_of_plans_held_twice_is_named_apart():
    """A bound for stages held once is not one for DualPipe's plans, which stand beside it."""
    equal = Profile("equal", (LayerCost("x", 1.0, 1.0, 1.0),) * 4, Machine())
    result = tune(equal, 4, 8, iterations=1, replicated=False)
    assert not result.plan.placement.replicated
    assert result.replicated == ("schedule-only", "published")
    assert result.baselines["published"] < result.makespan_s
    assert result.replicated_bound_s <= result.baselines["published"]
    assert "* holds stages on two ranks, with twice the parameters" in str(result)
    assert result.to_json()["replicated_baselines"] == ["schedule-only", "published"]
