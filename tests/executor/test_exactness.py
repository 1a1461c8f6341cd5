"""Loss and every gradient through a pipeline equal those of the unpipelined model.

A representative part; the whole grid is in `tests/test_grid.py`.
"""

import jax
import numpy as np
import optax
import pytest

from octojax.ir import LoweredPlan, Schedule
from tests.pipelines import FIG3, assert_exact, case_of, compiled, expected, pipe, relative_error

SCHEDULES = [
    ("gpipe", 2, 3, {}),
    ("1f1b", 4, 8, {}),
    ("1f1b", 4, 2, {}),  # fewer microbatches than ranks
    ("interleaved", 2, 4, {"chunks": 2}),
    ("zb-h1", 4, 8, {}),
    ("zb-v", 2, 4, {}),
    ("dualpipe", 2, 4, {}),
    ("chimera", 2, 2, {}),
    ("hanayo", 2, 2, {}),
]


@pytest.mark.parametrize(("name", "ranks", "microbatches", "options"), SCHEDULES)
def test_schedules(name, ranks, microbatches, options):
    assert_exact("unet", name, ranks, microbatches, **options)


MODELS = [
    ("tied-lm", "zb-h1", 2, 8),
    ("two-ties", "1f1b", 4, 2),
    ("moe", "zb-h1", 2, 3),
    ("masked", "zb-h1", 2, 3),
    ("dropout-key", "1f1b", 4, 3),
    ("nnx-tied", "1f1b", 2, 2),
    ("custom-rules", "zb-h1", 2, 2),
    ("parameterless", "zb-h1", 4, 2),
    ("scan", "zb-h1", 2, 3),
    ("checkpoint", "zb-h1", 2, 2),
    ("weight-twice", "zb-h1", 2, 2),
    ("nnx-scan", "1f1b", 2, 2),
]


@pytest.mark.parametrize(("model", "schedule", "ranks", "microbatches"), MODELS)
def test_models(model, schedule, ranks, microbatches):
    assert_exact(model, schedule, ranks, microbatches)


@pytest.mark.parametrize("transport", ["device_put", "ppermute"])
def test_a_hand_written_table_of_six_stages_on_two_ranks(transport):
    assert_exact("unet", FIG3, 2, 2, transport=transport)


def test_ppermute_between_ranks_that_exchange_in_both_directions():
    assert_exact("tied-lm", "dualpipe", 2, 4, transport="ppermute")


def test_recompute_of_some_stages():
    assert_exact("unet", "zb-h1", 2, 2, recompute=(True, False))


def test_an_explicit_recompute_action():
    table = Schedule.parse("0F0 0F1 0R0 0B0 0R1 0I1 0W1\n1F0 1R0 1B0 1F1 1B1")
    assert_exact("toy", table, 2, 2, recompute=(True, True))


def test_three_optimizer_steps_with_clipping_over_all_stages():
    optimizer = optax.chain(optax.clip_by_global_norm(0.05), optax.adamw(1e-2))
    case = case_of("tied-lm")
    batch = case.batch(8)
    step = compiled(case, "zb-h1", 2, 4, optimizer=optimizer)
    state = step.init()

    params = case.model
    opt_state = optimizer.init(params)
    update = jax.jit(optimizer.update)
    gradient = jax.jit(jax.grad(lambda p, b: case.loss_fn(p, b)[0]))
    for _ in range(3):
        state, metrics = step(state, batch)
        grads = gradient(params, batch)
        updates, opt_state = update(grads, opt_state, params)
        params = optax.apply_updates(params, updates)
    assert relative_error(metrics["grad_norm"], optax.tree.norm(grads)) < 1e-5
    # Adam divides by the root of the gradient's square: rounding is scaled up where it is small.
    assert relative_error(step.params(state), params) < 1e-5


def test_copies_of_a_tied_weight_and_of_replicated_stages_stay_bit_equal():
    step = compiled(case_of("tied-lm"), "dualpipe", 2, 4, optimizer=optax.adam(1e-2))
    state = step.init()
    for _ in range(3):
        state, _ = step(state, case_of("tied-lm").batch(8))
    transfers = [t for t in step.loss.lowered.step.transfers if t.kind == "P"]
    assert sum(len(t.parts) for t in transfers) > 2
    for transfer, copies in zip(transfers, state.model.copies, strict=True):
        for unit, copy in zip(transfer.parts, copies, strict=True):
            np.testing.assert_array_equal(copy, state.model.units[unit])


def test_a_gradient_that_is_not_finite_skips_the_update_on_every_rank():
    case = case_of("toy")
    optimizer = optax.apply_if_finite(optax.adam(1e-2), max_consecutive_errors=5)
    step = compiled(case, "1f1b", 4, 4, optimizer=optimizer)
    batch = case.batch(8)
    state, _ = step(step.init(), batch)
    before = jax.tree.map(np.asarray, step.params(state))
    bad = {**batch, "y": batch["y"].at[0, 0].set(np.nan)}
    state, _ = step(state, bad)
    after = jax.tree.map(np.asarray, step.params(state))
    jax.tree.map(np.testing.assert_array_equal, after, before)
    state, _ = step(state, batch)
    assert relative_error(step.params(state), before) > 0


def test_module_state_is_carried_in_microbatch_order():
    case = case_of("state")
    step = compiled(case, "1f1b", 2, 4)
    state = step.init()
    batch = case.batch(8)
    loss, _, grads = step.value_and_grad(state, batch)
    wanted = expected("state", 4)
    assert relative_error((loss, grads), wanted) < 1e-5
    state, _ = step(state, batch)
    from octojax.api.reference import reference

    pure = case.pure()
    found = reference(step.loss.whole, pure.params, pure.state, batch)
    assert relative_error(step.module_state(state), found[3]) < 1e-6


def test_evaluation_before_training_changes_nothing():
    case = case_of("toy")
    step = compiled(case, "zb-h1", 2, 3)
    state = step.init()
    batch = case.batch(8)
    first = step.evaluate(state, batch)
    assert relative_error(first["loss"], expected("toy", 3)[0]) < 1e-6
    _, metrics = step(state, batch)
    assert relative_error(metrics["loss"], first["loss"]) < 1e-6


def test_forwards_only_keeps_the_order_of_each_rank():
    forwards = LoweredPlan.of(FIG3).forwards_only().schedule
    assert str(forwards) == ("0F0 1F0 0F1 1F1 4F0 4F1\n2F0 3F0 2F1 3F1 5F0 5F1")


def test_a_rank_may_span_devices_of_a_data_axis():
    devices = np.array(jax.devices()[:4]).reshape(2, 2)
    mesh = jax.sharding.Mesh(devices, ("pipe", "data"))
    assert_exact("tied-lm", "zb-h1", 2, 2, mesh=mesh)
    assert_exact("unet", "1f1b", 2, 4, mesh=mesh, transport="ppermute")


def test_one_rank_runs_without_threads_or_transfers():
    step = compiled(case_of("toy"), "1f1b", 1, 8, mesh=pipe(1))
    assert step.report.transfers == 0
    # Forward and backward of a microbatch wait for nobody, so they are one program.
    assert step.report.instructions == (8,)
