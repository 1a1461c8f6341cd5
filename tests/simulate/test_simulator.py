"""The simulator's meaning, one rule at a time, on tables small enough to draw."""

import numpy as np
import pytest

from octojax.errors import CapacityError, PlanError, ProfileError, ScheduleError
from octojax.ir import LayerCost, Machine, Partition, Placement, Plan, Profile, Schedule
from octojax.simulate import (
    LayerCosts,
    StageCosts,
    build_dag,
    check_capacity,
    find_cycle,
    longest_path_s,
    simulate,
)

TWO = Schedule.parse("0F0 0F1 0B0 0B1\n1F0 1B0 1F1 1B1")
BYTES = np.array([[8, 0, 4, 0, 100], [8, 0, 0, 4, 100]], dtype=np.float64)


def with_bytes(schedule: Schedule, recompute=(False, False), weight=0.0) -> StageCosts:
    unit = StageCosts.unit(schedule.num_stages)
    nbytes = BYTES.copy()
    nbytes[:, 1] = weight
    return StageCosts(unit.seconds, nbytes, np.array(recompute))


def spans(result) -> dict[str, tuple[float, float]]:
    return {str(x.item): (x.start_s, x.end_s) for x in result.actions}


def test_one_value_after_another_on_a_link():
    """Two values of 4 bytes at 2 bytes a second: the second waits until the first has left."""
    machine = Machine(latency_s=10.0, bandwidth_bytes_per_s=2.0)
    result = simulate(TWO, with_bytes(TWO), machine)
    first, second = result.transfers[:2]
    assert (first.name, first.start_s, first.end_s) == ("0SEND_F0", 1, 1 + 10 + 2)
    assert (second.name, second.start_s, second.end_s) == ("0SEND_F1", 3, 3 + 10 + 2)
    assert spans(result)["1F0"] == (13, 14)


def test_host_cost_lengthens_both_ends():
    machine = Machine(host_cost_s=0.5)
    result = simulate(Schedule.parse("0F0 0B0\n1F0 1B0"), StageCosts.unit(2), machine)
    assert spans(result) == {"0F0": (0, 1.5), "1F0": (1.5, 3), "1B0": (3, 5.5), "0B0": (5.5, 8)}
    assert [r.busy_s for r in result.ranks] == [4.0, 4.0]


def test_rank_speed_divides_compute():
    machine = Machine(speeds=(1.0, 2.0))
    result = simulate(Schedule.parse("0F0 0B0\n1F0 1B0"), StageCosts.unit(2), machine)
    assert spans(result) == {"0F0": (0, 1), "1F0": (1, 1.5), "1B0": (1.5, 2.5), "0B0": (2.5, 4.5)}


def test_single_actions_may_take_their_own_time():
    machine = Machine(speeds=(1.0, 2.0), host_cost_s=0.5)
    took = {"0F0": 3.0, "1F0": 4.0, "1B0": 5.0, "0B0": 6.0}
    table, unit = Schedule.parse("0F0 0B0\n1F0 1B0"), StageCosts.unit(2)
    result = simulate(table, unit, machine, seconds=lambda rank, action: took[str(action)])
    assert spans(result) == {"0F0": (0, 3.5), "1F0": (3.5, 8), "1B0": (8, 13.5), "0B0": (13.5, 20)}
    with pytest.raises(ValueError, match="the compiled simulator knows one time"):
        simulate(table, unit, compiled=True, seconds=lambda rank, action: 1.0)


def test_neighbours_on_one_rank_send_nothing():
    schedule = Schedule.parse("0F0 1F0 1B0 0B0")
    result = simulate(schedule, StageCosts.unit(2), Machine(latency_s=9.0))
    assert result.transfers == ()
    assert result.makespan_s == 6


def test_links_between_nodes():
    machine = Machine(latency_s=1.0, ranks_per_node=1, inter_latency_s=5.0)
    result = simulate(Schedule.parse("0F0 0B0\n1F0 1B0"), StageCosts.unit(2), machine)
    assert result.makespan_s == 1 + 5 + 3 + 5 + 2


def test_overlapped_pair_is_one_unit():
    schedule = Schedule.parse("0F0 0F1 (0F2;1B0)OVERLAP_F_B 1B1 0B0 0B1 1B2 0B2\n1F0 1F1 1F2")
    with pytest.raises(ScheduleError, match="misplaced"):
        simulate(schedule, StageCosts.unit(2))
    one = Schedule.parse("0F0 (0F1;0B0)OVERLAP_F_B 0B1")
    result = simulate(one, StageCosts.unit(1))
    assert spans(result)["(0F1;0B0)OVERLAP_F_B"] == (1, 4)


