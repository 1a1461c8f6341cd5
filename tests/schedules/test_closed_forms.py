"""Closed forms of the literature, for any sizes: F=I=W=1, B=2 per chunk, no communication."""

import math
from contextlib import suppress

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octojax.ir import Kind, Machine, Overlap, Schedule
from octojax.ir.verify import verify
from octojax.schedules import SCHEDULES, generate
from octojax.schedules.comparison import peaks
from octojax.simulate import StageCosts, simulate

bounded = settings(max_examples=25, deadline=None)
ranks = st.integers(1, 8)
microbatches = st.integers(1, 20)


def timeline(schedule):
    return simulate(schedule, StageCosts.unit(schedule.num_stages), compiled=False)


def makespan(schedule):
    return timeline(schedule).makespan_s


def inner(schedule):
    return [rank.residual_bubble_s for rank in timeline(schedule).ranks]


@bounded
@given(ranks, microbatches, st.sampled_from(["fifo", "lifo"]))
def test_gpipe(p, m, order):
    table = generate("gpipe", p, m, backward_order=order)
    assert makespan(table) == 3 * (m + p - 1)
    assert set(peaks(table, Kind.WEIGHT_GRAD)) == {m}


@bounded
@given(ranks, microbatches)
def test_1f1b(p, m):
    table = generate("1f1b", p, m)
    assert makespan(table) == 3 * (m + p - 1)
    assert peaks(table, Kind.WEIGHT_GRAD) == tuple(min(p - r, m) for r in range(p))


@bounded
@given(ranks, microbatches, st.integers(0, 3))
def test_1f1b_overlap_hides_a_hop_better(p, m, latency):
    table, plain = generate("1f1b-overlap", p, m), generate("1f1b", p, m)
    assert makespan(table) == 3 * (m + p - 1)
    assert peaks(table, Kind.WEIGHT_GRAD) == tuple(min(2 * (p - r) - 1, m) for r in range(p))
    late = Machine(latency_s=latency)
    unit = StageCosts.unit(p)
    assert simulate(table, unit, late).makespan_s <= simulate(plain, unit, late).makespan_s


@bounded
@given(st.integers(2, 6), st.integers(1, 4), st.integers(2, 4))
def test_interleaved(p, rounds, v):
    m = p * rounds
    table = generate("interleaved", p, m, v)
    assert makespan(table) == 3 * m * v + 3 * (p - 1)
    expected = tuple(min((v - 1) * p + 2 * (p - 1 - r) + 1, m * v) for r in range(p))
    assert peaks(table, Kind.WEIGHT_GRAD) == expected


