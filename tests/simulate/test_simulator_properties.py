"""Random valid tables, costs and machines: the compiled simulator against the plain one."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octojax.ir.lowering import actions_of, transfers_of
from octojax.ir.verify import verify
from octojax.simulate import Links, Table, build_dag, evaluate, longest_path_s, simulate
from octojax.simulate.oracle import Meaning, Times, held_bytes
from tests.simulate.random_tables import SETTINGS, machines, stage_costs, tables


@st.composite
def cases(draw):
    schedule = draw(tables(recompute=draw(st.booleans())))
    costs = draw(stage_costs(schedule.num_stages, recompute=draw(st.booleans()), ends=True))
    return schedule, costs, draw(machines(schedule.num_ranks))


@settings(**SETTINGS)
@given(cases())
def test_random_tables_are_valid(case):
    verify(case[0])


@settings(**SETTINGS)
@given(cases())
def test_compiled_equals_plain(case):
    plain = simulate(*case, compiled=False)
    compiled = simulate(*case, compiled=True)
    assert compiled.makespan_s == plain.makespan_s
    assert compiled.actions == plain.actions
    assert compiled.memory == plain.memory
    assert [x.peak_microbatches for x in compiled.ranks] == [
        x.peak_microbatches for x in plain.ranks
    ]
    for a, b in zip(compiled.transfers, plain.transfers, strict=True):
        assert (a.name, a.source, a.target) == (b.name, b.source, b.target)
        assert (a.start_s, a.end_s, a.nbytes) == (b.start_s, b.end_s, b.nbytes)
        assert a.overlap_s == pytest.approx(b.overlap_s, rel=1e-9, abs=1e-9)
        assert a.sender_overlap_s == pytest.approx(b.sender_overlap_s, rel=1e-9, abs=1e-9)
    for a, b in zip(compiled.ranks, plain.ranks, strict=True):
        assert a == b


@settings(**SETTINGS)
@given(cases())
def test_the_tuners_path_agrees(case):
    schedule, costs, machine = case
    full = simulate(*case)
    light = evaluate(Table.of(schedule), costs, Links.of(machine, schedule.num_ranks))
    assert light.done == sum(map(len, schedule.ranks))
    assert light.makespan_s == full.makespan_s
    assert light.busy_s == pytest.approx([x.busy_s for x in full.ranks], rel=1e-12)
    assert light.peak_bytes.tolist() == [x.peak_bytes for x in full.ranks]


@settings(**SETTINGS)
@given(cases())
def test_busy_and_bubble_fill_the_step(case):
    result = simulate(*case)
    for rank in result.ranks:
        assert rank.busy_s + rank.bubble_s == pytest.approx(result.makespan_s, rel=1e-12, abs=1e-12)
        parts = rank.boundary_bubble_s + rank.residual_bubble_s
        assert parts == pytest.approx(rank.bubble_s, rel=1e-9, abs=1e-9)
        assert rank.residual_bubble_s >= 0


@settings(**SETTINGS)
@given(cases())
def test_memory_is_static_at_the_end_and_never_below(case):
    schedule, costs, _ = case
    result = simulate(*case)
    for stages, trace, rank in zip(
        schedule.placement.ranks, result.memory, result.ranks, strict=True
    ):
        static = sum(costs.state_bytes[s] for s in stages)
        levels = [level for _, level in trace]
        assert min(levels) >= static
        assert levels[-1] == static
        assert max(levels) == rank.peak_bytes
        assert [t for t, _ in trace] == sorted({t for t, _ in trace})


@settings(**SETTINGS)
@given(cases())
def test_peak_is_the_most_that_is_held_at_any_instant(case):
    schedule, costs, machine = case
    result = simulate(*case)
    meaning = Meaning(schedule, costs, machine)
    moves = zip(transfers_of(schedule), result.transfers, strict=True)
    done = Times(
        {a: (s.start_s, s.end_s) for s in result.actions for a in actions_of(s.item)},
        {transfer: (span.start_s, span.end_s) for transfer, span in moves},
    )
    for rank, stages in enumerate(schedule.placement.ranks):
        spans = held_bytes(meaning, done, rank)
        instants = {0.0, *(begin for begin, _, _ in spans)}
        static = sum(costs.state_bytes[s] for s in stages)
        most = max(sum(size for a, b, size in spans if a <= t < b) for t in instants)
        assert result.ranks[rank].peak_bytes == static + most


@settings(**SETTINGS)
@given(cases())
def test_times_keep_every_dependency(case):
    machine = case[2]
    result = simulate(*case)
    end = {}
    for span in result.actions:
        assert span.end_s >= span.start_s >= 0
        end[span.rank] = max(end.get(span.rank, 0.0), 0.0)
        assert span.start_s >= end[span.rank]
        end[span.rank] = span.end_s
    last: dict[tuple[int, int], float] = {}
    for move in result.transfers:
        latency, bandwidth = machine.link(move.source, move.target)
        assert math.isclose(
            move.end_s - move.start_s, latency + move.nbytes / bandwidth, rel_tol=1e-9, abs_tol=1e-9
        )
        link = (move.source, move.target)
        assert move.start_s >= last.get(link, 0.0) - 1e-9
        last[link] = move.start_s + move.nbytes / bandwidth


@settings(**SETTINGS)
@given(cases())
def test_makespan_is_the_longest_path(case):
    graph = build_dag(*case)
    assert longest_path_s(graph) == pytest.approx(simulate(*case).makespan_s, rel=1e-12, abs=1e-12)


@settings(**SETTINGS)
@given(cases())
def test_arrays_give_the_schedule_back(case):
    schedule = case[0]
    table = Table.of(schedule)
    assert table.to_schedule() == schedule
    assert table.items.dtype == np.int32