def test_memory_over_time():
    """Rank 0: state 100, 8 bytes for each residual, 4 for each value sent, while it travels."""
    schedule = Schedule.parse("0F0 0B0\n1F0 1B0")
    result = simulate(schedule, with_bytes(schedule), Machine(latency_s=1.0))
    assert result.memory[0] == ((0, 108), (1, 112), (2, 108), (5, 112), (8, 100))
    assert result.memory[1] == ((0, 100), (1, 104), (2, 112), (3, 108), (5, 104), (6, 100))
    assert [r.peak_bytes for r in result.ranks] == [112, 112]


def test_weight_gradient_keeps_its_part():
    schedule = Schedule.parse("0F0 0I0 0W0")
    costs = StageCosts(
        StageCosts.unit(1).seconds, np.array([[8.0, 3.0, 0, 0, 100.0]]), np.array([False])
    )
    assert simulate(schedule, costs).memory == (((0, 108), (2, 103), (3, 100)),)


def test_recompute_keeps_the_input_alone():
    schedule = Schedule.parse("0F0 0R0 0B0\n1F0 1R0 1B0")
    result = simulate(schedule, with_bytes(schedule, (False, True)))
    # 1F0 from 1 to 2 with the received value beside the kept input, 1R0 from 2, 1B0 to 5
    assert result.memory[1] == ((0, 100), (1, 108), (2, 112), (5, 100))
    assert result.memory[1][-1][1] == 100


def test_free_chooses_the_count():
    schedule = Schedule.parse("0F0 0I0 0F1 0I1 0W0 0W1")
    assert simulate(schedule, StageCosts.unit(1)).ranks[0].peak_microbatches == 1
    kept = simulate(schedule, StageCosts.unit(1), free="weight").ranks[0]
    assert (kept.peak_microbatches, kept.peak_microbatches_until_weight) == (2, 2)


def test_blocking_occupies_both_ranks():
    """GPipe, one microbatch: F, send, F, B, send back, B; nobody computes during a transfer."""
    schedule = Schedule.parse("0F0 0F1 0B0 0B1\n1F0 1F1 1B0 1B1")
    machine = Machine(latency_s=1.0)
    result = simulate(schedule, StageCosts.unit(2), machine, mode="blocking")
    assert spans(result) == {
        "0F0": (0, 1), "0F1": (2, 3), "1F0": (2, 3), "1F1": (4, 5),
        "1B0": (5, 7), "0B0": (8, 10), "1B1": (8, 10), "0B1": (11, 13),
    }  # fmt: skip
    assert [t.overlap_s for t in result.transfers] == [0, 0, 0, 0]
    assert simulate(schedule, StageCosts.unit(2), machine).makespan_s < result.makespan_s


def test_blocking_deadlock_names_the_stuck_operations():
    with pytest.raises(ScheduleError, match="stuck at 0SEND_F1 1SEND_B0"):
        simulate(TWO, StageCosts.unit(2), mode="blocking")


def test_lowered_table_posts_early():
    """A receive posted before it is needed lets the value travel beside computation."""
    machine = Machine(latency_s=1.0)
    early = Schedule.parse(
        "0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1\n"
        "1RECV_F0 1F0 1RECV_F1 1B0 1SEND_B0 1F1 1B1 1SEND_B1"
    )
    assert simulate(early, StageCosts.unit(2), machine).makespan_s == (
        simulate(TWO, StageCosts.unit(2), machine).makespan_s
    )
    late = Schedule.parse(
        "0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1\n"
        "1RECV_F0 1F0 1B0 1SEND_B0 1RECV_F1 1F1 1B1 1SEND_B1"
    )
    assert simulate(late, StageCosts.unit(2), machine).makespan_s == (
        simulate(TWO, StageCosts.unit(2), machine).makespan_s + 1
    )


def test_lowered_table_without_a_receive_is_refused():
    lost = Schedule.parse("0F0 0SEND_F0 0RECV_B0 0B0\n1F0 1B0 1SEND_B0")
    with pytest.raises(ScheduleError, match="1RECV_F0 is missing on rank 1"):
        simulate(lost, StageCosts.unit(2))


def profile(**machine) -> Profile:
    layers = tuple(
        LayerCost("block", 1.0, 1.0, 1.0, state_bytes=10, residual_bytes=8, output_bytes=4)
        for _ in range(4)
    )
    return Profile("four", layers, Machine(**machine))


def test_costs_come_from_the_plan():
    plan = Plan(Partition((1, 3)), Placement.sequential(2), TWO, (False, True))
    costs = StageCosts.of(profile(), plan.partition, plan.recompute)
    assert costs.forward_s.tolist() == [1, 3]
    assert costs.backward_s.tolist() == [2, 6]
    assert costs.output_bytes.tolist() == [4, 0]
    assert costs.input_bytes.tolist() == [0, 4]
    assert costs.state_bytes.tolist() == [10, 30]
    assert costs.compute_s.tolist() == [3, 12]
    assert simulate(plan, profile()).makespan_s == simulate(plan, costs).makespan_s


