"""Partitioners: published optima, brute force, users' cases, and what they say on bad input."""

import json
import math
from itertools import combinations, pairwise, permutations
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octojax.errors import CapacityError, PlanError, ProfileError
from octojax.ir import LayerCost, Machine, Partition, Profile, uniform_partition
from octojax.ir.plan import Plan
from octojax.partitioners import PARTITIONERS, divide, partition, ties
from octojax.partitioners.chain import Chain
from octojax.schedules import generate
from octojax.simulate import StageCosts, simulate

GOLDENS = json.loads(
    (Path(__file__).parent.parent / "goldens" / "partition_dp.json").read_text("utf-8")
)
LATENCY = ("alpa", "dapple", "metis", "adapipe", "ilp")  # all the same sum without bytes
bounded = settings(max_examples=40, deadline=None)

costs = st.lists(st.integers(0, 9), min_size=2, max_size=9)


def cuts(layers, stages):
    """Yields the bounds of every partition without an empty stage."""
    for inner in combinations(range(1, layers), stages - 1):
        yield (0, *inner, layers)


def loads(costs, bounds):
    return [sum(costs[a:b]) for a, b in pairwise(bounds)]


@pytest.mark.parametrize("case", GOLDENS, ids=lambda c: f"{c['name']}-p{c['p']}-m{c['m']}")
@pytest.mark.parametrize("name", LATENCY)
def test_latency_partitioners_reach_the_published_optimum(name, case):
    found = divide(name, case["costs"], case["p"], case["m"])
    assert found.value_s == pytest.approx(case["brute_best_objective"], rel=1e-12)
    times = loads(case["costs"], found.partition.bounds)
    assert sum(times) + (case["m"] - 1) * max(times) == case["brute_best_objective"]


@pytest.mark.parametrize("case", GOLDENS, ids=lambda c: f"{c['name']}-p{c['p']}-m{c['m']}")
def test_balanced_reaches_the_least_maximum(case):
    found = divide("balanced", case["costs"], case["p"])
    assert max(loads(case["costs"], found.partition.bounds)) == case["brute_min_max_stage"]


@bounded
@given(costs, st.integers(1, 5), st.integers(1, 12))
def test_equals_brute_force(times, stages, microbatches):
    stages = min(stages, len(times))
    every = [loads(times, bounds) for bounds in cuts(len(times), stages)]
    least = min(sum(t) + (microbatches - 1) * max(t) for t in every)
    for name in ("alpa", "dapple", "metis", "adapipe"):
        value = divide(name, times, stages, microbatches).value_s
        assert value == pytest.approx(least, abs=1e-9), name
    slowest = min(map(max, every))
    for name in ("balanced", "pipedream"):
        assert divide(name, times, stages).value_s == pytest.approx(slowest, abs=1e-9), name


@settings(max_examples=10, deadline=None)
@given(costs, st.integers(1, 4), st.integers(1, 8))
def test_integer_program_agrees_with_the_dynamic_program(times, stages, microbatches):
    stages = min(stages, len(times))
    exact = divide("alpa", times, stages, microbatches)
    assert divide("ilp", times, stages, microbatches).value_s == pytest.approx(
        exact.value_s, abs=1e-6
    )


@bounded
@given(costs, st.integers(1, 4), st.integers(1, 8), st.data())
def test_metis_equals_brute_force_over_orders_too(times, stages, microbatches, data):
    stages = min(stages, len(times))
    speeds = data.draw(st.lists(st.sampled_from([1.0, 2.0, 0.5]), min_size=stages, max_size=stages))
    found = divide("metis", times, stages, microbatches, speeds=speeds)

    def value(bounds, order):
        t = [load / speeds[r] for load, r in zip(loads(times, bounds), order, strict=True)]
        return sum(t) + (microbatches - 1) * max(t)

    least = min(
        value(bounds, order)
        for bounds in cuts(len(times), stages)
        for order in permutations(range(stages))
    )
    assert found.value_s == pytest.approx(least, abs=1e-9)
    assert value(found.partition.bounds, found.order) == pytest.approx(least, abs=1e-9)


