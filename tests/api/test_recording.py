"""A recorded step computes what any step does, and says when each action of the plan ran."""

import itertools
from dataclasses import replace

import jax
import numpy as np
import pytest

from octojax.executor.stragglers import stragglers
from octojax.ir.lowering import transfers_of
from octojax.schedules import generate
from octojax.simulate import StageCosts, simulate
from tests.pipelines import chain

MICROBATCHES, WIDTH = 4, 16


def trained(schedule: str):
    return chain(schedule, ("w0", "w1", "w2", "w3"), MICROBATCHES, WIDTH)


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_the_timeline_holds_every_action_and_transfer_in_the_order_of_the_plan(schedule):
    step, batch = trained(schedule)
    _, _, timeline = step(step.init(), batch, record=True)
    for rank, row in enumerate(step.plan.schedule.ranks):
        own = [span for span in timeline.actions if span.rank == rank]
        assert [span.item for span in own] == list(row)
        assert all(a.end_s <= b.start_s + 1e-9 for a, b in itertools.pairwise(own))
    wanted = {(t.source, t.target, t.kind, t.stage, t.microbatch): 2 * 4 * WIDTH for t in
              transfers_of(step.plan.schedule)}  # fmt: skip
    found = {(t.source, t.target, t.kind, t.stage, t.microbatch): t.nbytes for t in
             timeline.transfers}  # fmt: skip
    assert found == wanted
    done = {(s.item.kind, s.item.stage, s.item.microbatch): s for s in timeline.actions}
    for t in timeline.transfers:
        kinds = "F" if t.kind == "F" else "BI"
        maker = next(
            done[k, t.stage, t.microbatch] for k in kinds if (k, t.stage, t.microbatch) in done
        )
        assert maker.end_s <= t.end_s
    assert min(s.start_s for s in timeline.actions) == 0
    assert timeline.makespan_s == max(s.end_s for s in timeline.actions)


def test_recording_changes_no_number():
    step, batch = trained("zb-h1")
    plain, metrics = step(step.init(), batch)
    recorded, same, _ = step(step.init(), batch, record=True)
    assert float(metrics["loss"]) == float(same["loss"])
    jax.tree.map(np.testing.assert_array_equal, step.params(plain), step.params(recorded))


def test_peak_bytes_are_weights_sums_optimizer_and_what_microbatches_hold():
    step, batch = trained("1f1b")
    _, _, timeline = step(step.init(), batch, record=True)
    weights = 2 * WIDTH * WIDTH * 4  # two layers a rank
    for rank, trace in zip(timeline.ranks, timeline.memory, strict=True):
        assert rank.peak_bytes == max(size for _, size in trace)
        assert rank.peak_bytes > 4 * weights  # weights, sums, two moments
        assert trace[-1][1] < rank.peak_bytes
        assert [t for t, _ in trace] == sorted(t for t, _ in trace)
    assert timeline.memory[0][-1][1] >= 4 * weights


def test_a_rank_slower_than_its_profile_is_named():
    costs = StageCosts.unit(4)
    expected = simulate(generate("zb-h1", 4, 8), costs)
    slow = [2.0 if s.rank == 2 else 1.1 for s in expected.actions]
    measured = replace(
        expected,
        actions=tuple(
            replace(s, start_s=2 * s.start_s, end_s=2 * s.start_s + f * (s.end_s - s.start_s))
            for s, f in zip(expected.actions, slow, strict=True)
        ),
    )
    found = stragglers(measured, expected)
    assert [s.rank for s in found] == [2]
    assert found[0].factor == pytest.approx(2.0)
    assert "rank 2" in str(found[0])
    assert {s.rank for s in stragglers(measured, expected, factor=1.05)} == {0, 1, 2, 3}
    assert stragglers(measured, expected, factor=2.5) == ()
