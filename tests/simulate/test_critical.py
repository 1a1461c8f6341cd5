"""What events followed, their slack, and where idle time went, against other ways to know it."""

from dataclasses import replace

import networkx as nx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octojax.ir import ActionSpan, Machine, RankSummary, Schedule, Timeline, parse_item
from octojax.schedules import generate
from octojax.simulate import StageCosts, build_dag, simulate
from octojax.simulate.critical import chains_of, losses_of
from octojax.simulate.oracle import Meaning
from tests.simulate.random_tables import SETTINGS, machines, stage_costs, tables


@st.composite
def cases(draw):
    schedule = draw(tables(recompute=draw(st.booleans())))
    costs = draw(stage_costs(schedule.num_stages, recompute=draw(st.booleans()), ends=True))
    return schedule, costs, draw(machines(schedule.num_ranks))


def names_of(chains):
    actions = [str(span.item) for span in chains.timeline.actions]
    return actions + [t.name for t in chains.timeline.transfers]


def through(graph: nx.DiGraph) -> dict[str, float]:
    """The length of the longest path through every node of a step's graph."""
    order = list(nx.topological_sort(graph))
    reach, rest = dict.fromkeys(order, 0.0), dict.fromkeys(order, 0.0)
    for node in order:
        for _, following, delay in graph.out_edges(node, data="delay_s"):
            reach[following] = max(reach[following], reach[node] + delay)
    for node in reversed(order):
        rest[node] = max(
            (delay + rest[after] for _, after, delay in graph.out_edges(node, data="delay_s")),
            default=0.0,
        )
    return {node: reach[node] + rest[node] for node in order}


@settings(**SETTINGS)
@given(cases())
def test_slack_is_what_the_longest_path_through_an_event_lacks(case):
    timeline = simulate(*case)
    chains, longest = chains_of(timeline), through(build_dag(*case))
    near = {"rel": 1e-6, "abs": 1e-6 * timeline.makespan_s}
    for name, slack in zip(names_of(chains), chains.slack_s, strict=True):
        assert slack == pytest.approx(timeline.makespan_s - longest[name], **near)


@settings(**SETTINGS)
@given(cases(), st.randoms(use_true_random=False))
def test_an_action_may_be_longer_by_its_slack_and_no_more(case, random):
    schedule, costs, machine = case
    machine = replace(machine, overlap_discount=0.0)  # which `seconds` below know nothing of
    timeline = simulate(schedule, costs, machine)
    chains = chains_of(timeline)
    number = random.randrange(len(timeline.actions))
    span, slack = timeline.actions[number], chains.slack_s[number]
    meaning = Meaning(schedule, costs, machine)

    def makespan(more: float) -> float:
        def seconds(rank, action):
            late = more if str(span.item) in (str(action), *whole(action)) else 0.0
            return meaning.compute_s(rank, (action,)) + late

        def whole(action):
            parts = getattr(span.item, "actions", ())
            return (str(span.item),) if action in parts[:1] else ()

        return simulate(schedule, costs, machine, seconds=seconds).makespan_s

    near = {"rel": 1e-6, "abs": 1e-6 * timeline.makespan_s}
    assert makespan(slack) == pytest.approx(timeline.makespan_s, **near)
    assert makespan(slack + 1.0) == pytest.approx(timeline.makespan_s + 1.0, **near)


@settings(**SETTINGS)
@given(cases())
def test_chains_lead_from_the_start_to_the_end(case):
    timeline = simulate(*case)
    chains = chains_of(timeline)
    first, last = (timeline.ranks[actions_at(chains, at).rank] for at in (0, -1))
    at, near = first.before_s, 1e-6 * timeline.makespan_s
    for number in chains.critical:
        event = chains.events[number]
        assert chains.slack_s[number] == pytest.approx(0.0, abs=near)
        assert event.start_s <= at + near  # no time of it is unexplained
        at = event.end_s
    assert at + last.after_s == timeline.makespan_s


def actions_at(chains, at):
    """The first (0) or last (-1) event of the critical chain; both are actions."""
    return chains.events[chains.critical[at]]


@settings(**SETTINGS)
@given(cases())
def test_losses_come_to_the_bubble(case):
    timeline = simulate(*case)
    for rank, loss in zip(timeline.ranks, losses_of(timeline), strict=True):
        parts = (loss.fill_drain_s, loss.imbalance_s, loss.dependency_s, loss.transfer_s)
        assert min(parts) >= 0
        assert sum(parts) + loss.host_s == pytest.approx(rank.bubble_s, rel=1e-6, abs=1e-6)
        assert loss.host_s == pytest.approx(0.0, abs=1e-6 * timeline.makespan_s)


