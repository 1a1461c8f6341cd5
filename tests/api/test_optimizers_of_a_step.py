"""Optimizers that look at the loss, or at all gradients, inside a pipelined step."""

import jax
import numpy as np
import optax
import optax.contrib
import pytest

from tests.pipelines import case_of, compiled

OPTIMIZERS = {
    "plateau": lambda: optax.chain(
        optax.adam(1e-2), optax.contrib.reduce_on_plateau(factor=0.5, patience=0, rtol=0.9)
    ),
    "finite": lambda: optax.apply_if_finite(
        optax.chain(optax.clip_by_global_norm(0.1), optax.adamw(1e-2)), 3
    ),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_three_steps_equal_the_unpipelined_ones(name: str) -> None:
    case = case_of("tied-lm")
    optimizer = optax.with_extra_args_support(OPTIMIZERS[name]())
    step = compiled(case, "1f1b", 2, 4, optimizer=optimizer)
    state, batch = step.init(), case.batch(8)
    params = step.params(state)
    plain = optimizer.init(params)
    value_and_grad = jax.jit(jax.value_and_grad(lambda p: case.pure().fn(p, None, batch)[0]))
    for _ in range(3):
        value, grads = value_and_grad(params)
        updates, plain = optimizer.update(grads, plain, params, value=value)
        params = optax.apply_updates(params, updates)
        state, metrics = step(state, batch)
        np.testing.assert_allclose(metrics["loss"], value, rtol=1e-5)
    for got, want in zip(jax.tree.leaves(step.params(state)), jax.tree.leaves(params), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-6)


def test_a_non_finite_loss_leaves_parameters_bit_identical() -> None:
    case = case_of("toy")
    step = compiled(case, "zb-h1", 2, 4, optimizer=OPTIMIZERS["finite"]())
    batch = case.batch(8)
    state, _ = step(step.init(), batch)
    before = [np.asarray(x).tobytes() for x in jax.tree.leaves(step.params(state))]
    bad = jax.tree.map(lambda x: x.at[5].set(np.nan), batch)
    state, metrics = step(state, bad)
    assert not np.isfinite(metrics["grad_norm"])
    assert [np.asarray(x).tobytes() for x in jax.tree.leaves(step.params(state))] == before
