"""Published ways by name: complete plans, their own partition and memory, what they refuse."""

import itertools
import json
import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octojax.errors import CapacityError
from octojax.ir import LayerCost, Machine, Partition, Profile, uniform_partition
from octojax.ir.verify import verify
from octojax.partitioners import divide
from octojax.simulate import simulate
from octojax.tune import Baseline, measure_baselines, tune
from octojax.tune.baseline import BASES, table_of
from octojax.tune.co_tuning import with_recompute
from octojax.tune.named_baselines import names_of
from octojax.tune.problem import Problem
from octojax.tune.recompute_rule import RecomputeRule
from octojax.tune.ways import WAYS

JAMBA = Profile.load(Path(__file__).parents[1] / "data" / "profiles" / "jamba-s.calibrated.json")
DOCS = Path(__file__).parents[2] / "docs"


@pytest.fixture(scope="module")
def rows() -> tuple[Baseline, ...]:
    return measure_baselines(JAMBA)


def of(rows: tuple[Baseline, ...], name: str, base: str) -> Baseline:
    (row,) = (r for r in rows if (r.name, r.base) == (name, base))
    return row


def test_every_way_has_complete_plans_that_take_what_is_said(rows):
    assert {r.name for r in rows} == set(WAYS)
    for name, way in WAYS.items():
        assert [r.base for r in rows if r.name == name] == (["split"] if way.splits else [*BASES])
    for row in rows:
        if row.plan is None:
            assert (row.name, row.base) == ("mario", "fill")
            continue
        verify(row.plan)
        timeline = simulate(row.plan, JAMBA)
        assert timeline.makespan_s == pytest.approx(row.makespan_s, rel=1e-12)
        assert [r.peak_bytes for r in timeline.ranks] == pytest.approx(list(row.peak_bytes))
        assert row.fits
        fused = any(a.kind == "B" for _, _, a in row.plan.schedule.actions())
        assert fused == (row.base == "fused" or row.name == "dualpipe-v")


def test_each_partitions_and_places_as_published(rows):
    uniform = uniform_partition(JAMBA.kinds, 4)
    for name in ("1f1b", "zb-h1", "zb-h2", "zb-auto", "mario"):
        assert of(rows, name, "split").plan.partition == uniform, name
    for name in ("mist", "dapple"):
        expected = divide(name, JAMBA, 4, 8).partition
        assert of(rows, name, "fused").plan.partition == expected, name
    for name in ("zb-v", "dualpipe-v"):
        assert str(of(rows, name, "split").plan.placement) == "0 1 2 3 3 2 1 0", name
    assert of(rows, "interleaved", "fused").plan.num_stages in (8, 12, 16)
    assert of(rows, "hanayo", "fused").plan.num_stages in (8, 16)
    assert str(of(rows, "tessel", "fused").plan.placement) in ("0 1 2 3 3 2 1 0", "0 1 2 3")
    assert all(r.plan.recompute == () for r in rows if r.plan is not None and r.name != "mario")
    assert any(of(rows, "mario", "fused").plan.recompute)


def test_mario_fits_where_1f1b_does_not():
    layers = tuple(LayerCost("x", 1.0, 1.0, 1.0, 0, 1, residual_bytes=20) for _ in range(8))
    rows = measure_baselines(Profile("p", layers, Machine(capacity_bytes=150)), 4, 8, "1f1b,mario")
    assert not of(rows, "1f1b", "fused").fits
    assert of(rows, "mario", "fused").fits


def test_metis_gives_slow_ranks_less():
    layers = (LayerCost("x", 1.0, 1.0, 1.0),) * 12
    profile = Profile("uneven", layers, Machine(speeds=(1.0, 0.5, 1.0)))
    (row, *_) = measure_baselines(profile, 3, 6, "metis")
    held = [sum(row.plan.partition.sizes[s] for s in stages) for stages in row.plan.placement.ranks]
    assert held[1] < min(held[0], held[2])
    uniform = measure_baselines(profile, 3, 6, "1f1b")[0]
    assert row.makespan_s < uniform.makespan_s


def test_memory_makes_mist_and_adapipe_recompute_and_others_say_that_they_do_not_fit():
    cap = 3.95 * 2**30
    rows = measure_baselines(JAMBA, names="1f1b,zb-h1,mist,adapipe", capacity_bytes=cap)
    for name in ("mist", "adapipe"):
        row = of(rows, name, "fused")
        assert row.fits
        assert any(row.plan.recompute)
        assert max(row.peak_bytes) <= cap
    for row in rows:
        assert row.fits == (max(row.peak_bytes) <= cap)
    assert not of(rows, "1f1b", "fused").fits
    assert "does not fit" in "\n".join(table_of(rows))


@pytest.mark.parametrize(
    ("rule", "again"),
    [("all", lambda s: True), ("none", lambda s: False), ("1", lambda s: s == 1)],
)
def test_recompute_that_is_asked_for_holds_for_every_way(rule, again):
    layers = tuple(LayerCost("x", 1.0, 1.0, 0.5, residual_bytes=4) for _ in range(16))
    rows = measure_baselines(Profile("p", layers, Machine()), 2, 4, recompute=rule)
    for row in rows:
        if row.plan is not None:
            stages = range(row.plan.num_stages)
            assert row.plan.recomputes == tuple(again(s) for s in stages), (row.name, row.base)