@bounded
@given(st.integers(2, 5), st.integers(2, 16), st.data())
def test_interleaved_groups(p, m, data):
    """Megatron's rule and PyTorch's: what they allow is complete, the rest is refused."""
    g = data.draw(st.integers(1, m))
    allowed = (p <= g <= m and (m % g == 0 or m % g >= p)) or (
        m % max(1, m // p) == 0 and g == m // max(1, m // p)
    )
    if allowed:
        verify(generate("interleaved", p, m, 2, group_size=g), m)
    else:
        with pytest.raises(ValueError, match=r"(nearest valid|No) microbatch count"):
            generate("interleaved", p, m, 2, group_size=g)


@bounded
@given(st.integers(2, 5), st.integers(1, 4), st.integers(2, 3))
def test_looped_bfs(p, rounds, v):
    table = generate("looped-bfs", p, p * rounds, v)
    assert makespan(table) == 3 * p * rounds * v + 3 * (p - 1)
    assert set(peaks(table, Kind.WEIGHT_GRAD)) == {p * rounds * v}


@bounded
@given(ranks, st.integers(0, 12))
def test_zb_h1(p, more):
    m = p + more
    table = generate("zb-h1", p, m)
    assert makespan(table) == 3 * m + p - 1
    assert peaks(table, Kind.INPUT_GRAD) == tuple(p - r for r in range(p))
    assert set(peaks(table, Kind.WEIGHT_GRAD)) == {p}


@bounded
@given(st.integers(2, 4), st.integers(1, 3), st.integers(2, 3))
def test_zb_h1_interleaved_never_idles_longer_than_interleaved(p, rounds, v):
    m = p * rounds
    table = generate("zb-h1", p, m, v)
    verify(table, m)
    assert makespan(table) <= makespan(generate("interleaved", p, m, v))


@bounded
@given(ranks, st.integers(0, 8))
def test_zb_h2_has_no_inner_bubble(p, more):
    m = 2 * p - 1 + more
    table = generate("zb-h2", p, m)
    assert makespan(table) == 3 * m + p - 1
    assert max(inner(table)) == 0
    assert set(peaks(table, Kind.WEIGHT_GRAD)) == {2 * p - 1}


@bounded
@given(ranks, st.integers(0, 8))
def test_zb_v_has_no_inner_bubble_in_the_memory_of_1f1b(p, more):
    m = 2 * p - 1 + more
    table = generate("zb-v", p, m)
    assert makespan(table) == 6 * m + p - 1
    assert max(inner(table)) == 0
    assert set(peaks(table, Kind.WEIGHT_GRAD)) == {2 * p}


@pytest.mark.parametrize(("p", "bubble"), [(2, 1), (3, 5), (4, 5), (6, 11), (8, 17)])
@pytest.mark.parametrize("m", [12, 19])
def test_v_half(p, bubble, m):
    table = generate("v-half", p, m)
    assert makespan(table) == 6 * m + bubble
    assert max(peaks(table, Kind.WEIGHT_GRAD)) == (p + 2 if p % 2 == 0 else p + 1)


@pytest.mark.parametrize(("p", "bubble"), [(2, 3), (3, 5), (4, 11), (6, 17), (8, 27)])
@pytest.mark.parametrize("m", [12, 19])
def test_v_min(p, bubble, m):
    table = generate("v-min", p, m)
    assert makespan(table) == 6 * m + bubble
    assert max(peaks(table, Kind.WEIGHT_GRAD)) == 2 * math.ceil((p + 2) / 3)


@pytest.mark.parametrize(("p", "bubble", "peak"), [(4, 15, 6), (8, 33, 12)])
@pytest.mark.parametrize("m", [12, 19])
def test_1f1b_v(p, bubble, peak, m):
    table = generate("1f1b-v", p, m)
    assert makespan(table) == 6 * m + bubble
    assert max(peaks(table, Kind.WEIGHT_GRAD)) == peak


@settings(max_examples=15, deadline=None)
@given(st.integers(1, 9), microbatches, st.sampled_from(["v-half", "v-min", "1f1b-v"]))
def test_building_blocks_stay_within_their_memory(p, m, name):
    table = generate(name, p, m)
    verify(table, m)
    limit = {
        "v-half": p + 2 if p % 2 == 0 else p + 1,
        "v-min": 2 * math.ceil((p + 2) / 3),
        "1f1b-v": 2 * p,
    }[name]
    assert max(peaks(table, Kind.WEIGHT_GRAD)) <= max(limit, 2)


@bounded
@given(st.sampled_from([2, 4, 6, 8]), st.integers(0, 6))
def test_dualpipe(p, more):
    m = 2 * p + 2 * more
    table = generate("dualpipe", p, m)
    assert max(inner(table)) <= 2 * (p // 2 - 1)
    assert makespan(table) == 3 * m + 2 * (p // 2 - 1)
    assert max(peaks(table, Kind.WEIGHT_GRAD)) <= p + 1


@bounded
@given(st.integers(1, 6), st.integers(0, 8))
def test_dualpipe_v(p, more):
    m = 2 * p + more
    table = generate("dualpipe-v", p, m)
    assert makespan(table) == 6 * m + 2 * (p - 1)
    assert max(peaks(table, Kind.WEIGHT_GRAD)) == 2 * p + 1
    assert any(isinstance(item, Overlap) for row in table.ranks for item in row)


@bounded
@given(st.sampled_from([2, 4, 6, 8]))
def test_chimera_of_one_unit(p):
    table = generate("chimera", p, p)
    even = simulate(table, StageCosts.unit(p, 1, 0.5, 0.5, 1))
    assert even.makespan_s == 2 * p + p - 2
    expected = tuple(p // 2 + 1 + min(r, p - 1 - r) for r in range(p))
    assert peaks(table, Kind.WEIGHT_GRAD) == tuple(min(p, x) for x in expected)


@bounded
@given(st.integers(1, 5), st.integers(1, 8))
def test_dynapipe_without_limit_is_overlap_friendly_1f1b(p, m):
    assert generate("dynapipe", p, m) == generate("1f1b-overlap", p, m)


@bounded
@given(st.integers(1, 4), st.integers(1, 8), st.integers(1, 6))
def test_dynapipe_keeps_its_limit(p, m, memory):
    table = generate("dynapipe", p, m, memory=memory)
    verify(table, m)
    assert max(peaks(table, Kind.WEIGHT_GRAD)) <= memory


def allowed_sizes(name):
    """Some sizes (p, m) that the schedule's rule allows, m = 1 and m < p among them."""
    record = SCHEDULES[name]
    sizes = []
    for p in (1, 2, 3, 4):
        for m in (1, 2, 3, 5, 8):
            with suppress(ValueError):  # what a refusal says is tested with the records
                sizes.append((p, m, record.generate(p, m)))
    return sizes


@pytest.mark.parametrize("name", list(SCHEDULES))
def test_whatever_is_allowed_is_complete_and_placed_as_the_record_says(name):
    record = SCHEDULES[name]
    sizes = allowed_sizes(name)
    assert sizes
    for p, m, table in sizes:
        verify(table, m)
        assert table.num_ranks == p
        assert table.num_stages == record.stages(p)
        kinds = {a.kind for _, _, a in table.actions()}
        assert (Kind.WEIGHT_GRAD in kinds) == record.splits_backward
        if not record.bidirectional or m > 1:
            assert table.placement == record.place(p)
        assert Schedule.from_csv(table.to_csv()) == table


def test_one_microbatch_on_two_ranks():  # users' case 27
    for name in SCHEDULES:
        if name.startswith("dualpipe"):
            with pytest.raises(ValueError, match="m >= 2p"):
                generate(name, 2, 1)
        else:
            verify(generate(name, 2, 1), 1)
    assert makespan(generate("gpipe", 2, 1)) == makespan(generate("1f1b", 2, 1)) == 6


def test_fewer_microbatches_than_ranks():  # users' case 8
    table = generate("1f1b", 4, 2)
    assert str(table).splitlines()[0] == "0F0 0F1 0B0 0B1"
    assert str(table).splitlines()[3] == "3F0 3B0 3F1 3B1"
    assert makespan(table) == 15
    assert peaks(table, Kind.WEIGHT_GRAD) == (2, 2, 2, 1)
    assert makespan(generate("1f1b", 4, 1)) == 12
