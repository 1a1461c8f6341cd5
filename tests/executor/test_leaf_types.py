"""Leaves of 8, 4 and 2 bits, and values that a checkpoint policy moves to the host."""

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.ad_checkpoint import checkpoint_name

import octojax as octopipe
from tests.pipelines import FAST, pipe

TYPES = ("float8_e4m3fn", "float8_e5m2", "int4", "uint2", "float4_e2m1fn")
LAYERS = 2


def _params() -> dict[str, jax.Array]:
    keys = jax.random.split(jax.random.key(0), LAYERS)
    return {f"w{i}": jax.random.normal(k, (4, 4)) for i, k in enumerate(keys)}


def _compiled(params: Any, loss: Any, batch: Any, **options: Any) -> octopipe.TrainStep:
    options = {"microbatches": 2, "mesh": pipe(2), **options}
    return octopipe.compile(
        params, loss, optax.sgd(0.1), batch, progress=False, compiler_options=FAST, **options
    )


def _assert_same(found: Any, expected: Any, atol: float = 1e-6) -> None:
    def close(a: jax.Array, b: jax.Array) -> None:
        assert a.dtype == b.dtype
        np.testing.assert_allclose(np.float32(a), np.float32(b), rtol=1e-5, atol=atol)

    jax.tree.map(close, found, expected)


@pytest.mark.parametrize("name", TYPES)
def test_narrow_leaves_are_exact_wherever_they_stand(name, tmp_path):
    """In the batch with rows and without, in state, as a constant, across stages, in aux."""
    dtype = jnp.dtype(name)
    small = lambda *shape: jnp.asarray(np.arange(np.prod(shape)).reshape(shape) % 3, dtype)  # noqa: E731
    constant, frozen = small(4, 4), {"scale": small(1, 4)}
    batch = {
        "x": jax.random.normal(jax.random.key(1), (4, 4)),
        "rows": small(4, 4),
        "table": small(1, 4),
        "one": jnp.ones((), dtype),
    }

    def loss(params: Any, state: Any, batch: Any) -> tuple[jax.Array, Any, Any]:
        wide = {k: v.astype(jnp.float32) for k, v in batch.items()}
        h = jnp.tanh((batch["x"] + wide["rows"]) @ params["w0"]) * wide["table"]
        route = jax.lax.stop_gradient(h).astype(dtype)
        h = jnp.tanh(h @ (params["w1"] + constant.astype(jnp.float32)))
        h = h * (1 + route.astype(jnp.float32)) * wide["one"] + state["scale"].astype(jnp.float32)
        return jnp.mean(h**2), {"route": route}, state

    params = _params()
    step = _compiled(params, loss, batch, state=frozen, shared=("table",))
    held = step.init()
    value, aux, grads = step.value_and_grad(held, batch)
    plain = jax.value_and_grad(lambda p: loss(p, frozen, batch)[:2], has_aux=True)
    (expected, expected_aux), expected_grads = plain(params)
    _assert_same((value, aux, grads), (expected, expected_aux, expected_grads))
    if name == "uint2":
        with pytest.raises(TypeError, match=r"module_state.scale is of type uint2"):
            step.save(tmp_path / "saved", held)
        return
    step.save(tmp_path / "saved", held)
    _assert_same(step.module_state(step.restore(tmp_path / "saved")), frozen)


def test_state_of_four_bits_is_carried_from_microbatch_to_microbatch():
    params, state = _params(), {"counts": jnp.zeros(4, jnp.int4)}
    x = jnp.ones((4, 4))

    def loss(params: Any, state: Any, x: jax.Array) -> tuple[jax.Array, Any, Any]:
        h = jnp.tanh(x @ params["w0"] @ params["w1"])
        counts = state["counts"] + jnp.sum(h < 2, axis=0).astype(jnp.int4)
        return jnp.mean(h * state["counts"].astype(jnp.float32)[None]), None, {"counts": counts}

    step = _compiled(params, loss, x, state=state, mesh=pipe(1))
    held, _ = step(step.init(), x)
    _assert_same(step.module_state(held), {"counts": jnp.full(4, 4, jnp.int4)})


@pytest.mark.parametrize("name", ["float8_e4m3fn", "float8_e5m2"])
def test_weights_of_eight_bits_train(name):
    params = {k: v.astype(name) for k, v in _params().items()}
    x = jax.random.normal(jax.random.key(1), (4, 4))

    def loss(params: Any, x: jax.Array) -> jax.Array:
        for w in params.values():
            x = jnp.tanh(x @ w.astype(jnp.float32))
        return jnp.mean(x**2)

    step = _compiled(params, loss, x)
    held = step.init()
    grads = step.value_and_grad(held, x)[2]
    rounding = float(jnp.finfo(name).eps)  # of each microbatch's gradient, and of the sum
    _assert_same(grads, jax.grad(loss)(params, x), atol=rounding / 4)
    held, metrics = step(held, x)
    stepped = optax.apply_updates(params, jax.tree.map(lambda g: -0.1 * g, grads))
    _assert_same(step.params(held), stepped, atol=float(jnp.finfo(name).tiny))
    norm = np.sqrt(sum(np.sum(np.float32(g) ** 2) for g in grads.values()))
    np.testing.assert_allclose(metrics["grad_norm"], norm, rtol=1e-6)


def test_parameters_of_four_bits_are_refused_by_name():
    params = {**_params(), "q": {"a": jnp.ones((2, 2), jnp.int4), "b": jnp.ones(3, jnp.uint2)}}
    listed = "2 parameters cannot be trained (q.a is int4[2, 2], q.b is uint2[3])"
    with pytest.raises(ValueError, match=re.escape(listed)):
        _compiled(params, lambda p, x: jnp.mean(x @ p["w0"]), jnp.ones((4, 4)))


POLICIES = {
    "names": jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[],
        names_which_can_be_offloaded=["h"],
        offload_src="device",
        offload_dst="pinned_host",
    ),
    "products": jax.checkpoint_policies.offload_dot_with_no_batch_dims("device", "pinned_host"),
}


@pytest.mark.parametrize("devices", [(2, 1), (1, 2)], ids=["two ranks", "a data axis"])
@pytest.mark.parametrize("policy", POLICIES)
def test_offloaded_residuals_wait_on_the_host(policy, devices):
    params, x = _params(), jax.random.normal(jax.random.key(1), (4, 4))

    def layer(w: jax.Array, x: jax.Array) -> jax.Array:
        return jnp.sin(checkpoint_name(jnp.tanh(x @ w), "h"))

    def loss(params: Any, x: jax.Array) -> jax.Array:
        for w in params.values():
            x = jax.checkpoint(layer, policy=POLICIES[policy])(w, x)
        return jnp.mean(x**2)

    mesh = jax.make_mesh(devices, ("pipe", "data"), devices=jax.devices()[:2])
    step = _compiled(params, loss, x, mesh=mesh)
    value, _, grads = step.value_and_grad(step.init(), x)
    _assert_same((value, grads), jax.value_and_grad(loss)(params, x))
