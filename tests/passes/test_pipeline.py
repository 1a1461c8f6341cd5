"""Pipelines of passes: specs, orders that cannot work, checks between, dumps, own callables."""

import pytest

from octojax.errors import PlanError, ScheduleError
from octojax.ir import LoweredPlan, Partition, Plan, Run, Schedule
from octojax.ir.naive import lower_naively
from octojax.ir.verify import verify
from octojax.passes import PlaceTransfers, ReorderComm, SplitBackward, lowered
from octojax.passes.spec import parse_passes
from octojax.schedules import generate


def plan_of(schedule: Schedule) -> Plan:
    return Plan(Partition((1,) * schedule.num_stages), schedule.placement, schedule)


ONE = plan_of(generate("1f1b", 2, 4))


def test_a_spec_names_passes_and_options():
    passes = parse_passes("split, recompute(stages=0-1+3, overlap=no),transfers,reorder(window=8)")
    assert [p.name for p in passes] == ["split", "recompute", "transfers", "reorder"]
    assert (passes[1].stages, passes[1].overlap) == ((0, 1, 3), False)
    assert passes[3].window == 8
    assert parse_passes(["split", PlaceTransfers(), "reorder"])[::2] == (
        SplitBackward(),
        ReorderComm(),
    )


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("transfers,reodrer", "unknown pass 'reodrer'; did you mean 'reorder'?; known are split"),
        ("nonsense", "unknown pass 'nonsense'; known are"),
        ("reorder(windw=3)", "pass reorder has no option 'windw'; did you mean 'window'?; known"),
        ("split(x=1)", "pass split has no option 'x'; it has none"),
        ("reorder(window=none)", "pass reorder: window='none': expected a whole number >= 1"),
        ("reorder(mode=sync)", "mode='sync': expected async or blocking"),
        ("recompute(stages=a)", "expected stages such as 0-3"),
        ("reorder(window)", "cannot read option 'window'; expected key=value"),
        ("transfers,,reorder", "cannot read 'transfers,,reorder' as passes, at ',reorder'"),
        ("transfers reorder", "unknown pass 'transfers reorder'; did you mean"),
        ("reorder(window=3", "as passes"),
    ],
)
def test_broken_specs(spec, message):
    with pytest.raises(ValueError) as error:
        parse_passes(spec)
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("transfers,split", "split cannot come after transfers: .* Put split before transfers"),
        ("reorder,transfers", "reorder needs transfers before it: .* Write transfers,reorder"),
        ("split", "the passes split end with a schedule, .*: add transfers,reorder"),
        ("transfers,reorder,transfers", "transfers cannot come after reorder: .* is lowered by"),
        ("transfers", "the passes transfers leave a table that is not deliverable"),
    ],
)
def test_orders_that_cannot_work(spec, message):
    with pytest.raises(PlanError, match=message):
        lowered(ONE, spec)


def test_shared_parameters_need_the_ownership_pass():
    both = generate("dualpipe", 2, 4)
    with pytest.raises(PlanError, match=r"lacks 3 transfers of parameters .*Add ownership"):
        lowered(both, "transfers,reorder")
    lowered(both, "transfers,reorder,ownership")


def test_the_table_is_dumped_around_each_pass(tmp_path):
    result = lowered(ONE, "split,transfers,reorder", dump=tmp_path / "tables")
    files = sorted(p.name for p in (tmp_path / "tables").iterdir())
    assert files == ["00-plan.txt", "01-split.txt", "02-transfers.txt", "03-reorder.txt"]
    texts = [(tmp_path / "tables" / f).read_text() for f in files]
    assert Plan.parse(texts[0]) == ONE
    assert Plan.parse(texts[1]) == SplitBackward()(ONE)
    assert LoweredPlan.parse(texts[2]) == PlaceTransfers()(SplitBackward()(ONE))
    assert LoweredPlan.parse(texts[3]) == result


def test_a_callable_of_ones_own_is_a_pass():
    def latest_weights(plan: Plan) -> Plan:
        rows = [sorted(row, key=lambda a: a.kind == "W") for row in plan.schedule.ranks]
        return plan.with_schedule(Schedule(tuple(map(tuple, rows))))

    result = lowered(ONE, ["split", latest_weights, "transfers,reorder"])
    assert str(result.schedule.ranks[1][-1]) == "1W3"
    verify(result)


def test_the_pass_that_breaks_the_table_is_named():
    def forgetful(plan: LoweredPlan) -> LoweredPlan:
        return plan.with_ranks((plan.ranks[0][:-1], *plan.ranks[1:]))

    def swapped(plan: LoweredPlan) -> LoweredPlan:
        row = list(plan.ranks[0])
        at = next(i for i, x in enumerate(row) if not isinstance(x, Run))
        row[at - 1], row[at] = row[at], row[at - 1]
        return plan.with_ranks((tuple(row), *plan.ranks[1:]))

    class Lost:
        def __call__(self, plan):
            return None

    with pytest.raises(PlanError, match=r"pass 3 \(forgetful\) broke the table: it changed which"):
        lowered(ONE, ["transfers,reorder", forgetful])
    with pytest.raises(ScheduleError, match=r"pass 3 \(swapped\) broke .*0SEND_F0.*in a cycle: "):
        lowered(ONE, ["transfers,reorder", swapped])
    with pytest.raises(TypeError, match=r"pass 1 \(Lost\) returned NoneType, expected Plan"):
        lowered(ONE, [Lost(), "transfers,reorder"])
    with pytest.raises(TypeError, match="7 is no pass"):
        lowered(ONE, ["transfers", 7])


def test_a_table_with_transfers_is_lowered_as_it_is_written():
    text = (
        "0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1\n"
        "1RECV_F0 1RECV_F1 1F0 1B0 1SEND_B0 1F1 1B1 1SEND_B1"
    )
    plan = lowered(Schedule.parse(text))
    assert "\n".join(plan.lines) == text.replace("1F0 1B0", "1F0+1B0").replace("1F1 1B1", "1F1+1B1")
    with pytest.raises(ScheduleError, match="deadlocks under blocking rendezvous"):
        lowered(lower_naively(ONE.schedule))
    again = lowered(lower_naively(ONE.schedule), "transfers,reorder")
    assert again == lowered(ONE, "transfers,reorder")
