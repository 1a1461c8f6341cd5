"""What idle ranks wait for: every gap has a cause, and the causes add up to the bubbles."""

import itertools

import pytest
from hypothesis import given, settings

from octojax.ir import Cause, Machine, Schedule
from octojax.passes import lowered
from octojax.simulate import StageCosts, simulate
from tests.simulate.random_tables import SETTINGS
from tests.simulate.test_simulator_properties import cases

ONE = Schedule.parse("0F0 0B0 0F1 0B1\n1F0 1B0 1F1 1B1")


def text(gaps) -> list[str]:
    return [
        f"rank {g.rank} {g.start_s:g}-{g.end_s:g} {g.cause} of {g.on} from {g.peer} before "
        f"{g.before or 'the end'}"
        for g in gaps
    ]


def test_beside_computation_a_rank_waits_first_for_the_value_then_for_its_transfer():
    result = simulate(ONE, StageCosts.unit(2), Machine(latency_s=0.5))
    assert text(g for g in result.gaps if g.end_s <= 6) == [
        "rank 0 1-4.5 computation of 1B0 from 1 before 0B0",
        "rank 0 4.5-5 transfer of 1SEND_B0 from 1 before 0B0",
        "rank 1 0-1 computation of 0F0 from 0 before 1F0",
        "rank 1 1-1.5 transfer of 0SEND_F0 from 0 before 1F0",
    ]
    assert [g.boundary for g in result.gaps if g.rank == 1] == [True, True, False, False, True]
    assert text(result.gaps)[-1] == "rank 1 11.5-14 computation of 0B1 from 0 before the end"
    assert result.stalls_s == {(0, "1SEND_B0"): 0.5, (0, "1SEND_B1"): 0.5, (1, "0SEND_F1"): 0.5}


def test_a_receive_that_is_posted_late_stalls_its_rank():
    late = Schedule.parse(
        "0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1\n"
        "1RECV_F0 1F0 1B0 1SEND_B0 1RECV_F1 1F1 1B1 1SEND_B1"
    )
    result = simulate(late, StageCosts.unit(2), Machine(latency_s=1.0))
    assert result.stalls_s[1, "0SEND_F1"] == 1
    assert (
        simulate(lowered(late, "transfers,reorder"), StageCosts.unit(2), Machine()).stalls_s == {}
    )


def test_blocking_transfers_are_waited_for_on_both_sides():
    schedule = Schedule.parse("0F0 0F1 0B0 0B1\n1F0 1F1 1B0 1B1")
    result = simulate(schedule, StageCosts.unit(2), Machine(latency_s=1.0), "blocking")
    assert text(g for g in result.gaps if g.rank == 0)[:3] == [
        "rank 0 1-2 transfer of 0SEND_F0 from 0 before 0F1",
        "rank 0 3-4 transfer of 0SEND_F1 from 0 before 0B0",
        "rank 0 4-7 computation of 1B0 from 1 before 0B0",
    ]
    assert result.to_json()["transfers"]["stalls"][0]["stall_s"] >= 1


@settings(**SETTINGS)
@given(cases())
@pytest.mark.parametrize("mode", ["async", "blocking"])
def test_causes_add_up_to_the_bubbles(mode, case):
    schedule, costs, machine = case
    table = schedule if mode == "async" else lowered(schedule, costs=costs, machine=machine)
    result = simulate(table, costs, machine, mode)
    for rank, account in enumerate(result.ranks):
        gaps = [g for g in result.gaps if g.rank == rank]
        assert all(a.end_s <= b.start_s for a, b in itertools.pairwise(gaps))
        edges = sum(g.end_s - g.start_s for g in gaps if g.boundary)
        assert edges == pytest.approx(account.boundary_bubble_s, rel=1e-9, abs=1e-9)
        waited = account.computation_wait_s + account.transfer_wait_s
        assert waited == pytest.approx(account.residual_bubble_s, rel=1e-9, abs=1e-9)
        assert all(g.cause is not Cause.HOST for g in gaps)
        assert all(g.on for g in gaps)
