"""A training state is refused by every step but those it fits, by name, and moves between plans."""

import copy
import dataclasses
import pickle
from collections.abc import Callable
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import octojax as octopipe
from octojax.programs.recipe import raw
from tests.pipelines import FAST, pipe

WIDTH = 4
NAMES = ("w0", "w1", "w2", "w3")
ADAM = optax.adam(0.1)
OPTIONS: dict[str, Any] = {"microbatches": 2, "progress": False, "compiler_options": FAST}
PARAMS = {
    name: jax.random.normal(k, (WIDTH, WIDTH)) / 2
    for name, k in zip(NAMES, jax.random.split(jax.random.key(0), 4), strict=True)
}


def chain_of(names: tuple[str, ...]) -> Callable[[Any, Any], Any]:
    def loss(params: Any, batch: Any) -> Any:
        h = batch
        for name in names:
            h = jnp.tanh(h @ params[name])
        return jnp.mean(h**2)

    return loss


def batch_of(rows: int = 4) -> np.ndarray:
    return np.linspace(-1, 1, rows * WIDTH, dtype=np.float32).reshape(rows, WIDTH)


@cache
def step_of(
    ranks: int,
    partition: tuple[int, ...],
    optimizer: Any = ADAM,
    names: tuple[str, ...] = NAMES,
    rows: int = 4,
    schedule: str = "gpipe",
    first: int = 0,
    microbatches: int = 2,
) -> octopipe.TrainStep:
    devices = np.array(jax.devices()[first : first + ranks])
    return octopipe.compile(
        PARAMS,
        chain_of(names),
        optimizer,
        batch_of(rows),
        mesh=jax.sharding.Mesh(devices, ("pipe",)),
        partition=partition,
        microbatches=microbatches,
        schedule=schedule,
        progress=False,
        compiler_options=FAST,
    )


SGD = optax.sgd(0.1)
MOMENTUM = optax.sgd(0.1, momentum=0.9)
ADAMAX = optax.adamax(0.1)  # records of the same names as Adam's, with another meaning
OTHERS: dict[str, Callable[[], octopipe.TrainStep]] = {
    "plan": lambda: step_of(2, (1, 3)),
    "devices": lambda: step_of(2, (2, 2), first=2),
    "optimizer": lambda: step_of(2, (2, 2), SGD),
    "optimizer of the same records": lambda: step_of(2, (2, 2), ADAMAX),
    "model of the same shapes": lambda: step_of(2, (2, 2), names=("w1", "w0", "w2", "w3")),
    "plan of more ranks": lambda: step_of(4, (1, 1, 1, 1)),
}


def same(got: Any, expected: Any) -> None:
    assert jax.tree.structure(got) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(np.asarray(raw(a)), np.asarray(raw(b)))


def opt_state(step: octopipe.TrainStep, state: octopipe.TrainState) -> Any:
    return step.opt_state(state)


@pytest.mark.parametrize("name", OTHERS)
def test_a_state_of_another_step_is_refused_by_name(name: str) -> None:
    state, other = step_of(2, (2, 2)).init(), OTHERS[name]()
    with pytest.raises(ValueError, match="of another step") as error:
        other(state, batch_of())
    fact = name.split()[0]
    assert f"{fact}: the state's is" in str(error.value)
    assert f"this step's is {dict(other.origin.facts)[fact]}" in str(error.value)
    assert "step.adopt(state)" in str(error.value)


def test_every_use_of_a_foreign_state_is_refused(tmp_path: Any) -> None:
    state, other, batch = step_of(2, (2, 2)).init(), step_of(2, (1, 3)), batch_of()
    uses: list[Callable[[], Any]] = [
        lambda: other(state, batch, record=True),
        lambda: other.evaluate(state, batch),
        lambda: other.value_and_grad(state, batch),
        lambda: other.reference(state, batch),
        lambda: other.rehearse(state, batch, rounds=1),
        lambda: other.params(state),
        lambda: other.module_state(state),
        lambda: other.model(state),
        lambda: other.save(tmp_path / "c", state),
    ]
    for use in uses:
        with pytest.raises(ValueError, match=r"partition 2 2 on ranks 0 1.*partition 1 3"):
            use()
    assert not (tmp_path / "c").exists()
    with pytest.raises(TypeError, match="state is of type dict"):
        other.adopt({})


def test_steps_that_differ_in_batch_schedule_or_rate_share_their_states() -> None:
    state = step_of(2, (2, 2)).init()
    other = step_of(2, (2, 2), optax.adam(0.01), rows=6, schedule="1f1b", microbatches=3)
    assert other.origin == state.origin
    value = other.evaluate(state, batch_of(6))["loss"]
    np.testing.assert_allclose(value, chain_of(NAMES)(PARAMS, batch_of(6)), rtol=1e-5)


@given(st.data())
@settings(max_examples=6, deadline=None)
def test_a_state_moves_between_plans_to_the_bit(data: Any) -> None:
    plans = [(2, (2, 2)), (2, (1, 3)), (4, (1, 1, 1, 1))]
    first, second = (step_of(*data.draw(st.sampled_from(plans))) for _ in range(2))
    state, _ = first(first.init(), batch_of())
    adopted = second.adopt(state)
    assert adopted.step == state.step
    same(second.params(adopted), first.params(state))
    same(opt_state(second, adopted), opt_state(first, state))
    after, metrics = second(adopted, batch_of())
    plain = first.evaluate(state, batch_of())["loss"]  # the old state has its buffers still
    np.testing.assert_allclose(metrics["loss"], plain, rtol=1e-6)
    same(opt_state(first, first.adopt(after))[0].count, np.int32(2))