def test_a_chain_by_hand():
    """rank 1 is busy with 1F0 when 0F1 arrives; the last gradient goes back to rank 0."""
    table = Schedule.parse("0F0 0F1 0B0 0B1\n1F0 1B0 1F1 1B1")
    timeline = simulate(table, StageCosts.unit(2, 1, 1, 1, 2), Machine(latency_s=0.25))
    chains = chains_of(timeline)
    names = names_of(chains)
    path = "0F0 0SEND_F0 1F0 1B0 1F1 1B1 1SEND_B1 0B1"
    assert " ".join(names[e] for e in chains.critical) == path
    slack = dict(zip(names, chains.slack_s, strict=True))
    # 0F1 ends at 2, arrives at 2.25, and is needed at 4.25; 0B0 runs 4.5-6.5, 0B1 at 7.5
    assert slack["0F1"] == pytest.approx(2.0)
    assert slack["0B0"] == pytest.approx(1.0)
    assert slack["1B0"] == 0.0


def test_imbalance_is_the_work_that_a_rank_lacks():
    costs = StageCosts.unit(2, 1, 1, 1, 2)
    costs = StageCosts(costs.seconds * [[1.0], [2.0]], costs.nbytes, costs.recompute)
    table = generate("1f1b", 2, 8)
    first, last = losses_of(simulate(table, costs))
    assert last.imbalance_s == 0.0
    assert last.dependency_s == 0.0
    # rank 0 computes 24 of 51 units and waits for the 48 of rank 1
    assert first.imbalance_s == pytest.approx(24.0)


def test_late_receives_and_hosts_are_part_of_a_chain():
    lowered = Schedule.parse("0F0 0SEND_F0 0RECV_B0 0B0\n1RECV_F0 1F0 1B0 1SEND_B0")
    timeline = simulate(lowered, StageCosts.unit(2, 1, 1, 1, 2), Machine(latency_s=0.5))
    assert len(chains_of(timeline).critical) == 6
    spans = (
        ActionSpan(0, parse_item("0F0"), 0.0, 1.0),
        ActionSpan(0, parse_item("0B0"), 1.5, 2.5),
    )
    measured = Timeline(2.5, spans, (), (RankSummary(2.0, 0.5, 0.0, 0.5, 1, 0.0),))
    chains = chains_of(measured)
    assert chains.critical == (0, 1)
    assert chains.slack_s == (0.0, 0.0)
    assert losses_of(measured)[0].host_s == 0.5


def test_a_receive_that_is_posted_late_is_what_a_transfer_followed():
    """Rank 1 posts its receive of 0F1 after 1B0 alone, so the value leaves at 1B0's end."""
    lowered = Schedule.parse(
        "0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1\n"
        "1RECV_F0 1F0 1B0 1SEND_B0 1RECV_F1 1F1 1B1 1SEND_B1"
    )
    timeline = simulate(lowered, StageCosts.unit(2, 1, 1, 1, 2), Machine(latency_s=0.5))
    chains = chains_of(timeline)
    names = names_of(chains)
    assert names[chains.before[names.index("0SEND_F1")]] == "1B0"
    path = "0F0 0SEND_F0 1F0 1B0 0SEND_F1 1F1 1B1 1SEND_B1 0B1"
    assert " ".join(names[e] for e in chains.critical) == path


def test_timelines_that_no_step_can_have():
    spans = (
        ActionSpan(0, parse_item("0B0"), 0.0, 0.0),
        ActionSpan(0, parse_item("0F0"), 0.0, 0.0),
        ActionSpan(1, parse_item("1F0"), 0.0, 0.0),
        ActionSpan(1, parse_item("1B0"), 0.0, 0.0),
    )
    table = Schedule.parse("0F0 0B0\n1F0 1B0")
    whole = simulate(table, StageCosts.unit(2))
    circle = replace(whole, actions=spans, makespan_s=1.0)
    with pytest.raises(ValueError, match=r"wait for each other, .* -> "):
        chains_of(circle)
    skewed = replace(whole, actions=tuple(replace(s, start_s=0.0) for s in whole.actions))
    assert min(chains_of(skewed).slack_s) >= 0.0
