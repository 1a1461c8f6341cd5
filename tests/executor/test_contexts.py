"""JAX settings that the caller makes for a while hold in every thread of a step."""

import contextlib
import logging
import threading

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh

import octojax as octopipe
from octojax.compat import thread_settings, under_thread_settings
from octojax.errors import ExecutionError, NonFiniteError
from tests.pipelines import FAST, pipe

RANKS = 3


def loss(params, batch):
    h, y = batch
    for i in range(2 * RANKS):
        h = jnp.tanh(h @ params[f"w{i}"])
    return jnp.mean((h - y) ** 2)  # the last rank reads y


def parameters(dtype=np.float32):
    rng = np.random.default_rng(0)
    return {f"w{i}": rng.standard_normal((4, 4)).astype(dtype) / 2 for i in range(2 * RANKS)}


def rows(dtype=np.float32):
    rng = np.random.default_rng(1)
    return tuple(rng.standard_normal((2, 8, 4)).astype(dtype))


def compiled(loss_fn=loss, params=None, batch=None, **options):
    params, batch = params or parameters(), rows() if batch is None else batch
    options = {"schedule": "1f1b", "microbatches": 4, "compiler_options": FAST, **options}
    return octopipe.compile(
        params, loss_fn, optax.adam(0.1), batch, mesh=pipe(RANKS), progress=False, **options
    )


@pytest.fixture(scope="module")
def step():
    with compiled() as step:
        yield step


# ---------------------------------------------------------------------- precision


@pytest.mark.parametrize("transport", ["device_put", "ppermute"])
def test_float64_as_a_context(transport):
    with jax.enable_x64(True):
        params, batch = parameters(np.float64), rows(np.float64)
        with compiled(params=params, batch=batch, transport=transport) as step:
            state, metrics = step(step.init(), batch)
            value, grads = jax.value_and_grad(loss)(params, batch)
            found, _, gradients = step.value_and_grad(step.init(), batch)
            np.testing.assert_allclose(metrics["loss"], value, rtol=1e-14)
            assert found.dtype == np.float64
            for name in params:
                assert gradients[name].dtype == np.float64
                scale = np.abs(grads[name]).max()
                np.testing.assert_allclose(gradients[name], grads[name], atol=1e-14 * scale)
            optimizer = optax.adam(0.1)
            updates, _ = optimizer.update(grads, optimizer.init(params), params)
            wanted = optax.apply_updates(params, updates)
            for name, value in step.params(state).items():
                assert value.dtype == np.float64
                np.testing.assert_allclose(value, wanted[name], rtol=1e-12)


def test_float64_without_an_optimizer_and_in_evaluation():
    with jax.enable_x64(True):
        params, batch = parameters(np.float64), rows(np.float64)
        options = {"microbatches": 2, "mesh": pipe(RANKS), "progress": False}
        with octopipe.value_and_grad(loss, params, batch, **options) as f:
            value, _ = f(params, batch)
        with compiled(params=params, batch=batch) as step:
            evaluated = step.evaluate(step.init(), batch)["loss"]
        for found in (value, evaluated):
            assert found.dtype == np.float64
            np.testing.assert_allclose(found, loss(params, batch), rtol=1e-14)


def test_matmul_precision_is_that_of_compilation():
    with jax.default_matmul_precision("highest"):
        step = compiled()
    texts = [str(jaxpr) for jaxpr in step.loss.lowered.jaxprs]
    assert any("HIGHEST" in text for text in texts)
    step.close()


# ---------------------------------------------------------------------- looking for NaNs


def bad_loss(params, batch):
    h, y = batch
    for i in range(2 * RANKS):
        h = jnp.tanh(h @ params[f"w{i}"])
        if i == 3:
            h = h + 0 * jnp.log(y - 100.0)  # the line that makes it
    return jnp.mean((h - y) ** 2)


