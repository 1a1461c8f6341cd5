"""What a step is given has the leaves it was compiled for, by path; all that differ are listed."""

from collections import namedtuple
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.core import FrozenDict
from hypothesis import given, settings
from hypothesis import strategies as st

import octojax as octopipe
from octojax.api.structure import leaves_like, like
from octojax.programs.recipe import raw
from octojax.trace import Leaves
from tests.pipelines import FAST, case_of, compiled, pipe

WIDTH = 4
Pair = namedtuple("Pair", ["x", "y"])


def leaves_of(tree: Any) -> Leaves:
    paths, structure = jax.tree_util.tree_flatten_with_path(tree)
    names = tuple(jax.tree_util.keystr(path, simple=True, separator=".") for path, _ in paths)
    return Leaves(structure, names, tuple(jax.typeof(x) for _, x in paths))


def make_params() -> dict[str, Any]:
    keys = jax.random.split(jax.random.key(0), 3)
    weights = [jax.random.normal(k, (WIDTH, WIDTH)) / 2 for k in keys]
    return {"layers": weights, "scale": 1.5, "none": None}


def loss_fn(params: Any, batch: Any) -> jax.Array:
    layers = params["layers"]
    h = batch["x"]
    for i in range(3):
        h = jnp.tanh(h @ layers[i])
    return jnp.mean((params["scale"] * h - batch["y"]) ** 2)


BATCH = {
    "x": np.linspace(-1, 1, 4 * WIDTH, dtype=np.float32).reshape(4, WIDTH),
    "y": np.zeros((4, WIDTH), np.float32),
}
OPTIONS: dict[str, Any] = {"microbatches": 2, "progress": False, "compiler_options": FAST}


@pytest.fixture(scope="module")
def step() -> octopipe.TrainStep:
    return octopipe.compile(make_params(), loss_fn, optax.sgd(0.1), BATCH, mesh=pipe(2), **OPTIONS)


@pytest.fixture(scope="module")
def function() -> Any:
    return octopipe.value_and_grad(loss_fn, make_params(), BATCH, mesh=pipe(2), **OPTIONS)


def test_every_offender_is_listed(step: octopipe.TrainStep) -> None:
    params = make_params()
    wrong = {
        "a_new": jnp.zeros((WIDTH, WIDTH)),
        "layers": [params["layers"][0], params["layers"][1][:2]],
        "scale": np.ones((), np.int32),
        "none": jnp.ones(1),
    }
    with pytest.raises(ValueError) as error:
        step.init(wrong)
    message = str(error.value)
    assert "1 missing (layers.2)" in message
    assert "2 that the compiled model does not have (a_new, none)" in message
    assert "layers.1 is float32[2, 4], compiled for float32[4, 4]" in message
    assert "scale is int32[], compiled for float32[]" in message


def test_a_renamed_leaf_does_not_shift_the_others(function: Any) -> None:
    params = make_params()
    with pytest.raises(ValueError, match=r"1 missing \(scale\); 1 that .* \(a_renamed\)"):
        function({**params, "scale": None, "a_renamed": 1.5}, BATCH)
    with pytest.raises(ValueError, match="1 missing \\(y\\); 1 that the compiled model"):
        function(params, {"x": BATCH["x"], "a": BATCH["y"]})
    with pytest.raises(ValueError, match="x is float32\\[2, 4\\]"):
        function(params, {"x": BATCH["x"][:2], "y": BATCH["y"]})


