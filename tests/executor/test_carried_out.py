"""The lowered plan is the program: what ranks do is that table, instruction for instruction."""

from dataclasses import replace
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import octojax as octopipe
from octojax.errors import PlanError
from octojax.executor.lower import Lowered, lower
from octojax.executor.recorded import Recorder, executed
from octojax.executor.run import RankThreads, Walk, bind
from octojax.executor.stop import Stop
from octojax.executor.wiring import wiring_of
from octojax.ir import Action, Kind, LoweredPlan, Plan, Schedule, Wiring
from octojax.ir.exchange import after_gradients
from octojax.passes import lowered
from octojax.programs.recipe import Layout
from octojax.schedules import generate
from octojax.stages.fingerprint import fingerprint
from tests.executor.test_instructions import stages_of
from tests.executor.test_run import Passing
from tests.pipelines import FAST, pipe
from tests.simulate.random_tables import tables

GOLDENS = Path(__file__).parents[1] / "goldens"
RECEIVE_EARLY = [
    "torch_Interleaved1F1B_p2_m2_v2",
    "torch_Interleaved1F1B_p4_m8_v2",
    "torch_ZBVZeroBubble_p4_m8_v2",
    "torch_DualPipeV_p4_m8_v2",
    "torch_LoopedBFS_p4_m8_v2",
]
"""Tables as PyTorch lowers them, receives long before their use (pytorch/pytorch#172668)."""


def in_step(plan: LoweredPlan) -> list[list]:
    """The rows until the gradients are there."""
    return [[x for x in row if not after_gradients(x)] for row in plan.ranks]


def chain_step(table, **options):
    """The compiled step of as many layers as `table` has stages, and a batch."""
    stages, microbatches = table.num_stages, table.num_microbatches
    keys = jax.random.split(jax.random.key(0), stages)
    params = {f"w{i:02d}": jax.random.normal(k, (4, 4)) / 2 for i, k in enumerate(keys)}
    batch = jnp.linspace(-1, 1, 2 * microbatches * 4).reshape(-1, 4)

    def loss(params, batch):
        for name in sorted(params):
            batch = jnp.tanh(batch @ params[name])
        return jnp.mean(batch**2)

    step = octopipe.compile(
        params,
        loss,
        optax.sgd(0.1),
        batch,
        mesh=pipe(table.num_ranks),
        microbatches=microbatches,
        schedule=table,
        progress=False,
        compiler_options=FAST,
        **options,
    )
    return step, batch


def check_step(step, batch):
    """Gradients are those of the plain model, and what was recorded is the lowered plan."""
    state = step.init()
    value, _, grads = step.value_and_grad(state, batch)
    plain = step.reference(state, batch)
    np.testing.assert_allclose(value, plain[0], rtol=1e-5)
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6), grads, plain[1])
    recorder = Recorder()
    step.loss.calls.run(lambda: step._step(state, batch, recorder), "a recorded step")
    for rank, row in enumerate(step.lowered.ranks):
        assert executed(recorder, step.loss.lowered, rank) == row


@pytest.mark.parametrize("name", RECEIVE_EARLY)
def test_tables_that_receive_early_run_as_they_are_written(name):
    table = Schedule.load(GOLDENS / f"{name}.comms.csv")
    step, batch = chain_step(table)
    idle = step.lowered.wiring.idle  # the first stage has no input gradient to make
    written = [
        [str(x) for x in row if not isinstance(x, Action) or _busy(x, idle)] for row in table.ranks
    ]
    lines = step.lowered.without_update().lines
    assert [line.replace("+", " ").split() for line in lines] == written
    check_step(step, batch)


def test_the_file_of_a_steps_plan_is_lowered_as_the_step_was(tmp_path):
    """The first and the last stage read one weight, which a bare plan could not know."""

    def loss(params, batch):
        h = jnp.tanh(jnp.tanh(batch @ params["tied"]) @ params["middle"])
        return jnp.mean((h @ params["tied"].T) ** 2)

    step = octopipe.compile(
        {"tied": jnp.eye(4), "middle": jnp.eye(4)},
        loss,
        optax.sgd(0.1),
        jnp.ones((6, 4)),
        mesh=pipe(3),
        microbatches=3,
        schedule="zb-h1",
        progress=False,
        compiler_options=FAST,
    )
    step.plan.save(tmp_path / "plan.json")
    plan = Plan.load(tmp_path / "plan.json")
    assert plan == step.plan
    again = lowered(plan)
    assert again.wiring == step.lowered.wiring != Wiring.chain(3)
    for row, line in zip(step.lowered.lines, again.lines, strict=True):
        cells = [x for x in row.split() if "UPDATE" not in x and "_U(" not in x]
        assert sorted(cells) == sorted(line.split())
    with pytest.raises(PlanError, match="the wiring is that of 2 stages, the partition has 3"):
        replace(plan, wiring=Wiring.chain(2))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "ranks", "microbatches", "chunks"),
    [
        ("interleaved", 2, 4, 2),
        ("interleaved", 4, 8, 2),
        ("zb-v", 4, 8, 2),
        ("dualpipe-v", 4, 10, 2),
        ("looped-bfs", 4, 8, 2),
    ],
)
def test_tables_that_hang_by_the_naive_rule_run_as_they_are_lowered(
    name, ranks, microbatches, chunks
):
    check_step(*chain_step(generate(name, ranks, microbatches, chunks)))