def in_a_scan(params, batch):
    h, y = batch

    def body(h, w):
        return jnp.sqrt(h @ w - 1e3), None  # the line in the scan

    for i in range(2 * RANKS):
        if i == 3:
            h, _ = jax.lax.scan(body, h, jnp.stack([params["w3"]] * 2))
        h = jnp.tanh(h @ params[f"w{i}"])
    return jnp.mean((h - y) ** 2)


def line_of(text):
    with open(__file__) as file:
        return 1 + next(i for i, line in enumerate(file) if text in line)


@pytest.mark.parametrize(
    ("loss_fn", "text"), [(bad_loss, "the line that makes it"), (in_a_scan, "the line in the scan")]
)
def test_debug_nans_names_rank_action_and_line(loss_fn, text):
    with compiled(loss_fn) as step, jax.debug_nans(True):
        state = step.init()
        place = rf"rank 1: a NaN in the results of 1F\d.*test_contexts.py:{line_of(text)}"
        with pytest.raises(NonFiniteError, match=place) as caught:
            step(state, rows())
        assert isinstance(caught.value, FloatingPointError)
        assert state.is_alive()


def test_debug_nans_with_a_data_axis():
    mesh = Mesh(np.array(jax.devices()).reshape(2, 2), ("pipe", "data"))
    options = {"microbatches": 2, "progress": False, "compiler_options": FAST, "mesh": mesh}
    step = octopipe.compile(parameters(), bad_loss, optax.sgd(0.1), rows(), **options)
    place = rf"rank 1: .* 1F0.*test_contexts.py:{line_of('the line that makes it')}"
    with step, jax.debug_nans(True), pytest.raises(NonFiniteError, match=place):
        step.evaluate(step.init(), rows())


def test_debug_nans_of_a_backward():
    def rooted(params, batch):
        h, y = batch
        for i in range(2 * RANKS):
            h = jnp.tanh(h @ params[f"w{i}"])
        return jnp.mean(jnp.sqrt(jnp.maximum(0 * h * y, 0)))  # finite, and no gradient at 0

    line = line_of("finite, and no gradient at 0")
    with compiled(rooted) as step, jax.debug_nans(True):
        assert np.isfinite(float(step.evaluate(step.init(), rows())["loss"]))
        with pytest.raises(NonFiniteError, match=rf"rank 2: .* 2B0 made .*_contexts.py:{line}"):
            step(step.init(), rows())


def test_debug_nans_of_what_the_step_is_given(step):
    x, y = rows()
    with jax.debug_nans(True):
        state = step.init()
        with pytest.raises(NonFiniteError, match=r"rank 0: .*the preparation of its batch: the"):
            step.evaluate(state, (x * np.nan, y))
        step(state, (x, y))


def test_debug_nans_of_an_update_leaves_the_state_whole():
    poison = optax.stateless(lambda g, _: jax.tree.map(lambda x: jnp.sqrt(-1 - x * x), g))
    params = parameters()
    step = octopipe.compile(
        params, loss, poison, rows(), mesh=pipe(2), microbatches=2, progress=False
    )
    with step, jax.debug_nans(True):
        state = step.init()
        cause = rf"UPDATE0: made by sqrt at \S*test_contexts.py:{line_of('poison = ')}"
        named = rf"after step 0 failed: rank [01]: a NaN in the results of {cause}.*whole"
        with pytest.raises(NonFiniteError, match=named):
            step(state, rows())
        assert state.is_alive()
        assert np.isfinite(float(step.evaluate(state, rows())["loss"]))


def test_debug_infs():
    def huge(params, batch):
        h, y = batch
        for i in range(2 * RANKS):
            h = jnp.tanh(h @ params[f"w{i}"])
        return jnp.mean(jnp.exp(1e3 + h - y))  # too large

    line = line_of("too large")
    with compiled(huge) as step, jax.debug_infs(True):
        match = rf"rank 2: a NaN or an infinity .*test_contexts.py:{line}"
        with pytest.raises(NonFiniteError, match=match):
            step.evaluate(step.init(), rows())


# ---------------------------------------------------------------------- other settings


