"""Ctrl-C at random times: the next step is right, and no state is lost without a word."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import octojax as octopipe
from octojax.errors import ExecutionError
from octojax.executor.stop import Stopped
from tests.interrupts import interrupts
from tests.pipelines import FAST, pipe

WEIGHTS = 4


def loss(params, batch):
    h = batch["x"]
    for i in range(WEIGHTS):
        h = jnp.tanh(h @ params[f"w{i}"])
    return jnp.mean((h - batch["y"]) ** 2)


def parameters(width=8):
    keys = jax.random.split(jax.random.key(0), WEIGHTS)
    return {f"w{i}": jax.random.normal(k, (width, width)) / 3 for i, k in enumerate(keys)}


def batches(width=8, rows=8):
    rng = np.random.default_rng(0)
    while True:
        x, y = rng.standard_normal((2, rows, width)).astype(np.float32)
        yield {"x": x, "y": y}


OPTIMIZER = optax.chain(optax.clip_by_global_norm(0.1), optax.adam(1e-2))


def compiled(schedule, ranks, **options):
    return octopipe.compile(
        parameters(),
        loss,
        OPTIMIZER,
        next(batches()),
        mesh=pipe(ranks),
        microbatches=4,
        schedule=schedule,
        progress=False,
        compiler_options=FAST,
        **options,
    )


@jax.jit
def plain(params, opt_state, batch):
    value, grads = jax.value_and_grad(loss)(params, batch)
    updates, opt_state = OPTIMIZER.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, value


def assert_close(tree, wanted):
    for a, b in zip(jax.tree.leaves(tree), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=1e-4, atol=1e-5)


def interrupted_training(step, presses, rng):
    """Trains until so many calls were interrupted; every step is as plain JAX has it.

    Returns how many of them left their state whole, and how many were recovered.
    """
    params, state = parameters(), step.init()
    opt_state, fates = OPTIMIZER.init(params), {"whole": 0, "recovered": 0}
    for number, batch in enumerate(batches(), 1):
        params, opt_state, value = plain(params, opt_state, batch)
        delays_s = rng.uniform(0, 0.01, rng.integers(1, 4))
        begun, metrics, interrupted = state, None, False
        while metrics is None:
            try:
                with interrupts(delays_s):
                    state, metrics = step(state, batch)
            except KeyboardInterrupt:
                delays_s, interrupted = (), True
            except ValueError as error:  # a second Ctrl-C ends the wait for what has been committed
                told = str(error)
                assert interrupted
                assert not begun.is_alive()
                assert re.search(r"took over its buffers.*recover\(\)", told)
                state, metrics = step.recover()
                fates["recovered"] += 1
                interrupted = False
        fates["whole"] += interrupted
        assert state.step == number
        np.testing.assert_allclose(float(metrics["loss"]), float(value), rtol=1e-4)
        assert_close(step.params(state), params)
        if sum(fates.values()) >= presses:
            return fates
    return fates


@pytest.mark.parametrize("transport", ["device_put", "ppermute"])
def test_a_few_interrupts_at_random_times(transport):
    with compiled("1f1b", 2, transport=transport) as step:
        assert sum(interrupted_training(step, 8, np.random.default_rng(1)).values()) >= 8


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(10))
def test_two_hundred_interrupts_in_random_schedules(seed):
    rng = np.random.default_rng(seed)
    schedule = rng.choice(["gpipe", "1f1b", "zb-h1", "zb-h2", "zb-auto"])
    ranks, transport = int(rng.integers(1, 5)), rng.choice(["device_put", "ppermute"])
    with compiled(str(schedule), ranks, transport=str(transport)) as step:
        fates = interrupted_training(step, 20, rng)
    print(f"{schedule} on {ranks} ranks, {transport}: {fates}")


@pytest.fixture(scope="module")
def step():
    with compiled("1f1b", 2) as step:
        yield step


def test_a_step_stopped_before_its_update_leaves_the_state_whole(step, monkeypatch):
    state, batch = step.init(), next(batches())

    def interrupted(*_):
        error = KeyboardInterrupt()
        step.loss.calls.stop.cancel(error)
        return gradients(*_)

    gradients = step._gradients
    with monkeypatch.context() as patch:
        patch.setattr(step, "_gradients", interrupted)
        with pytest.raises(Stopped):
            step(state, batch)
    assert state.is_alive()
    new, metrics = step(state, batch)
    params, _, value = plain(parameters(), OPTIMIZER.init(parameters()), batch)
    assert_close((metrics["loss"], step.params(new)), (value, params))


def test_a_step_stopped_after_its_update_began_is_recovered(step, monkeypatch):
    state, batch = step.init(), next(batches())
    apply = step.update.apply

    def interrupted(*args):
        step.loss.calls.stop.cancel(KeyboardInterrupt())
        return apply(*args)

    with monkeypatch.context() as patch:
        patch.setattr(step.update, "apply", interrupted)
        new, metrics = step(state, batch)
    again, once_more = step.recover()
    assert again is new
    assert once_more is metrics
    newer, _ = step(new, batch)
    assert step.recover()[0] is newer


def test_nothing_to_recover_is_said(step):
    state, _ = step(step.init(), next(batches()))
    for leaf in jax.tree.leaves(state):
        leaf.delete()
    with pytest.raises(ValueError, match=r"there is nothing to recover"):
        step.recover()


@pytest.mark.parametrize("gone", [False, True])
def test_an_update_that_fails_says_what_became_of_the_state(step, monkeypatch, gone):
    state, batch = step.init(), next(batches())
    apply = step.update.apply

    def failing(*args):
        if gone:
            apply(*args)
        raise RuntimeError("out of memory")

    fate = r"which is gone: go on from the last checkpoint" if gone else r"to the step is whole"
    with monkeypatch.context() as patch:
        patch.setattr(step.update, "apply", failing)
        with pytest.raises(ExecutionError, match=fate):
            step(state, batch)
    assert state.is_alive() is not gone
    step(step.init(), batch)


def test_an_interrupt_between_two_lines_of_the_call_itself(step, monkeypatch):
    """Whatever comes out of the blue, and not by a signal: the next step is right."""
    state, batch = step.init(), next(batches())
    calls = step.loss.calls
    for name in ("_send", "_wait"):
        original = getattr(calls, name)

        def after(*args, original=original):
            original(*args)
            raise TimeoutError("out of the blue")

        with monkeypatch.context() as patch:
            patch.setattr(calls, name, after)
            with pytest.raises(TimeoutError):
                step.evaluate(state, batch)
    value = step.evaluate(state, batch)["loss"]
    np.testing.assert_allclose(float(value), float(loss(parameters(), batch)), rtol=1e-5)