def test_what_a_rule_forbids_is_a_row_that_says_why():
    row = measure_baselines(JAMBA, 4, 4, "dualpipe-v")[0]
    assert (row.plan, row.makespan_s, row.fits) == (None, None, False)
    assert "dualpipe-v cannot run 4 microbatches on 4 ranks" in row.refusal
    assert row.refusal in "\n".join(table_of([row]))
    short = Profile("short", (LayerCost("x", 1.0, 1.0, 1.0),) * 3)
    refused = measure_baselines(short, 2, 4, "zb-v,interleaved,hanayo")
    assert all(r.plan is None and "3 layers" in r.refusal for r in refused)


@settings(deadline=None, max_examples=30)
@given(st.data())
def test_partition_and_recompute_are_the_best_of_all(data):
    """By trying every partition, with and without recompute of every stage."""
    rng = np.random.default_rng(data.draw(st.integers(0, 10_000)))
    count, ranks = int(rng.integers(2, 7)), int(rng.integers(1, 4))
    ranks, microbatches = min(ranks, count), int(rng.integers(1, 5))
    layers = tuple(
        LayerCost("x", *map(float, rng.integers(1, 9, 3)), 0, int(rng.integers(0, 5)),
                  residual_bytes=int(rng.integers(1, 9)), output_bytes=0)
        for _ in range(count)
    )  # fmt: skip
    capacity = float(rng.integers(10, 80))
    rule = RecomputeRule(data.draw(st.sampled_from(["auto", "all", "none"])))
    problem = Problem.of(
        Profile("p", layers, Machine(capacity_bytes=capacity)), ranks, microbatches, None, rule
    )
    least = math.inf
    for borders in itertools.combinations(range(1, count), ranks - 1):
        sizes = tuple(b - a for a, b in itertools.pairwise((0, *borders, count)))
        for flags in itertools.product((False, True), repeat=ranks):
            if rule.forced and flags != ((rule.mode == "all"),) * ranks:
                continue
            least = min(least, objective(layers, sizes, flags, microbatches, capacity))
    try:
        plan = next(with_recompute(problem, "x"))
    except CapacityError:
        assert least == math.inf
        return
    value = objective(layers, plan.partition.sizes, plan.recomputes, microbatches, capacity)
    assert value == pytest.approx(least)


def objective(layers, sizes, flags, microbatches, capacity) -> float:
    times = []
    for s, (stop, size) in enumerate(zip(itertools.accumulate(sizes), sizes, strict=True)):
        own = layers[stop - size : stop]
        residual = sum(x.residual_bytes for x in own)
        copies = min(len(sizes) - s, microbatches)
        need = sum(x.state_bytes for x in own) + (residual if flags[s] else copies * residual)
        if need > capacity:
            return math.inf
        forward = sum(x.forward_s for x in own)
        times.append(sum(x.fused_backward_s for x in own) + forward * (2 if flags[s] else 1))
    return sum(times) + (microbatches - 1) * max(times)


def test_tune_measures_what_is_named_and_is_never_worse():
    result = tune(JAMBA, iterations=0, baselines="Tessel, mist")
    assert [r.name for r in result.ways] == ["tessel"] * 3 + ["mist"] * 3
    assert set(result.baselines) == {
        "1f1b", "1f1b-split", "1f1b-fill", "tessel", "tessel-split", "tessel-fill", "mist",
        "mist-split", "mist-fill", "published",
    }  # fmt: skip
    assert result.makespan_s <= min(result.baselines.values()) == result.baselines["published"]
    assert result.speedup_over_1f1b == result.baselines["1f1b-split"] / result.makespan_s
    data = json.loads(json.dumps(result.to_json()))
    assert [w["name"] for w in data["ways"]] == [r.name for r in result.ways]
    assert Partition(tuple(data["ways"][3]["partition"])) == result.ways[3].plan.partition
    assert "tessel         split" in str(result)


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ("tesla", r"unknown baselines 'tesla' \(did you mean 'tessel'\?\); choose of 1f1b, .*, or"),
        (["1f1b", "xyzzy"], "unknown baselines 'xyzzy'; choose of"),
        ([], "no baselines named"),
        ("", "unknown baselines ''"),
    ],
)
def test_unknown_names_are_refused(asked, message):
    with pytest.raises(ValueError, match=message):
        tune(JAMBA, iterations=0, baselines=asked)


def test_names_are_read_in_any_case_and_once():
    assert names_of("all") == tuple(WAYS)
    assert names_of("ZB-H1,1F1B,zb-h1") == ("zb-h1", "1f1b")


def test_the_documentation_lists_every_way():
    text = (DOCS / "tuner.md").read_text(encoding="utf-8")
    assert all(f"| `{name}` | {way.rule}" in text for name, way in WAYS.items())
