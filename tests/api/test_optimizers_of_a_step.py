"""Optimizers that look at the loss, or at all gradients, inside a pipelined step."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest

import octojax as octopipe
from octojax.api.opt_state import with_hyperparams
from tests.pipelines import FAST, case_of, compiled, pipe

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


def of_path(params: Any) -> Any:
    return jax.tree_util.tree_map_with_path(
        lambda path, _: "matrices" if "w" in jax.tree_util.keystr(path[-1:]) else "rest", params
    )


def over_layers(params: Any) -> Any:
    numbers = optax.contrib.MuonDimensionNumbers(0, 2)
    return jax.tree.map(lambda x: numbers if x.ndim == 3 else None, params)


STACKED = {
    "muon": lambda: optax.contrib.muon(1e-2),
    "muon-over-layers": lambda: optax.contrib.muon(1e-2, muon_weight_dimension_numbers=over_layers),
    "decay-of-matrices": lambda: optax.adamw(
        1e-2, weight_decay=1.0, mask=lambda p: jax.tree.map(lambda x: x.ndim > 1, p)
    ),
    "labels-by-path": lambda: optax.multi_transform(
        {"matrices": optax.adafactor(1e-2, min_dim_size_to_factor=8), "rest": optax.sgd(0.1)},
        of_path,
    ),
}


@pytest.fixture(scope="module")
def stacked() -> Any:
    """A scanned stack over two ranks, its loss, and a batch."""
    keys = jax.random.split(jax.random.key(0), 2)
    params = {"w": jax.random.normal(keys[0], (4, 18, 18)) / 4, "scale": jnp.ones((4, 18))}
    batch = jax.random.normal(keys[1], (8, 18))

    def loss(params: Any, batch: Any) -> Any:
        def layer(h: Any, p: Any) -> Any:
            return h + jnp.tanh((h * p["scale"][None]) @ p["w"]), None

        return jnp.mean((jax.lax.scan(layer, batch, params)[0] - 1) ** 2)

    step = octopipe.compile(
        params, loss, optax.sgd(0.1), batch, mesh=pipe(2), microbatches=2, progress=False,
        compiler_options=FAST,
    )  # fmt: skip
    return step.loss, loss, params, batch


@pytest.mark.parametrize("name", STACKED)
def test_rules_about_stacked_leaves_see_the_users_leaves(name: str, stacked: Any) -> None:
    compiled_loss, loss, params, batch = stacked
    optimizer = STACKED[name]()
    step = octopipe.TrainStep(compiled_loss, optimizer)
    state, plain, opt_state = step.init(), params, optimizer.init(params)
    for _ in range(2):
        updates, opt_state = optimizer.update(jax.grad(loss)(plain, batch), opt_state, plain)
        plain = optax.apply_updates(plain, updates)
        state, _ = step(state, batch)
    for got, want in ((step.params(state), plain), (step.opt_state(state), opt_state)):
        assert jax.tree.structure(got) == jax.tree.structure(want)
        for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
            scale = float(jnp.max(jnp.abs(b)))
            np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5 * scale)


def test_the_optimizer_state_is_changed_through_the_users_tree(stacked: Any) -> None:
    compiled_loss, loss, _, batch = stacked
    optimizer = optax.chain(
        optax.clip_by_global_norm(0.1), optax.inject_hyperparams(optax.adam)(learning_rate=1e-2)
    )
    step = octopipe.TrainStep(compiled_loss, optimizer)
    state, _ = step(step.init(), batch)
    plain, opt_state = step.params(state), step.opt_state(state)
    state = step.with_hyperparams(state, learning_rate=0.5)
    tree = step.opt_state(state)
    adam = tree[1].inner_state[0]
    moments = {**adam.mu, "w": adam.mu["w"].at[1].set(0.0)}
    inner = (adam._replace(mu=moments), *tree[1].inner_state[1:])
    tree = (tree[0], tree[1]._replace(inner_state=inner))
    state = step.with_opt_state(state, tree)

    opt_state[1].hyperparams["learning_rate"] = jnp.float32(0.5)
    old = opt_state[1].inner_state[0]
    old.mu["w"] = old.mu["w"].at[1].set(0.0)
    updates, _ = optimizer.update(jax.grad(loss)(plain, batch), opt_state, plain)
    wanted = optax.apply_updates(plain, updates)
    state, _ = step(state, batch)
    for a, b in zip(jax.tree.leaves(step.params(state)), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)

    with pytest.raises(ValueError, match="no hyperparameter momentum: it has b1, b2"):
        step.with_hyperparams(state, momentum=1.0)
    short_of = adam._replace(mu={**moments, "w": adam.mu["w"][:1]})
    short = (tree[0], tree[1]._replace(inner_state=(short_of, *inner[1:])))
    with pytest.raises(ValueError, match=r"mu\['w'\]: float32\[1, 18, 18\] instead of"):
        step.with_opt_state(state, short)


def test_hyperparameters_that_are_not_there_or_not_free_are_refused(stacked: Any) -> None:
    with pytest.raises(ValueError, match="no hyperparameter lr: it has none"):
        with_hyperparams(optax.sgd(0.1).init(stacked[2]), {"lr": 1.0})
    optimizer = optax.inject_hyperparams(optax.sgd)(learning_rate=optax.linear_schedule(1, 0, 9))
    with pytest.raises(ValueError, match="a schedule sets learning_rate anew"):
        with_hyperparams(optimizer.init(stacked[2]), {"learning_rate": 1.0})