def stacked_loss(params: Any, state: Any, batch: Any) -> Any:
    """A scanned stack, a statistic that a stage carries, a counter, and a key."""
    h, _ = jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), batch, params["stack"])
    count = state["count"] + 1
    noise = jax.random.normal(jax.random.fold_in(state["key"], count), h.shape)
    mean = 0.9 * state["mean"] + 0.1 * jnp.mean(h)
    return jnp.mean((h + 0.1 * noise) ** 2), None, {**state, "count": count, "mean": mean}


def test_every_kind_of_leaf_moves() -> None:
    params = {"stack": jnp.stack([PARAMS[name] for name in NAMES])}
    first, second = (
        octopipe.compile(
            params,
            stacked_loss,
            optax.adamw(1e-2),
            batch_of(),
            state={"count": jnp.int32(0), "key": jax.random.key(3), "mean": jnp.float32(0)},
            mesh=pipe(ranks),
            **OPTIONS,
        )
        for ranks in (1, 2)
    )
    state, _ = first(first.init(), batch_of())
    adopted = second.adopt(state)
    same(second.params(adopted), first.params(state))
    same(second.module_state(adopted), first.module_state(state))
    same(opt_state(second, adopted), opt_state(first, state))
    assert second.module_state(adopted)["count"] == 2


def test_another_optimizer_is_refused_unless_it_begins_anew() -> None:
    first, second = step_of(2, (2, 2), MOMENTUM), step_of(2, (1, 3))
    state, _ = first(first.init(), batch_of())
    with pytest.raises(ValueError, match=r"TraceState.*there, ScaleByAdamState") as error:
        second.adopt(state)
    assert "leaves only there: [0].trace['w0'] float32[4, 4]" in str(error.value)
    assert "reset_optimizer=True" in str(error.value)
    with pytest.raises(ValueError, match="ScaleByAdamState"):
        step_of(2, (2, 2), ADAMAX).adopt(second.init())
    adopted = second.adopt(state, reset_optimizer=True)
    same(second.params(adopted), first.params(state))
    same(opt_state(second, adopted), ADAM.init(first.params(state)))
    assert adopted.step == 1


def test_a_state_outlives_its_step_but_not_pickling() -> None:
    step = octopipe.compile(PARAMS, chain_of(NAMES), SGD, batch_of(), mesh=pipe(1), **OPTIONS)
    state = step.init()
    step.loss.trainer.engine.close()
    del step
    other = step_of(2, (2, 2), SGD)
    same(other.params(other.adopt(copy.deepcopy(state))), PARAMS)
    mine = other.init()
    origin = pickle.loads(pickle.dumps(mine.origin))
    assert origin == mine.origin
    with pytest.raises(ValueError, match="was pickled"):
        other.adopt(octopipe.TrainState(mine.model, mine.opt_state, 0, origin))


def test_spent_and_fetched_states_are_refused() -> None:
    step, other = step_of(2, (2, 2)), step_of(2, (1, 3))
    state = step.init()
    step(state, batch_of())
    for use in (step.params, other.adopt):
        with pytest.raises(ValueError, match="given to an earlier step"):
            use(state)
    fetched = jax.device_get(step.init())
    for use in (step.params, other.adopt, lambda s: step.evaluate(s, batch_of())):
        with pytest.raises(ValueError, match="are of type ndarray"):
            use(fetched)


def test_changed_values_are_refused_by_name() -> None:
    step = step_of(2, (2, 2))
    cast = jax.tree.map(lambda x: x.astype(jnp.bfloat16), step.init())
    for use in (step.params, lambda s: step(s, batch_of())):
        with pytest.raises(ValueError, match=r"w0 is bfloat16\[4, 4\], compiled for float32"):
            use(cast)
    begun = step.init()
    halves = jax.tree.map(lambda x: x.astype(jnp.float16), begun.opt_state)
    with pytest.raises(ValueError, match=r"a value of the optimizer state is float16\[4, 4\]"):
        step(dataclasses.replace(begun, opt_state=halves), batch_of())
    with pytest.raises(TypeError, match=r"params is a training state.*step\.adopt"):
        step.init(begun)


def test_a_model_of_other_leaves_is_refused() -> None:
    other = octopipe.compile(
        {"w0": PARAMS["w0"], "v": jnp.ones((WIDTH, 2))},
        lambda p, b: jnp.mean((jnp.tanh(b @ p["w0"]) @ p["v"]) ** 2),
        SGD,
        batch_of(),
        mesh=pipe(1),
        **OPTIONS,
    )
    for optimizer in (SGD, ADAM):  # the model comes first among the reasons
        with pytest.raises(ValueError, match=r"1 missing \(v\).*\(w1, w2, w3\)"):
            other.adopt(step_of(2, (2, 2), optimizer).init())


def test_step_and_state_are_one_line_at_a_prompt():
    step = step_of(2, (2, 2))
    state = step.init()
    size = len(NAMES) * 4 * WIDTH**2
    assert repr(state) == (
        f"<TrainState: step 0, 4 arrays of the model ({size} bytes), 10 arrays of the optimizer "
        f"({2 * size + 2 * 4} bytes)>"  # two moments, and a count on each rank
    )
    assert repr(step).startswith("<TrainStep: on ")
    assert repr(step.plan) in repr(step)
    assert step._repr_html_().startswith("<svg ")
    step(state, batch_of())
    assert repr(state).endswith("whose buffers a later step has taken over>")
    assert len(repr(step)) < 400
