"""A rehearsed step times every action, waits for nobody, and changes nothing."""

from dataclasses import replace

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from octojax.api.rehearsal import by_kind
from octojax.errors import PlanError
from octojax.ir import Kind, Machine, Partition
from octojax.simulate import simulate
from tests.pipelines import chain

MICROBATCHES = 4


def trained(schedule: str, last: str = "w0", **options):
    """With w0 tied, gradient sums travel too."""
    return chain(schedule, ("w0", "w1", "w2", "w3", last), MICROBATCHES, **options)


@pytest.mark.parametrize(
    "options",
    [
        {"schedule": "1f1b"},
        {"schedule": "zb-h1", "transport": "ppermute"},
        {"schedule": "interleaved", "chunks": 2, "recompute": True},
        {"schedule": "dualpipe-v"},
        {"schedule": "chimera"},
    ],
    ids=lambda o: o["schedule"],
)
def test_every_action_is_timed_and_nothing_changes(options):
    step, batch = trained(**options)
    plain, _ = step(step.init(), batch)
    state = step.init()
    found = step.rehearse(state, batch, rounds=2, machine=Machine())
    actions = {(rank, a) for rank, _, a in step.plan.schedule.actions()}
    assert [set(times) for times in found.rounds] == [actions, actions]
    assert all(seconds > 0 for times in found.rounds for seconds in times.values())
    rehearsed, _ = step(state, batch)
    jax.tree.map(np.testing.assert_array_equal, step.params(plain), step.params(rehearsed))
    for times, timeline in zip(found.rounds, found.timelines, strict=True):
        busy = [sum(s for (r, _), s in times.items() if r == rank) for rank in (0, 1)]
        assert [r.busy_s for r in timeline.ranks] == pytest.approx(busy)
        assert timeline.makespan_s >= max(busy) * (1 - 1e-12)
    assert found.timeline.makespan_s == max(t.makespan_s for t in found.timelines)  # of two


def test_the_profile_is_of_the_plans_stages():
    step, batch = trained("zb-h1", last="w4")
    found = step.rehearse(step.init(), batch, rounds=3, machine=Machine(latency_s=0.5))
    profile = found.profile
    assert profile.of_partition == step.plan.partition.sizes
    assert profile.machine == Machine(latency_s=0.5)
    assert (profile.ranks, profile.microbatches) == (2, MICROBATCHES)
    shown = [r.peak_bytes for r in simulate(step.plan, profile).ranks]
    _, _, measured = step(step.init(), batch, record=True)
    assert shown == pytest.approx([r.peak_bytes for r in measured.ranks], rel=0.2)
    with pytest.raises(PlanError):
        simulate(replace(step.plan, partition=Partition((1, 4))), profile)


def test_bad_rounds_and_states_are_refused():
    step, batch = trained("1f1b")
    with pytest.raises(ValueError, match="rounds = 0, expected at least 1"):
        step.rehearse(step.init(), batch, rounds=0)
    with pytest.raises(TypeError, match="expected the TrainState"):
        step.rehearse(None, batch)
    state = step.init()
    step(state, batch)
    with pytest.raises(ValueError, match="given to an earlier step"):
        step.rehearse(state, batch)


@pytest.fixture(scope="module")
def stage():
    """The first of two stages, with all its programs."""
    return trained("1f1b")[0].loss.stages[0][0]


SECONDS = st.floats(1e-6, 10.0)


@given(forward=SECONDS, rest=SECONDS, weight=SECONDS, split=st.booleans(), again=st.booleans())
def test_a_stage_costs_what_its_actions_took(stage, forward, rest, weight, split, again):
    seconds = {Kind.FORWARD: forward, Kind.BACKWARD: rest}
    if split:
        seconds = {Kind.FORWARD: forward, Kind.INPUT_GRAD: rest, Kind.WEIGHT_GRAD: weight}
    own = by_kind(stage, seconds, again)
    assert own["F"] == forward
    assert own["B"] == pytest.approx(own["I"] + own["W"])
    assert min(own.values()) >= 0
    if again and rest >= forward:  # the simulator adds a forward to B or I
        assert own["I" if split else "B"] + forward == pytest.approx(rest)
    if not again:
        assert own["I" if split else "B"] == rest
    if split:
        assert own["W"] == weight
    elif own["B"] > 0:
        assert own["I"] > 0
        assert own["W"] > 0


def test_a_weight_gradient_without_an_input_gradient_is_kept(stage):
    """The I of a first stage may have nothing to compute; then no program of it is timed."""
    own = by_kind(stage, {Kind.FORWARD: 2.0, Kind.WEIGHT_GRAD: 3.0}, False)
    assert own == {"F": 2.0, "B": 3.0, "I": 0.0, "W": 3.0}


def test_an_explicit_recompute_is_in_the_sum(stage):
    seconds = {Kind.FORWARD: 2.0, Kind.RECOMPUTE: 1.5, Kind.BACKWARD: 4.0}
    own = by_kind(stage, seconds, True)
    assert own["F"] + own["B"] == 1.5 + 4.0  # the simulator's R and B
