"""Searched schedules: complete, within their limits, never slower than the published tables."""

import re
from itertools import product
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octojax.ir import Kind, Machine, Placement, Schedule
from octojax.ir.verify import verify
from octojax.schedules import generate
from octojax.schedules.comparison import peaks
from octojax.schedules.repetend import shortest_repetend
from octojax.schedules.tessel import blocks_of
from octojax.simulate import StageCosts, simulate

GOLDENS = Path(__file__).parent.parent / "goldens"
bounded = settings(max_examples=20, deadline=None)


def tables(start):
    return sorted(f.name for f in GOLDENS.glob(f"{start}*.csv"))


def sizes(file):
    found = re.search(r"_p(\d+)_m(\d+)", file)
    assert found
    return int(found[1]), int(found[2])


def costs(file):
    found = re.search(r"_F(\d+)B(\d+)W(\d+)c(\d+)", file)
    assert found
    return tuple(map(int, found.groups()))


def makespan(table, f, i, w, latency=0):
    unit = StageCosts.unit(table.num_stages, f, i, w)
    return simulate(table, unit, Machine(latency_s=latency), compiled=False).makespan_s


@pytest.mark.parametrize("file", tables("sail_ZB"))
def test_zero_bubble_is_never_slower_than_the_published_search(file):
    (p, m), (f, i, w, c) = sizes(file), costs(file)
    memory = re.search(r"_mem(\d+)", file)
    limit = {"memory": memory[1]} if memory else {}
    name = "zb-auto" if memory else "zb-v"
    made = generate(name, p, m, forward=f, input_grad=i, weight_grad=w, comm=c, **limit)
    golden = Schedule.load(GOLDENS / file)
    verify(made, m)
    assert made.placement == golden.placement
    assert makespan(made, f, i, w, c) <= makespan(golden, f, i, w, c)
    assert max(peaks(made, Kind.WEIGHT_GRAD)) <= (int(memory[1]) if memory else 2 * p)


@pytest.mark.parametrize(
    ("name", "size", "price", "memory", "published"),
    [
        ("zb-auto", (4, 12), (10, 12, 8, 1), 6, 393),
        ("zb-auto", (8, 16), (10, 12, 8, 1), 8, 606),
        ("zb-v", (4, 12), (10, 12, 8, 1), 8, 771),
        ("zb-v", (8, 24), (10, 12, 8, 1), 16, 1564),
    ],
)
def test_zero_bubble_reaches_published_makespans(name, size, price, memory, published):
    f, i, w, c = price
    made = generate(name, *size, forward=f, input_grad=i, weight_grad=w, comm=c, memory=memory)
    verify(made, size[1])
    assert makespan(made, f, i, w, c) <= published
    assert max(peaks(made, Kind.WEIGHT_GRAD)) <= memory


@bounded
@given(
    st.integers(1, 4),
    st.integers(1, 8),
    st.data(),
    st.integers(0, 3),
)
def test_zb_auto_with_costs_per_stage_keeps_each_ranks_memory(p, m, data, latency):
    price = st.lists(st.integers(1, 9), min_size=p, max_size=p)
    f, i, w = data.draw(price), data.draw(price), data.draw(price)
    memory = data.draw(st.lists(st.integers(1, 6), min_size=p, max_size=p))
    made = generate(
        "zb-auto", p, m, forward=f, input_grad=i, weight_grad=w, comm=latency, memory=memory
    )
    verify(made, m)
    assert all(a <= b for a, b in zip(peaks(made, Kind.WEIGHT_GRAD), memory, strict=True))


def test_zb_auto_uses_more_memory_to_be_faster():
    lean, rich = (generate("zb-auto", 4, 8, comm=1, memory=k) for k in (4, 7))
    assert makespan(rich, 1, 1, 1, 1) < makespan(lean, 1, 1, 1, 1)


@pytest.mark.parametrize("file", tables("derived_Hanayo"))
def test_hanayo_is_never_slower_than_the_derived_tables(file):
    p, m = sizes(file)
    waves = re.search(r"_W(\d+)", file)
    assert waves
    made = generate("hanayo", p, m, waves=waves[1])
    golden = Schedule.load(GOLDENS / file)
    verify(made, m)
    assert made.placement == golden.placement == Placement.wave(p, int(waves[1]))
    assert makespan(made, 1, 1, 1) <= makespan(golden, 1, 1, 1)


def test_hanayo_waves_shrink_the_bubble():
    shares = []
    for waves in (1, 2, 4):
        made = generate("hanayo", 4, 4, waves=waves)
        shares.append(1 - 3 * 2 * waves * 4 / makespan(made, 1, 1, 1))
    assert shares == sorted(shares, reverse=True)
    assert generate("hanayo", 4, 4, 4) == generate("hanayo", 4, 4, waves=2)