def chain(times, residual, capacity, borders=None, state=0.0):
    n = len(times)
    return Chain(
        tuple(float(t) for t in times),
        tuple(2.0 * t for t in times),
        tuple(borders or [0.0] * n),
        (float(state),) * n,
        tuple(float(r) for r in residual),
        ("layer",) * n,
        capacity,
    )


@bounded
@given(
    st.lists(st.tuples(st.integers(0, 5), st.integers(0, 4)), min_size=2, max_size=6),
    st.integers(1, 3),
    st.integers(1, 4),
    st.integers(2, 24),
)
def test_adapipe_equals_brute_force_over_saved_layers(layers, stages, microbatches, capacity):
    stages = min(stages, len(layers))
    times, residual = zip(*layers, strict=True)
    model = chain(times, residual, float(capacity))

    def stage_time(a, b, copies):
        """Least F + B + recompute of layers a to b-1: every subset is tried."""
        best = math.inf
        for mask in range(1 << (b - a)):
            saved = {i for i in range(a, b) if mask >> (i - a) & 1}
            held = copies * sum(residual[i] for i in saved)
            if len(saved) < b - a:  # one recomputed layer's residuals are there meanwhile
                held += max(residual[a:b])
            if held <= capacity:
                again = sum(times[i] for i in range(a, b) if i not in saved)
                best = min(best, 3 * sum(times[a:b]) + again)
        return best

    least = math.inf
    for bounds in cuts(len(layers), stages):
        t = [
            stage_time(a, b, min(stages - s, microbatches))
            for s, (a, b) in enumerate(pairwise(bounds))
        ]
        least = min(least, sum(t) + (microbatches - 1) * max(t))
    if math.isinf(least):
        with pytest.raises(CapacityError):
            divide("adapipe", model, stages, microbatches)
        return
    assert divide("adapipe", model, stages, microbatches).value_s == pytest.approx(least)


def test_adapipe_recomputes_only_where_memory_is_short():
    roomy = divide("adapipe", chain([1] * 8, [1] * 8, 100.0), 4, 8)
    assert roomy.partition.sizes == (2, 2, 2, 2)
    assert not any(roomy.recompute)
    tight = divide("adapipe", chain([1] * 8, [1] * 8, 5.0), 4, 8)
    assert any(tight.recompute[i] for i in tight.partition.layers(0))
    assert not any(tight.recompute[i] for i in tight.partition.layers(3))
    assert tight.stage_recompute[0]
    assert not tight.stage_recompute[3]


def test_alpa_and_pipedream_keep_stages_within_memory():
    # Stage 0 holds 2 microbatches: 3 layers there are 6 units of residuals, 2 are 4.
    model = chain([1, 1, 1, 3], [1, 1, 1, 1], 4.0)
    assert divide("alpa", model, 2, 8).partition.sizes == (2, 2)
    assert divide("pipedream", model, 2, 8).partition.sizes == (2, 2)
    assert divide("dapple", model, 2, 8).partition.sizes == (3, 1)  # looks at time alone
    with pytest.raises(CapacityError, match=r"stage 0 keeps 2 microbatches.*adapipe"):
        divide("alpa", chain([1, 1], [3, 3], 4.0), 2, 8)


def test_borders_count():
    model = chain([1, 1, 1, 1], [0] * 4, math.inf, borders=[0.0, 9.0, 0.0, 0.0])
    assert divide("pipedream", model, 2).partition.sizes != (2, 2)
    assert divide("alpa", model, 2, 8).partition.sizes != (2, 2)
    assert divide("dapple", model, 2, 8).value_s == 12 + 0 + 7 * 9


def test_mist_stays_near_the_mean_and_widens_where_it_must():
    times = [9] + [1] * 11
    free = divide("alpa", times, 3, 8)
    near = divide("mist", times, 3, 8)
    assert free.partition.sizes[0] == 1
    assert all(abs(size - 4) <= 2 for size in near.partition.sizes)
    assert near.value_s >= free.value_s
    assert divide("mist", [1, 1, 1], 3, 8, spread=0).partition.sizes == (1, 1, 1)


@bounded
@given(st.sampled_from(["uniform", "balanced", "alpa", "mist"]), costs, st.integers(1, 6))
def test_no_layer_is_lost_and_no_stage_empty(name, times, stages):
    stages = min(stages, len(times))
    found = partition(name, times, stages, 4)
    assert found.num_layers == len(times)
    assert found.num_stages == stages