@pytest.mark.parametrize(
    "change",
    [
        FrozenDict,
        lambda p: {**p, "layers": tuple(p["layers"])},
        lambda p: {**p, "layers": {str(i): x for i, x in enumerate(p["layers"])}},
        lambda p: jax.tree.map(np.asarray, p),
        lambda p: {**p, "scale": np.float64(1.5)},
        lambda p: {**p, "scale": jnp.float32(1.5)},
        lambda p: {"layers": p["layers"], "scale": 1.5},
    ],
    ids=["frozen", "tuple", "numbered", "numpy", "float64", "strong", "no-none"],
)
def test_other_containers_of_the_same_paths_are_the_same(
    change: Any, step: octopipe.TrainStep, function: Any
) -> None:
    params = change(make_params())
    value, grads = function(params, BATCH)
    expected, plain = jax.value_and_grad(loss_fn)(make_params(), BATCH)
    np.testing.assert_allclose(value, expected, rtol=1e-6)
    if not isinstance(params["layers"], dict):
        plain = like(plain, params)
    assert jax.tree.structure(grads) == jax.tree.structure(params)
    for got, wanted in zip(jax.tree.leaves(grads), jax.tree.leaves(plain), strict=True):
        np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-7)
    state = step.init(params)
    np.testing.assert_allclose(step.evaluate(state, BATCH)["loss"], expected, rtol=1e-6)


@pytest.mark.parametrize(
    ("leaf", "text"),
    [
        ("text", "scale is of type str"),
        (object(), "scale is of type object"),
        (jax.ShapeDtypeStruct((), np.float32), "scale is a shape without a value"),
        (jax.random.key(0), r"scale is key<fry>\[\]"),
        (2, r"scale is int32\[\]"),
    ],
)
def test_a_leaf_that_is_no_such_array_is_named(
    leaf: Any, text: str, step: octopipe.TrainStep
) -> None:
    with pytest.raises(ValueError, match=text):
        step.init({**make_params(), "scale": leaf})


@pytest.mark.parametrize("name", ["nnx-batchnorm", "linen-batchnorm"])
def test_the_users_whole_model_brings_its_state(name: str) -> None:
    step = compiled(case_of(name), "gpipe", 1, 2)
    batch = case_of(name).batch(8)
    state, _ = step(step.init(), batch)
    again = step.init(step.model(state))
    for wanted, got in zip(
        jax.tree.leaves((step.params(state), step.module_state(state))),
        jax.tree.leaves((step.params(again), step.module_state(again))),
        strict=True,
    ):
        np.testing.assert_array_equal(*(raw(x) for x in (got, wanted)))
    with pytest.raises(ValueError, match=r"leaves of module state do not fit.*missing"):
        step.init(step.params(state), state={"a": jnp.ones(2)})


def test_an_nnx_state_and_its_pure_dict_have_the_same_paths() -> None:
    state = nnx.state(nnx.Linear(2, 3, rngs=nnx.Rngs(0)), nnx.Param)
    pure = nnx.to_pure_dict(state)
    found = leaves_like(pure, leaves_of(state), "the parameters")
    for got, wanted in zip(found, jax.tree.leaves(state), strict=True):
        np.testing.assert_array_equal(got, wanted)


def trees() -> st.SearchStrategy[Any]:
    words = st.sampled_from(["a", "b", "value", "a.b", "10", "9"])
    return st.recursive(
        st.just(0.0) | st.none(),
        lambda inner: (
            st.dictionaries(words, inner, max_size=3)
            | st.lists(inner, max_size=12)
            | st.builds(Pair, inner, inner)
        ),
        max_leaves=12,
    )


def as_dicts(tree: Any) -> Any:
    if isinstance(tree, Pair):
        return {"x": as_dicts(tree.x), "y": as_dicts(tree.y)}
    if isinstance(tree, list):
        return {str(i): as_dicts(x) for i, x in enumerate(tree)}
    return {k: as_dicts(x) for k, x in tree.items()} if isinstance(tree, dict) else tree


@given(trees())
@settings(max_examples=60, deadline=None)
def test_any_tree_is_found_again_by_its_paths(tree: Any) -> None:
    numbers = iter(range(100))
    tree = jax.tree.map(lambda _: float(next(numbers)), tree)
    expected = leaves_of(tree)
    assert leaves_like(as_dicts(tree), expected, "x") == jax.tree.leaves(tree)
    assert like(as_dicts(tree), tree) == tree
