"""Where a step's time goes adds up to it, and its longest chain has no hole."""

import itertools
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octojax.diagnosis.accounts import parts_of, rank_accounts, waits_of
from octojax.diagnosis.critical_path import critical_path, seconds_by
from octojax.ir import (
    Cause,
    LayerCost,
    Machine,
    Partition,
    Placement,
    Plan,
    Profile,
    Schedule,
)
from octojax.schedules import generate
from octojax.simulate import simulate

costs = st.floats(0.1, 3.0)


@st.composite
def steps(draw):
    """A published schedule, simulated with costs that differ from layer to layer."""
    name = draw(st.sampled_from(["gpipe", "1f1b", "interleaved", "zb-h1", "zb-v", "dualpipe"]))
    ranks, count = draw(st.sampled_from([(2, 4), (4, 8), (4, 9)]))
    if name == "dualpipe":
        ranks, count = 2, 4
    if name == "interleaved":
        count = 2 * ranks
    table = generate(name, ranks, count)
    layers = tuple(
        LayerCost("x", draw(costs), draw(costs), draw(costs), output_bytes=draw(st.integers(0, 9)))
        for _ in range(table.num_stages)
    )
    machine = Machine(
        latency_s=draw(st.floats(0, 1)),
        bandwidth_bytes_per_s=draw(st.floats(2, 20)),
        host_cost_s=draw(st.sampled_from([0.0, 0.05])),
        speeds=tuple(draw(st.floats(0.5, 2)) for _ in range(ranks)),
    )
    return simulate(table, Profile("p", layers, machine))


@settings(max_examples=40, deadline=None)
@given(steps())
def test_the_parts_add_up_to_the_step_and_every_rank_to_it_too(timeline):
    close = 1e-9 * timeline.makespan_s
    assert abs(sum(x.seconds for x in parts_of(timeline)) - timeline.makespan_s) < close
    assert all(x.seconds >= -close for x in parts_of(timeline))
    for a in rank_accounts(timeline):
        parts = (a.busy_s, a.fill_s, a.drain_s, a.computation_wait_s, a.transfer_wait_s)
        assert abs(sum(parts) + a.host_wait_s - timeline.makespan_s) < close


@settings(max_examples=40, deadline=None)
@given(steps())
def test_the_chain_reaches_from_the_end_to_zero_without_a_hole(timeline):
    chain = critical_path(timeline)
    assert chain[0].start_s == 0.0
    assert chain[-1].end_s == timeline.makespan_s
    for before, after in itertools.pairwise(chain):
        assert before.end_s == after.start_s
        queued = before.cause == after.cause == "transfer"  # for their link
        assert before.target == after.rank or (queued and before.rank == after.rank)
        assert before.cause != "host"  # a simulated action starts when what it waits for is there
    ranks, stages, links = seconds_by(chain)
    whole = math.fsum([*ranks.values(), *links.values()])
    assert abs(whole - timeline.makespan_s) < 1e-9 * timeline.makespan_s
    assert abs(sum(stages.values()) - sum(ranks.values())) < 1e-9 * timeline.makespan_s


def heavy_tail() -> Plan:
    return Plan(
        Partition((1, 1)),
        Placement.of((0, 1)),
        Schedule.parse("0F0 0F1 0B0 0B1\n1F0 1B0 1F1 1B1"),
    )


def test_a_heavy_last_stage_is_the_imbalance_and_the_chain():
    profile = Profile(
        "p",
        (LayerCost("x", 1.0, 1.0, 1.0, output_bytes=2), LayerCost("head", 3.0, 3.0, 3.0)),
        Machine(latency_s=0.25, bandwidth_bytes_per_s=4.0),
    )
    timeline = simulate(heavy_tail(), profile)
    assert timeline.makespan_s == 1 + 0.75 + 18 + 0.75 + 2
    parts = {x.name: x for x in parts_of(timeline)}
    assert parts["work, evenly spread"].seconds == (6 + 18) / 2
    assert parts["imbalance"].seconds == 6
    assert parts["imbalance"].where == "rank 1 works longest, rank 0 least"
    assert parts["fill and drain"].seconds == 1.75 + 2.75
    assert parts["waiting for computation"].seconds == 0
    assert parts["waiting for transfers"].where == "none between the actions of rank 1"
    ranks, stages, links = seconds_by(critical_path(timeline))
    assert ranks == {1: 18, 0: 3}
    assert stages == {1: 18, 0: 3}
    assert links == {(0, 1): 0.75, (1, 0): 0.75}
    (first, *_) = waits_of(timeline)
    assert (first.rank, first.peer, first.cause) == (0, 1, Cause.COMPUTATION)


def test_a_link_that_is_busy_is_part_of_the_chain():
    """Two values leave one after the other: the second waits for the first to have left."""
    table = Schedule.parse("0F0 0F1 0B0 0B1\n1F0 1F1 1B0 1B1")
    plan = Plan(Partition((1, 1)), Placement.of((0, 1)), table)
    layers = (LayerCost("x", 1.0, 1, 1, output_bytes=10), LayerCost("x", 0.5, 1, 1))
    timeline = simulate(plan, Profile("p", layers, Machine(bandwidth_bytes_per_s=2.0)))
    chain = [piece.name for piece in critical_path(timeline)]
    assert chain[:4] == ["0F0", "0SEND_F0", "0SEND_F1", "1F1"]


@pytest.mark.parametrize("late_s", [0.0, 0.5])
def test_a_measured_step_waits_for_its_host(late_s):
    from octojax.ir import ActionSpan, RankSummary, Timeline, parse_item

    spans = (
        ActionSpan(0, parse_item("0F0"), late_s, 1.0 + late_s),
        ActionSpan(0, parse_item("0B0"), 1.5 + late_s, 3.0 + late_s),
    )
    whole = 3.0 + late_s
    summary = RankSummary(2.5, 0.5 + late_s, late_s, 0.5, 1, 0.0)
    timeline = Timeline(whole, spans, (), (summary,))
    causes = [piece.cause for piece in critical_path(timeline)]
    assert causes == (["host"] if late_s else []) + ["computation", "host", "computation"]
    assert {x.name: x.seconds for x in parts_of(timeline)}["waiting for the host"] == 0.5
    assert sum(x.seconds for x in parts_of(timeline)) == whole