def makespan(times, sizes, microbatches):
    """1F1B of layers with costs F = t, B = 2t, no communication."""
    table = generate("1f1b", len(sizes), microbatches)
    model = Profile("p", tuple(LayerCost("x", float(t), float(t), float(t)) for t in times))
    return simulate(Plan(Partition(tuple(sizes)), table.placement, table), model).makespan_s


def test_thirty_layers_on_four_stages_lose_none():  # users' case 19
    assert partition("uniform", [1] * 30, 4).sizes == (8, 8, 7, 7)
    assert partition("balanced", [1] * 30, 4).sizes == (8, 8, 7, 7)
    assert makespan([1] * 30, (8, 8, 7, 7), 8) == 252
    assert makespan([1] * 30, (7, 7, 8, 8), 8) == 258


def test_eighty_layers_in_thirty_two_stages():  # users' case 20
    sizes = partition("uniform", [1] * 80, 32).sizes
    assert set(sizes) == {2, 3}
    assert sum(sizes) == 80
    assert max(sizes[r] + sizes[r + 16] for r in range(16)) == 5


def test_five_equal_layers_on_four_stages():  # users' case 22
    assert partition("balanced", [1] * 5, 4).sizes == (2, 1, 1, 1)
    assert makespan([1] * 5, (2, 1, 1, 1), 8) == 51
    assert makespan([1] * 5, (1, 1, 1, 2), 8) == 57


def test_heavy_head_stands_alone():  # users' case 23
    times = [2] + [1] * 8 + [5]
    found = divide("alpa", times, 4, 8)
    assert found.value_s == 50
    assert max(loads(times, found.partition.bounds)) == 5
    assert found.partition.sizes[-1] == 1
    even = loads(times, partition("uniform", times, 4).bounds)
    assert sum(even) + 7 * max(even) > 50


def test_hybrid_pattern_under_a_users_placement():  # users' case 25
    kinds, price = "MMAF" * 3, {"M": 1, "A": 2, "F": 1}
    times = [price[k] for k in kinds]
    cut = partition("balanced", times, 8)
    table = generate("dynapipe", 4, 8, placement="0,1,1,0,2,3,3,2")
    assert str(table.placement) == "0 1 1 0 2 3 3 2"
    model = Profile("p", tuple(LayerCost(k, price[k], price[k], price[k]) for k in kinds))
    timeline = simulate(Plan(cut, table.placement, table), model)
    load = [sum(times[i] for i in cut.layers(s)) for s in range(8)]
    busy = [3 * 8 * sum(load[s] for s in held) for held in table.placement.ranks]
    assert [rank.busy_s for rank in timeline.ranks] == busy
    assert timeline.makespan_s >= max(busy)
    with pytest.raises(ValueError, match=r"leaves rank \[3\] of 4 empty"):
        generate("dynapipe", 4, 8, placement=(0, 1, 1, 0, 2, 2))


def profile(kinds):
    return Profile("p", tuple(LayerCost(k, 1.0, 1.0, 1.0, output_bytes=8) for k in kinds))


def test_uniform_joins_embedding_and_head_of_a_profile():
    kinds = ["embedding", *["block"] * 8, "head+loss"]
    assert partition("uniform", profile(kinds), 4).sizes == (3, 2, 2, 3)
    assert partition("uniform", profile(["embedding", "block", "head"]), 3).sizes == (1, 1, 1)


def test_a_profile_brings_transfer_times():
    slow = profile(["block"] * 4).on(Machine(latency_s=1.0, bandwidth_bytes_per_s=8.0))
    assert divide("dapple", slow, 2, 1).value_s == 12 + 2 * 2