@pytest.mark.parametrize(
    "setting",
    [
        lambda: jax.default_device(jax.devices()[3]),
        lambda: jax.numpy_dtype_promotion("strict"),
        lambda: jax.numpy_rank_promotion("raise"),
        lambda: jax.transfer_guard("allow"),
        lambda: jax.transfer_guard_device_to_device("disallow"),
        lambda: jax.checking_leaks(),
        lambda: jax.default_matmul_precision("float32"),
        lambda: jax.debug_key_reuse(True),
    ],
)
def test_a_step_is_right_under_any_setting(step, setting):
    batch = rows()
    wanted = jax.value_and_grad(loss)(parameters(), batch)
    with setting():
        state = step.init()
        found, _, gradients = step.value_and_grad(state, batch)
        state, _ = step(state, batch)
    np.testing.assert_allclose(found, wanted[0], rtol=1e-5)
    for name, gradient in gradients.items():
        np.testing.assert_allclose(gradient, wanted[1][name], rtol=1e-4, atol=1e-6)


def test_a_whole_compilation_under_a_default_device():
    with jax.default_device(jax.devices()[2]), compiled() as step:
        _, metrics = step(step.init(), rows())
    np.testing.assert_allclose(metrics["loss"], loss(parameters(), rows()), rtol=1e-5)


def test_a_transfer_guard_reaches_every_rank(step):
    state = step.init()
    step.evaluate(state, rows())  # compiles, which copies, too
    refused = pytest.raises(ExecutionError, match="isallowed host-to-device transfer")
    with jax.transfer_guard_host_to_device("disallow_explicit"), refused:
        step.evaluate(state, rows())
    step.evaluate(state, rows())


def test_compilations_are_logged_from_every_thread(caplog):
    with jax.log_compiles(True), caplog.at_level(logging.WARNING):
        compiled().close()
    text = caplog.text
    for rank in range(RANKS):
        assert f"rank_{rank}" in text or f"rank{rank}" in text


def test_without_jit():
    """`jax.disable_jit` changes nothing: a step consists of compiled programs."""

    def looping(params, batch):
        scale = jax.lax.stop_gradient(jnp.abs(batch[1]).sum())
        scale = jax.lax.while_loop(lambda s: s > 1, lambda s: s / 2, scale)  # not without jit
        return scale * loss(params, batch)

    batch = rows()
    with jax.disable_jit(), compiled(looping, microbatches=1) as step:
        found = step.evaluate(step.init(), batch)["loss"]
    np.testing.assert_allclose(found, looping(parameters(), batch), rtol=1e-5)


# ---------------------------------------------------------------------- how they travel


def settings_seen():
    return {
        "x64": jax.config.jax_enable_x64,
        "type": jnp.zeros(1).dtype.name,
        "nans": jax.config.jax_debug_nans,
        "device": next(iter(jnp.zeros(1).devices())).id,
        "promotion": jax.config.jax_numpy_dtype_promotion,
        "mine": MINE.value,
    }


MINE = jax.make_user_context(0)


def elsewhere(function):
    results = []
    thread = threading.Thread(target=lambda: results.append(function()))
    thread.start()
    thread.join(30)
    return results[0]


def test_settings_hold_in_another_thread_and_end_with_it():
    outside = settings_seen()
    with contextlib.ExitStack() as stack:
        for setting in (
            jax.enable_x64(True),
            jax.debug_nans(True),
            jax.default_device(jax.devices()[1]),
            jax.numpy_dtype_promotion("strict"),
            MINE(5),
        ):
            stack.enter_context(setting)
        inside = settings_seen()
        assert elsewhere(settings_seen) == outside
        assert elsewhere(under_thread_settings(settings_seen)) == inside
        carried = under_thread_settings(settings_seen)
        assert elsewhere(lambda: (carried(), settings_seen())) == (inside, outside)
    assert outside != inside
    assert settings_seen() == outside
    assert carried() == inside  # also after they have ended here
    assert settings_seen() == outside


def test_no_settings_cost_nothing():
    assert thread_settings() is contextlib.nullcontext
