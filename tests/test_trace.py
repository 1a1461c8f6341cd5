"""What the tracer accepts, remembers and refuses."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest

from octojax.errors import LossError
from octojax.layers import find_layers
from octojax.trace import path_name, trace_loss


def stateless(loss: Any) -> Any:
    return lambda params, state, batch: (loss(params, batch), None, state)


PARAMS = {"layers": [{"w": jnp.ones((4, 4))}], "scale": jnp.float32(2)}
BATCH = {"x": jnp.ones((2, 4)), "deep": {"key": jax.random.key(0), "mask": jnp.ones(2, bool)}}


def test_remembers_names_and_avals_of_every_leaf() -> None:
    traced = trace_loss(
        lambda p, s, b: (
            jnp.sum(b["x"] @ p["layers"][0]["w"]) * p["scale"],
            {"n": b["deep"]["mask"]},
            s,
        ),
        PARAMS,
        BATCH,
        {"count": jnp.int32(0)},
    )
    assert traced.params.names == ("layers.0.w", "scale")
    assert traced.batch.names == ("deep.key", "deep.mask", "x")
    assert traced.state.names == ("count",)
    assert traced.num_emits == 2
    assert len(traced.flat.invars) == 2 + 1 + 3
    assert len(traced.flat.outvars) == 2 + 1
    assert jax.dtypes.issubdtype(traced.batch.avals[0].dtype, jax.dtypes.prng_key)
    again = traced.params.unflatten(jax.tree.leaves(PARAMS))
    assert jax.tree.structure(again) == jax.tree.structure(PARAMS)


def test_shapes_will_do_as_arguments() -> None:
    shapes = jax.eval_shape(lambda: PARAMS)
    traced = trace_loss(
        stateless(lambda p, b: jnp.sum(b["x"] @ p["layers"][0]["w"])), shapes, BATCH
    )
    assert traced.params.avals[0].shape == (4, 4)


def test_names_of_all_kinds_of_keys() -> None:
    from flax import nnx

    state = nnx.state(nnx.Linear(2, 3, rngs=nnx.Rngs(0)))
    names = [path_name(path) for path, _ in jax.tree_util.tree_flatten_with_path(state)[0]]
    assert names == ["bias", "kernel"]
    assert path_name((), "root") == "root"


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (lambda p, b: b["x"] @ p["layers"][0]["w"], r"shape \(2, 4\), expected a scalar"),
        (lambda p, b: jnp.int32(3), "dtype int32, expected a real float"),
        (lambda p, b: jnp.complex64(1j), "dtype complex64, expected a real float"),
        (lambda p, b: {"a": p["scale"], "b": p["scale"]}, "dict of 2 arrays, expected one scalar"),
        (lambda p, b: None, "NoneType of 0 arrays"),
    ],
)
def test_refuses_what_is_not_a_loss(loss: Any, message: str) -> None:
    with pytest.raises(LossError, match=message):
        trace_loss(stateless(loss), PARAMS, BATCH)


def test_refuses_leaves_that_are_no_arrays() -> None:
    with pytest.raises(LossError, match="leaf 'name' is a str: 'adam'"):
        trace_loss(stateless(lambda p, b: p["scale"]), {"name": "adam", "scale": 1.0}, BATCH)


def test_refuses_state_that_changes_its_form() -> None:
    state = {"mean": jnp.zeros(3)}
    with pytest.raises(LossError, match=r"new \['extra'\], gone \['mean'\]"):
        trace_loss(lambda p, s, b: (p["scale"], None, {"extra": s["mean"]}), PARAMS, BATCH, state)
    with pytest.raises(LossError, match=r"mean: float32\[3\] -> float32\[1\]"):
        trace_loss(
            lambda p, s, b: (p["scale"], None, {"mean": s["mean"][:1]}), PARAMS, BATCH, state
        )


def test_refuses_a_loss_without_parameters() -> None:
    traced = trace_loss(stateless(lambda p, b: jnp.sum(b["x"])), PARAMS, BATCH)
    with pytest.raises(LossError, match="depends on no parameter"):
        find_layers(traced)
