"""Text in, text out: the passes on lowered plans but the one that reorders."""

import pytest
from hypothesis import given, settings

from octojax.ir import Cargo, Kind, LoweredPlan, Schedule, Unit, Wiring
from octojax.ir.verify import verify
from octojax.passes import JoinActions, PlaceExchanges, PlaceTransfers, ReorderComm, lowered
from octojax.schedules import generate
from tests.simulate.random_tables import SETTINGS, tables


def test_naive_rule():
    before = Schedule.parse("0F0 0B0\n1F0 1B0")
    after = PlaceTransfers()(before)
    assert after.lines == ("0F0 0SEND_F0 0RECV_B0 0B0", "1RECV_F0 1F0 1B0 1SEND_B0")
    again = Schedule.parse("\n".join(after.lines))
    assert PlaceTransfers()(again) == after


def test_what_has_nothing_to_do_is_left_out():
    """Stage 1 has no parameters, stage 0 wants no gradient: its own are frozen."""
    wiring = Wiring(
        3,
        (Unit((0,), ()), Unit((2,), (2,))),
        ((2,),),
        silent=frozenset({(Cargo.GRADIENT, 1)}),
        idle=frozenset({(0, Kind.INPUT_GRAD), (0, Kind.WEIGHT_GRAD), (1, Kind.WEIGHT_GRAD)}),
    )
    table = Schedule.parse("0F0 0I0 0W0\n1F0 1I0 1W0\n2F0 2I0 2W0")
    plan = lowered(table, wiring=wiring)
    assert plan.lines == (
        "0F0 0SEND_F0",
        "1RECV_F0 1F0 1SEND_F0 1RECV_B0 1I0",
        "2RECV_F0 2F0+2I0 2SEND_B0 2W0",
    )
    assert LoweredPlan.parse(str(plan)) == plan
    assert LoweredPlan.from_json(plan.to_json()) == plan


def test_a_weight_gradient_takes_the_gradient_where_no_input_gradient_is_made():
    wiring = Wiring.chain(2)
    wiring = Wiring(2, wiring.units, wiring.results, idle=frozenset({(0, Kind.INPUT_GRAD)}))
    plan = lowered(Schedule.parse("0F0 0I0 0W0\n1F0 1I0 1W0"), wiring=wiring)
    assert plan.lines == ("0F0 0SEND_F0 0RECV_B0 0W0", "1RECV_F0 1F0+1I0 1SEND_B0 1W0")


def test_a_tied_parameter_has_one_owner():
    wiring = Wiring(2, (Unit((0,), (0,)), Unit((0, 1), (0, 1)), Unit((1,), (1,))), ((1,),))
    plan = lowered(Schedule.parse("0F0 0B0\n1F0 1B0"), wiring=wiring)
    assert plan.lines == (
        "0F0 0SEND_F0 0RECV_B0 0B0 RECV_G(1->0;1) SEND_P(0->1;1)",
        "1RECV_F0 1F0+1B0 1SEND_B0 SEND_G(1->0;1) RECV_P(0->1;1)",
    )
    assert PlaceExchanges()(plan) == plan


def test_bidirectional_pipelines_exchange_sums_results_and_parameters():
    plan = lowered(generate("dualpipe", 2, 4))
    tails = [" ".join(x for x in row.split(" ") if "->" in x) for row in plan.lines]
    assert tails == [
        "RECV_G(1->0;0-1) RECV_E(1->0;0) SEND_P(0->1;0-1)",
        "SEND_G(1->0;0-1) SEND_E(1->0;0) RECV_P(0->1;0-1)",
    ]


def test_joining_replaces_programs_and_never_adds_any():
    table = Schedule.parse("0F0 0F1 0B0 0B1\n1F0 1F1 1B1 1B0")
    # 1F1 and 1B1 stand together, 1F0 and 1B0 do not: joining one pair would add a program.
    plan = JoinActions()(PlaceTransfers()(table))
    assert plan == PlaceTransfers()(table)


@pytest.mark.parametrize(
    ("table", "joined"),
    [
        ("0F0 1F0 1B0 0B0", "0F0+1F0+1B0+0B0"),
        ("0F0 1F0 1I0 0I0 0W0 1W0", "0F0+1F0+1I0+0I0+0W0 1W0"),
        ("0F0 0F1 0B0 0B1", "0F0 0F1 0B0 0B1"),
        ("0F0 0R0 0B0", "0F0+0R0+0B0"),
        ("0F0 (0F1;0B0)OVERLAP_F_B 0B1", "0F0 (0F1;0B0)OVERLAP_F_B 0B1"),
    ],
)
def test_joined_actions(table, joined):
    assert JoinActions()(PlaceTransfers()(Schedule.parse(table))).lines == (joined,)


@settings(**SETTINGS)
@given(tables(recompute=True))
def test_joining_keeps_what_runs_where(schedule):
    naive = PlaceTransfers()(schedule)
    plan = JoinActions()(naive)
    assert plan.schedule == naive.schedule == schedule
    assert plan.transfers == naive.transfers
    verify(ReorderComm()(plan))