def test_costs_of_another_model_are_refused():
    plan = Plan(Partition((1, 2)), Placement.sequential(2), TWO)
    with pytest.raises(PlanError, match=r"\[1 2\] has 3 layers, the profile 4"):
        simulate(plan, profile())
    with pytest.raises(PlanError, match="given for 3 stages, but the schedule runs 2"):
        simulate(TWO, StageCosts.unit(3))
    with pytest.raises(PlanError, match="1 layers cannot form 2 stages"):
        simulate(TWO, Profile("one", profile().layers[:1]))


def test_wrong_costs_are_refused():
    with pytest.raises(ProfileError, match="seconds of stage 0, F is -1"):
        StageCosts.unit(2, -1.0)
    with pytest.raises(ProfileError, match=r"expected \(2, 5\)"):
        StageCosts(np.zeros((2, 4)), np.zeros((2, 5)), np.zeros(2, bool))
    with pytest.raises(ProfileError, match="speeds of 1 ranks, but the schedule has 2"):
        simulate(TWO, StageCosts.unit(2), Machine(speeds=(1.0,)), compiled=True)
    with pytest.raises(ProfileError, match="speeds of 1 ranks, but the schedule has 2"):
        simulate(TWO, StageCosts.unit(2), Machine(speeds=(1.0,)))


def test_unknown_words_are_refused():
    with pytest.raises(ValueError, match="mode='sync' is unknown; choose of async, blocking"):
        simulate(TWO, StageCosts.unit(2), mode="sync")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="free='F' is unknown"):
        simulate(TWO, StageCosts.unit(2), free="F")  # type: ignore[arg-type]


def test_invalid_tables_are_refused():
    with pytest.raises(ScheduleError, match="0B0 is missing"):
        simulate(Schedule.parse("0F0"), StageCosts.unit(1))


def test_capacity():
    plan = Plan(Partition((2, 2)), Placement.sequential(2), TWO)
    check_capacity(plan, profile(capacity_bytes=56))
    with pytest.raises(CapacityError, match=r"rank 0 needs .* it lacks 1 bytes") as error:
        check_capacity(plan, profile(capacity_bytes=55))
    assert "rank 1" not in str(error.value)
    assert "Recompute" in str(error.value)


def test_layer_costs_are_cut_at_will():
    layers = LayerCosts(profile())
    assert layers.cut([1, 1, 2]).forward_s.tolist() == [1, 1, 2]
    assert layers.cut([4]).state_bytes.tolist() == [40]
    with pytest.raises(PlanError, match="has 5 layers, the profile 4"):
        layers.cut([2, 3])


def test_dag_shows_transfers_and_memory():
    graph = build_dag(TWO, with_bytes(TWO), Machine(latency_s=1.0))
    assert graph.edges["0F0", "0SEND_F0"]["why"] == "data"
    assert graph.edges["0SEND_F0", "1F0"]["delay_s"] == 1.0
    assert graph.edges["0SEND_F0", "0SEND_F1"]["why"] == "link"
    assert graph.nodes["0F0+"]["bytes"] == 8
    assert graph.nodes["0B0-"]["bytes"] == -8
    assert (
        longest_path_s(graph) == simulate(TWO, with_bytes(TWO), Machine(latency_s=1.0)).makespan_s
    )
    kinds = {data["kind"] for _, data in graph.nodes(data=True)}
    assert kinds == {"action", "transfer", "memory", "end"}


def test_dag_finds_the_cycle():
    """Rank 0 waits for 1B0, which stands behind 1F1, which waits for 0F1, behind 0B0."""
    graph = build_dag(Schedule.parse("0F0 0B0 0F1 0B1\n1F0 1F1 1B0 1B1"), StageCosts.unit(2))
    cycle = find_cycle(graph)
    assert cycle[0] == cycle[-1]
    assert {"0B0", "0F1", "0SEND_F1", "1F1", "1B0", "1SEND_B0"} == set(cycle)
    with pytest.raises(ScheduleError, match=r"the step never ends: .*1F1"):
        longest_path_s(graph)
    assert find_cycle(build_dag(TWO, StageCosts.unit(2))) == ()


def test_dag_can_be_exported(tmp_path):
    import networkx as nx

    graph = build_dag(TWO, StageCosts.unit(2))
    nx.write_gml(graph, tmp_path / "step.gml")
    assert set(nx.read_gml(tmp_path / "step.gml").nodes) == set(graph.nodes)


def test_json_has_the_documented_fields():
    result = simulate(TWO, StageCosts.unit(2)).to_json()
    assert set(result) == {"makespan_s", "ranks", "transfers"}
    assert set(result["ranks"][0]) >= {
        "busy_s", "bubble_s", "boundary_bubble_s", "residual_bubble_s",
        "peak_microbatches", "peak_bytes",
    }  # fmt: skip
    assert set(result["transfers"]) >= {"count", "overlapped", "overlap_s"}
