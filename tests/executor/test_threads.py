"""One step, many callers; and threads that end."""

import gc
import threading

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import octojax as octopipe
from octojax.errors import ExecutionError
from tests.pipelines import FAST, pipe


def loss(params, batch):
    h = batch["x"]
    for i in range(4):
        h = jnp.tanh(h @ params[f"w{i}"])
    return jnp.mean((h - batch["y"]) ** 2)


PARAMS = {f"w{i}": np.eye(8, dtype=np.float32) * (1 + i / 8) for i in range(4)}
BATCHES = [
    {"x": np.full((8, 8), v, np.float32), "y": np.full((8, 8), -v, np.float32)}
    for v in (0.1, 0.5, 2.0)
]
OPTIONS = {"microbatches": 4, "progress": False, "compiler_options": FAST, "timeout_s": 60}


def compiled(loss_fn=loss, **options):
    return octopipe.compile(
        PARAMS, loss_fn, optax.sgd(0.1), BATCHES[0], mesh=pipe(2), **OPTIONS, **options
    )


def together(works):
    """Runs all works in threads of their own at once; returns what each returned or raised."""
    results, barrier = [None] * len(works), threading.Barrier(len(works))

    def run(i):
        barrier.wait(30)
        try:
            results[i] = works[i]()
        except BaseException as error:
            results[i] = error

    threads = [threading.Thread(target=run, args=(i,)) for i in range(len(works))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads)
    return results


def assert_close(found, wanted):
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=1e-4, atol=1e-6)


@pytest.fixture(scope="module")
def step():
    with compiled() as step:
        yield step


def test_threads_that_call_one_step_each_get_their_own_results(step):
    state = step.init()
    wanted = [jax.value_and_grad(loss)(PARAMS, b) for b in BATCHES]
    for _ in range(5):
        works = [lambda b=b: step.value_and_grad(state, b) for b in BATCHES]
        works += [lambda b=b: step.evaluate(state, b) for b in BATCHES]
        *found, a, b, c = together(works)
        for (value, _, grads), want in zip(found, wanted, strict=True):
            assert_close((value, grads), want)
        for result, want in zip((a, b, c), wanted, strict=True):
            assert_close(result["loss"], want[0])


def test_of_two_threads_with_one_state_one_steps_and_the_other_is_told(step):
    state = step.init()
    results = together([lambda b=b: step(state, b) for b in BATCHES[:2]])
    errors = [r for r in results if isinstance(r, BaseException)]
    assert len(errors) == 1
    with pytest.raises(ValueError, match="was given to an earlier step"):
        raise errors[0]
    winner = next(i for i, r in enumerate(results) if not isinstance(r, BaseException))
    grads = jax.grad(loss)(PARAMS, BATCHES[winner])
    assert_close(step.params(results[winner][0]), {k: PARAMS[k] - 0.1 * grads[k] for k in PARAMS})


def test_training_in_threads_of_their_own_states(step):
    def train(batch):
        state = step.init()
        for _ in range(4):
            state, _ = step(state, batch)
        return step.params(state)

    for found, batch in zip(
        together([lambda b=b: train(b) for b in BATCHES]), BATCHES, strict=True
    ):
        params = {k: jnp.asarray(v) for k, v in PARAMS.items()}
        for _ in range(4):
            grads = jax.grad(loss)(params, batch)
            params = {k: params[k] - 0.1 * grads[k] for k in params}
        assert_close(found, params)


def test_a_pipelined_gradient_is_called_by_threads_and_closed():
    with octopipe.value_and_grad(loss, PARAMS, BATCHES[0], mesh=pipe(2), **OPTIONS) as f:
        for found, b in zip(together([lambda b=b: f(PARAMS, b) for b in BATCHES]), BATCHES):
            assert_close(found, jax.value_and_grad(loss)(PARAMS, b))
    with pytest.raises(ExecutionError, match=r"value_and_grad was called, but this pipelined"):
        f(PARAMS, BATCHES[0])


def test_a_call_from_a_callback_of_the_step_itself_is_refused():
    box = []

    def peek(value):
        step, state, errors = box
        try:
            step.evaluate(state, BATCHES[0])
        except ExecutionError as error:
            errors.append(str(error))
        return value

    def nosy(params, batch):
        corner = jax.lax.stop_gradient(params["w3"][0, 0])
        seen = jax.pure_callback(peek, jax.ShapeDtypeStruct((), corner.dtype), corner)
        return loss(params, batch) + 0 * jax.lax.stop_gradient(seen)

    with compiled(nosy) as step:
        state = step.init()
        box[:] = [step, state, []]
        _, metrics = step(state, BATCHES[1])
        assert_close(metrics["loss"], loss(PARAMS, BATCHES[1]))
    assert box[2]
    assert "evaluate was called from inside a callback" in box[2][0]
    assert "while the step runs: it would wait for itself" in box[2][0]


@pytest.mark.parametrize("transport", ["device_put", "ppermute"])
def test_no_thread_is_left_when_nobody_holds_the_step(transport):
    before = set(threading.enumerate())
    step = compiled(transport=transport)
    jax.block_until_ready(step(step.init(), BATCHES[0]))
    own = set(threading.enumerate()) - before
    assert {t.name for t in own} >= {"octopipe step", "octopipe rank 1"}
    del step
    gc.collect()
    for thread in own:
        thread.join(10)
        assert not thread.is_alive(), thread.name


def test_no_thread_is_left_after_close_and_every_use_is_refused_by_name(tmp_path):
    before = set(threading.enumerate())
    step = compiled(transport="ppermute")
    state, _ = step(step.init(), BATCHES[0])
    own = set(threading.enumerate()) - before
    step.close()
    step.close()
    for thread in own:
        thread.join(10)
        assert not thread.is_alive(), thread.name
    uses = {
        "the step": lambda: step(state, BATCHES[0]),
        "evaluate": lambda: step.evaluate(state, BATCHES[0]),
        "value_and_grad": lambda: step.value_and_grad(state, BATCHES[0]),
        "save": lambda: step.save(tmp_path / "checkpoint", state),
        "restore": lambda: step.restore(tmp_path / "checkpoint"),
        "recover": step.recover,
        "rehearse": lambda: step.rehearse(state, BATCHES[0]),
    }
    for name, use in uses.items():
        with pytest.raises(ExecutionError, match=f"{name} was called, but this step was closed"):
            use()
    with pytest.raises(ExecutionError, match="but this step was closed"):
        step.init()
    assert state.is_alive()