@pytest.mark.parametrize(("m", "ratio"), [(8, 0.226), (16, 0.127), (32, 0.068), (64, 0.035)])
def test_zb_greedy_reproduces_the_guides_row(m, ratio):  # and users' case 35
    made = generate("zb-greedy", 8, m)
    assert round(1 - 3 * m / makespan(made, 1, 1, 1), 3) == ratio
    assert max(peaks(made, Kind.INPUT_GRAD)) == 8
    assert max(peaks(made, Kind.WEIGHT_GRAD)) == m


@pytest.mark.parametrize("p", [2, 3, 4, 6])
def test_tessel_finds_the_repetend_without_bubble(p):
    blocks = blocks_of(p, memory=(p,))
    found = shortest_repetend(blocks)
    assert found.bubble(blocks) == 0
    assert found.proven
    made = generate("tessel", p, 4 * p, memory=p)
    verify(made, 4 * p)
    assert makespan(made, 1, 1, 1) == 3 * (4 * p + p - 1)
    assert max(peaks(made, Kind.WEIGHT_GRAD)) == p


def test_tessel_pays_for_less_memory():
    blocks = blocks_of(4, memory=(3,))
    assert shortest_repetend(blocks).bubble(blocks) == 3  # as published
    wave = blocks_of(2, placement=Placement.wave(2), memory=(4,))
    assert shortest_repetend(wave).bubble(wave) <= 2
    loop = blocks_of(2, chunks=2, memory=(5,))
    assert shortest_repetend(loop).bubble(loop) == 0


@settings(max_examples=15, deadline=None)
@given(st.integers(1, 3), st.integers(1, 4), st.data(), st.integers(1, 6))
def test_tessel_on_any_placement(p, more, data, m):
    stages = p + more - 1
    where = [
        *range(p),
        *data.draw(st.lists(st.integers(0, p - 1), min_size=more - 1, max_size=more - 1)),
    ]
    price = st.lists(st.integers(1, 3), min_size=stages, max_size=stages)
    forward, backward = data.draw(price), data.draw(price)
    memory = [max(where.count(r), data.draw(st.integers(1, 5))) for r in range(p)]
    made = generate(
        "tessel", p, m, placement=where, forward=forward, backward=backward, memory=memory
    )
    verify(made, m)
    assert all(a <= b for a, b in zip(peaks(made, Kind.WEIGHT_GRAD), memory, strict=True))


def brute_period(blocks):
    """Least period by trying every start slot in turn, with memory, without any pruning."""
    stages = blocks.num_stages
    chain = [(s, blocks.forward[s]) for s in range(stages)]
    chain += [(s, blocks.backward[s]) for s in reversed(range(stages))]
    for period in range(max(blocks.load(r) for r in range(blocks.placement.num_ranks)), 40):
        for waits in product(range(period), repeat=len(chain) - 1):
            starts, clock = [0], chain[0][1]
            for wait, (_, length) in zip(waits, chain[1:], strict=True):
                starts.append(clock + wait)
                clock += wait + length
            if _feasible(blocks, chain, starts, period):
                return period
    return None


def _feasible(blocks, chain, starts, period):
    for rank in range(blocks.placement.num_ranks):
        phases = [
            (start + i) % period
            for start, (s, length) in zip(starts, chain, strict=True)
            if blocks.rank(s) == rank
            for i in range(length)
        ]
        if len(set(phases)) < len(phases):
            return False
        spans = [
            (starts[s], starts[2 * blocks.num_stages - 1 - s] + blocks.backward[s])
            for s in blocks.placement.ranks[rank]
        ]
        for now in range(4 * period, 5 * period):  # steadily, all copies present
            live = sum(
                a + k * period <= now < b + k * period for a, b in spans for k in range(-9, 9)
            )
            if live > blocks.memory[rank]:
                return False
    return True


@pytest.mark.parametrize("memory", [1, 2])
@pytest.mark.parametrize("price", [((1, 1), (2, 2)), ((1, 2), (1, 2)), ((2, 1), (1, 3))])
def test_tessel_period_is_the_least_by_brute_force(memory, price):
    forward, backward = price
    blocks = blocks_of(2, memory=(memory,), forward=forward, backward=backward)
    found = shortest_repetend(blocks)
    assert found.proven
    assert found.period == brute_period(blocks)


def test_three_microbatches_of_memory_everywhere():  # users' case 34
    assert peaks(generate("1f1b", 4, 8), Kind.WEIGHT_GRAD) == (4, 3, 2, 1)
    for name in ("dynapipe", "tessel"):
        made = generate(name, 4, 8, memory=(3, 3, 3, 3))
        assert peaks(made, Kind.WEIGHT_GRAD) == (3, 3, 3, 1)
        assert 33 <= makespan(made, 1, 1, 1) <= 48
    lean = generate("dynapipe", 4, 8, memory="2,3,2,1")
    verify(lean, 8)
    assert peaks(lean, Kind.WEIGHT_GRAD) == (2, 2, 2, 1)