def _busy(action: Action, idle) -> bool:
    computes = action.kind.computes and (action.stage, action.kind) not in idle
    return action.kind.transfers or computes


def test_passes_may_be_chosen():
    def weights_last(plan):
        rows = [
            sorted(row, key=lambda a: a.kind is Kind.WEIGHT_GRAD) for row in plan.schedule.ranks
        ]
        return plan.with_schedule(Schedule(tuple(map(tuple, rows))))

    table = generate("1f1b", 2, 3)
    step, batch = chain_step(
        table, passes=["split", weights_last, "transfers,reorder(mode=blocking),join"]
    )
    assert step.plan.schedule.ranks[1][-1].kind is Kind.WEIGHT_GRAD
    assert "0W2" in str(step.lowered)
    check_step(step, batch)
    bare, _ = chain_step(table)
    assert bare.lowered.lines[1].count("1F0+1B0") == 1


def test_the_table_says_what_is_recomputed():
    table = Schedule.parse("0F0 0F1 0R0 0B0 0R1 0B1\n1F0 1B0 1F1 1B1")
    step, batch = chain_step(table)
    assert step.plan.recomputes == (True, False)
    check_step(step, batch)
    with pytest.raises(PlanError, match=r"rebuilds residuals of stage 0 \(0R0 and 1 more\)"):
        chain_step(table, recompute=False)


@pytest.mark.parametrize(
    ("passes", "error", "message"),
    [
        ("transfers,reodrer", ValueError, "did you mean 'reorder'"),
        ("transfers", ValueError, "needs reorder after transfers"),
        (3, TypeError, "passes=3: expected text such as"),
    ],
)
def test_passes_that_cannot_work_are_refused_before_anything_is_compiled(passes, error, message):
    with pytest.raises(error, match=message):
        chain_step(generate("1f1b", 2, 2), passes=passes)


TABLES = tables(max_ranks=3, max_stages=4, max_microbatches=3, pairs=False).filter(
    lambda s: s.num_stages in (2, 4)
)
PASSES = st.sampled_from(
    [None, "transfers,reorder,ownership", "transfers,reorder(mode=blocking),join,ownership"]
)


@settings(deadline=None, max_examples=40)
@given(TABLES, PASSES)
def test_random_tables_are_carried_out(schedule, passes):
    check_random(schedule, passes)


@pytest.mark.slow
@settings(deadline=None, max_examples=200)
@given(TABLES, PASSES)
def test_two_hundred_random_tables_are_carried_out(schedule, passes):
    check_random(schedule, passes)


def check_random(schedule, passes):
    """By the executor's own threads and loop, with functions that make nothing."""
    stages, units, leaves = stages_of("toy", schedule.num_stages)
    plan = lowered(schedule, passes, wiring=wiring_of([stages], units))
    every = [stages] * schedule.num_microbatches
    found = lower(plan, every, fingerprint, [Layout.ROWS] * leaves)
    assert list(map(list, run_through(found))) == in_step(plan)


def _zeros(count: int, *_) -> tuple[int, ...]:
    return (0,) * count


def run_through(found: Lowered) -> list[tuple]:
    """What each rank did, run with stand-ins for its programs."""
    step, recorder, stop = found.step, Recorder(), Stop()
    programs = [partial(_zeros, len(recipe.outputs)) for _, recipe in step.recipes]
    transport = Passing(step.transfers)
    walks = [Walk(r, bind(r, programs, transport), stop) for r in step.ranks]
    threads = RankThreads([r.rank for r in step.ranks], 30.0)
    works = [
        partial(recorder.timed(r.rank), walk, [0] * r.num_slots)
        for r, walk in zip(step.ranks, walks, strict=True)
    ]
    try:
        threads.run(works, stop, walks)
    finally:
        threads.close()
    return [executed(recorder, found, r.rank) for r in step.ranks]
