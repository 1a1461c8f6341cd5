"""What a plan says of the profile it was made for."""

import json
from dataclasses import replace

import pytest

from octojax.errors import FormatError
from octojax.ir import (
    LayerCost,
    Machine,
    Partition,
    Placement,
    Plan,
    Prediction,
    Profile,
    Schedule,
)
from octojax.passes import SplitBackward

PROFILE = Profile("p", (LayerCost("x", 1.0, 1.0, 1.0, param_bytes=8),) * 2, Machine(latency_s=1.0))
PLAN = Plan(
    Partition((1, 1)),
    Placement.sequential(2),
    Schedule.parse("0F0 0B0\n1F0 1B0"),
    prediction=Prediction("p", PROFILE.fingerprint, 8.0, 6.0),
)


def cost(**change) -> Profile:
    return replace(PROFILE, layers=(replace(PROFILE.layers[0], **change), PROFILE.layers[1]))


@pytest.mark.parametrize(
    ("other", "differences"),
    [
        (replace(PROFILE, name="other", ranks=2, microbatches=4, extra=(("a", 1),)), ()),
        (cost(forward_s=1), ()),
        (cost(backward_s=2.0), ()),  # what None stands for
        (PROFILE.on(replace(PROFILE.machine, name="b", capacity_bytes=1.0)), ()),
        (cost(forward_s=2.0), ("layer costs",)),
        (cost(backward_s=3.0), ("layer costs",)),
        (cost(residual_bytes=1), ("layer costs",)),
        (cost(kind="y"), ("model", "layer costs")),
        (cost(param_bytes=9), ("model", "layer costs")),
        (replace(PROFILE, layers=PROFILE.layers[:1]), ("model", "layer costs")),
        (PROFILE.on(Machine(latency_s=2.0)), ("machine",)),
        (PROFILE.on(Machine(latency_s=1.0, speeds=(1.0, 2.0))), ("machine",)),
        (replace(PROFILE, extra=(("stages_of", [3, 4]),)), ()),
    ],
)
def test_differences(other, differences):
    assert PLAN.prediction.differences(other) == differences


def test_a_fingerprint_survives_the_file(tmp_path):
    PROFILE.save(tmp_path / "p.json")
    assert Profile.load(tmp_path / "p.json").fingerprint == PROFILE.fingerprint


def test_a_plan_keeps_it_in_its_file_and_is_equal_without(tmp_path):
    PLAN.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json").prediction == PLAN.prediction
    bare = replace(PLAN, prediction=None)
    assert bare == PLAN
    assert Plan.from_json(bare.to_json()).prediction is None
    assert "prediction" not in bare.to_json()


def test_another_order_of_work_is_not_predicted():
    assert PLAN.with_schedule(PLAN.schedule).prediction == PLAN.prediction
    split = SplitBackward()(PLAN)
    assert split.schedule != PLAN.schedule
    assert split.prediction is None


@pytest.mark.parametrize(
    "change",
    [
        {"profile": 1},
        {"fingerprint": None},
        {"fingerprint": "ab.cd"},
        {"makespan_s": "8"},
        {"makespan_s": -1.0},
        {"makespan_s": True},
        {"lower_bound_s": float("nan")},
        {"more": 1},
    ],
)
def test_broken_ones_are_refused_by_name(change):
    data = json.loads(json.dumps(PLAN.to_json()))
    data["prediction"].update(change)
    with pytest.raises(FormatError, match="x: 'prediction' must be an object of 'profile'"):
        Plan.from_json(data, "x")
