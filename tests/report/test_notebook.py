"""What a prompt shows of a record in one line, and a notebook as a picture."""

import xml.etree.ElementTree as ET
from dataclasses import replace

import pytest

from octojax.ir import (
    LayerCost,
    LoweredPlan,
    Machine,
    Partition,
    Placement,
    Plan,
    Prediction,
    Profile,
    Schedule,
)
from octojax.passes import lowered
from octojax.report import notebook
from octojax.schedules import generate
from octojax.simulate import StageCosts, simulate

TABLE = generate("1f1b", 4, 200)
TIMELINE = simulate(TABLE, StageCosts.unit(4, 1, 1, 1, 2), Machine())
PROFILE = Profile("deep", (LayerCost("x", 1e-3, 1e-3, 1e-3), LayerCost("y", 1e-3, 0, 0)) * 300)
PLAN = Plan(
    Partition((150,) * 4),
    TABLE.placement,
    TABLE,
    name="mine",
    prediction=Prediction("deep", PROFILE.fingerprint, 0.5, 0.4),
)


@pytest.mark.parametrize(
    ("record", "words"),
    [
        (
            TABLE,
            "4 ranks, 4 stages, 200 microbatches, 1,600 actions: 0F0 0F1 0F2 0F3 0B0",
        ),
        (PLAN, "Plan 'mine': 4 ranks, 4 stages of 150 150 150 150 layers on ranks"),
        (PLAN, "500 ms under profile 'deep'"),
        (TIMELINE, "Timeline: 4 ranks, 609 s, bubbles 1.5%, 1,600 actions, 1,200 transfers"),
        (replace(TIMELINE, unit="units"), "609 units"),
        (PROFILE, "Profile 'deep': 600 layers (300 x, 300 y), 1.2 s a microbatch, machine"),
        (lowered(TABLE), "LoweredPlan: 4 ranks, 4 stages"),
        (Schedule(()), "Schedule: 0 ranks"),
    ],
)
def test_one_line_says_what_it_is(record, words):
    assert words in repr(record)
    assert len(repr(record)) < 300
    assert "\n" not in repr(record)


def test_long_names_are_cut():
    plan = replace(PLAN, name="n" * 500)
    assert len(repr(plan)) < 300
    many = Profile("p", tuple(LayerCost(f"kind{i}", 1, 1, 1) for i in range(99)))
    assert len(repr(many)) < 200


@pytest.mark.parametrize("record", [TABLE, PLAN, TIMELINE, PROFILE], ids=lambda r: type(r).__name__)
def test_a_notebook_draws_it(record):
    picture = record._repr_html_()
    assert ET.fromstring(picture).tag.endswith("svg")
    assert len(picture) < 700_000


def test_units_and_predictions_are_named():
    assert "609 units" in TABLE._repr_html_()
    assert "under profile deep it takes 500 ms" in PLAN._repr_html_()


def test_a_profile_shows_every_layers_parts():
    small = Profile(
        "p", (LayerCost("x", 1.0, 2.0, 3.0), LayerCost("y", 1.0, 2.0, 3.0, backward_s=4))
    )
    picture = notebook.html(small)
    for action in ("0F0", "0I0", "0W0", "1F0", "1B0"):
        assert f'data-a="{action}"' in picture
    assert "11 s" in picture


@pytest.mark.parametrize("table", ["0F0 0F1 0B0", "-", ""])
def test_what_cannot_run_has_no_picture(table):
    assert Schedule.parse(table)._repr_html_() is None


def test_lowered_plans_have_one_line_alone():
    assert not hasattr(LoweredPlan, "_repr_html_")
    with pytest.raises(TypeError, match="no picture of a Placement"):
        notebook.html(Placement.sequential(2))