def test_bad_input():
    with pytest.raises(PlanError, match="3 layers cannot form 4 stages; use at most 3"):
        partition("balanced", [1, 1, 1], 4)
    with pytest.raises(ValueError, match="unknown partitioner 'alpha'; did you mean 'alpa'"):
        partition("alpha", [1, 1], 2)
    with pytest.raises(ValueError, match="mist has no option 'spred'; did you mean 'spread'"):
        partition("mist", [1, 1], 2, 4, spred=1)
    with pytest.raises(ProfileError, match=r"found \[-1.0\] at layers \[1\]"):
        partition("alpa", [1, -1], 2)
    with pytest.raises(ProfileError, match="at least one"):
        partition("alpa", [], 1)
    with pytest.raises(PlanError, match="stages must be a whole number >= 1, found 0"):
        partition("alpa", [1], 0)
    with pytest.raises(PlanError, match="speeds must be 2 finite numbers"):
        partition("metis", [1, 1], 2, 4, speeds=[1.0])


def test_every_partitioner_says_where_it_comes_from():
    assert list(PARTITIONERS)[:2] == ["uniform", "balanced"]
    for name, record in PARTITIONERS.items():
        assert record.name == name
        assert record.summary
        assert record.source
        assert isinstance(partition(name, [1.0] * 6, 3, 4).sizes, tuple)


@pytest.mark.parametrize("case", [(5, 4, 8, 51), (30, 4, 8, 252), (7, 3, 6, 60)], ids=str)
@pytest.mark.parametrize("name", ["balanced", "alpa", "pipedream", "dapple", "mist", "ilp"])
def test_equal_layers_are_cut_in_the_best_order(name, case):
    """Cases 19 and 22 of public bug reports: the heaviest stage is the same, its place counts."""
    layers, stages, microbatches, best = case
    cut = partition(name, [3.0] * layers, stages, microbatches)
    assert makespan([1.0] * layers, cut.sizes, microbatches) == pytest.approx(best)
    uniform = uniform_partition(["layer"] * layers, stages)
    assert makespan([1.0] * layers, uniform.sizes, microbatches) == best


@bounded
@given(costs.map(lambda c: [x + 1 for x in c]), st.integers(2, 4), st.integers(1, 8))
def test_no_tie_of_one_layer_is_quicker(times, stages, microbatches):
    stages = min(stages, len(times))
    sizes = list(partition("balanced", times, stages, microbatches).sizes)
    chosen = makespan(times, sizes, microbatches)
    most = max(loads(times, Partition(tuple(sizes)).bounds))
    for a, b in permutations(range(stages), 2):
        moved = [n - (s == a) + (s == b) for s, n in enumerate(sizes)]
        if min(moved) > 0 and max(loads(times, Partition(tuple(moved)).bounds)) <= most:
            assert makespan(times, moved, min(microbatches, 2 * stages)) >= (
                makespan(times, sizes, min(microbatches, 2 * stages)) * (1 - 1e-6)
            ), (sizes, moved, chosen)


def test_uniform_gives_embedding_and_head_to_the_ends():
    model = ("embedding", *("block",) * 56, "head+loss")
    assert uniform_partition(model, 4) == Partition((15, 14, 14, 15))
    assert uniform_partition(("token_embed", *"ab" * 8, "lm_head"), 4).sizes == (
        5,
        4,
        4,
        5,
    )
    assert uniform_partition(("block",) * 30, 4).sizes == (8, 8, 7, 7)
    assert uniform_partition(("embedding", "a", "a", "head"), 4).sizes == (1, 1, 1, 1)
    with pytest.raises(PlanError, match="2 layers cannot form 3 stages"):
        uniform_partition(("a", "a"), 3)


@given(
    st.lists(st.tuples(st.floats(0.1, 4), st.floats(0.1, 4)), min_size=1, max_size=5),
    st.integers(1, 9),
)
@settings(max_examples=30)
def test_ties_are_weighed_by_the_makespan_that_the_simulator_has(seconds, microbatches):
    stages = len(seconds)
    forward, backward = np.array(seconds).T
    found = ties._makespan(
        Partition((1,) * stages), np.array(seconds), ties._one_f_one_b(stages, microbatches)
    )
    costs = StageCosts(
        np.stack([forward, backward, backward / 2, backward / 2, forward], axis=1),
        np.zeros((stages, 5)),
        np.zeros(stages, dtype=np.bool_),
    )
    table = generate("1f1b", stages, microbatches)
    assert found == pytest.approx(simulate(table, costs, compiled=False).makespan_s)
