"""The timeline of a recorded step has every action of its plan."""

from octojax.executor.record import measured
from octojax.executor.stragglers import stragglers
from octojax.ir import ActionSpan, Schedule, parse_item


def test_an_action_with_nothing_to_compute_takes_no_time():
    """W of a stage without parameters runs no program; the simulated step has it nevertheless."""
    schedule = Schedule.parse("0F0 0I0 0W0\n1F0 1I0 1W0")
    times = [(0, "0F0", 5, 6), (0, "0I0", 9, 11), (1, "1F0", 6, 7), (1, "1I0", 7, 8)]
    ran = [ActionSpan(r, parse_item(name), a, b) for r, name, a, b in times]
    ran.append(ActionSpan(1, parse_item("1W0"), 8.0, 8.5))
    timeline = measured(schedule, ran, (), {}, ())
    spans = {str(a.item): (a.start_s, a.end_s) for a in timeline.actions}
    assert spans["0W0"] == (6, 6)
    assert set(spans) == {"0F0", "0I0", "0W0", "1F0", "1I0", "1W0"}
    assert stragglers(timeline, timeline) == ()
