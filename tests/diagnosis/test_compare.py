"""`compare`: what is printed is what the simulator says of each."""

from dataclasses import replace

import pytest

import octojax
from octojax.diagnosis import compare
from octojax.errors import PlanError
from octojax.ir import LayerCost, Machine, Profile, uniform_partition
from octojax.ir import Plan as PlanRecord
from octojax.schedules import generate
from octojax.simulate import simulate

PROFILE = Profile(
    "eight",
    (LayerCost("x", 1e-3, 1e-3, 1e-3, residual_bytes=100, output_bytes=8),) * 8,
    Machine(latency_s=1e-4, capacity_bytes=700),
)


def plan(name: str, count: int = 8) -> PlanRecord:
    table = generate(name, 4, count)
    cut = uniform_partition(PROFILE.kinds, table.num_stages)
    return PlanRecord(cut, table.placement, table, name=name)


def test_entries_are_the_simulators_figures():
    plans = {name: plan(name) for name in ("1f1b", "zb-v", "gpipe")}
    found = compare(plans, PROFILE)
    first = simulate(plans["1f1b"], PROFILE).makespan_s
    for entry in found.entries:
        timeline = simulate(plans[entry.name], PROFILE)
        assert entry.timeline == timeline
        assert entry.speedup == pytest.approx(first / timeline.makespan_s)
        assert entry.fits == all(r.peak_bytes <= 700 for r in timeline.ranks)
        assert entry.gap >= 0
        lost = (
            entry.imbalance_s
            + entry.fill_drain_s
            + entry.computation_wait_s
            + entry.transfer_wait_s
        )
        mean = sum(r.busy_s for r in timeline.ranks) / 4
        assert lost + mean == pytest.approx(timeline.makespan_s)
    assert [e.fits for e in found.entries] == [False, False, False]
    assert "too much" in str(found)


def test_other_numbers_of_microbatches_are_compared_by_rate():
    found = compare({"a": plan("1f1b", 8), "b": plan("1f1b", 16)}, PROFILE)
    a, b = (simulate(plan("1f1b", m), PROFILE).makespan_s for m in (8, 16))
    assert found.entries[1].speedup == pytest.approx(2 * a / b)
    assert "4 ranks, 8 microbatches; 4 ranks, 16 microbatches" in str(found)


def test_without_a_profile_all_do_the_same_work():
    """zb-v has two stages a rank, of half a unit each: 3 m + (p - 1) / 2."""
    found = compare({"1f1b": generate("1f1b", 4, 8), "zb-v": generate("zb-v", 4, 8)})
    assert [e.timeline.makespan_s for e in found.entries] == [33, 25.5]
    assert {e.timeline.unit for e in found.entries} == {"units"}
    assert "in units" in str(found)


def test_a_notebook_shows_the_picture_and_a_prompt_a_line():
    found = compare({"<b>": plan("1f1b"), "zb-v": plan("zb-v")}, PROFILE)
    assert found._repr_html_().startswith("<svg")
    assert "<b>" not in found._repr_html_()
    assert "'zb-v' is quickest" in repr(found)
    assert [p.title for p in found.panels()] == [
        "<b>, simulated with profile eight",
        "zb-v, simulated with profile eight",
    ]


def test_what_cannot_be_compared_is_refused():
    with pytest.raises(ValueError, match="nothing to compare"):
        compare({}, PROFILE)
    with pytest.raises(PlanError, match="8 layers, the profile 7"):
        compare({"a": plan("1f1b")}, replace(PROFILE, layers=PROFILE.layers[:7]))
    assert octojax.compare is compare
