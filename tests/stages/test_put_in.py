"""Which gradients a rule puts in whatever the loss is, and that this is said once."""

import warnings
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest

import octojax as octopipe
from octojax.errors import LossError
from tests.pipelines import FAST, pipe


@jax.custom_vjp
def observed(x: jax.Array, amax: jax.Array) -> jax.Array:
    """`x`; the gradient of `amax` is the largest of `x`, not a derivative."""
    return x


observed.defvjp(lambda x, amax: (x, jnp.max(jnp.abs(x))), lambda seen, g: (g, seen))


@jax.custom_vjp
def scaled(x: jax.Array, s: jax.Array) -> jax.Array:
    """`x`; the gradient of `s` is made of the cotangent by a rule."""
    return x


scaled.defvjp(lambda x, s: (x, x), lambda x, g: (g, 3 * jnp.sum(g * x)))


def _compiled(loss: Any, microbatches: int = 2, **options: Any) -> octopipe.TrainStep:
    params = {"a": jnp.eye(4), "b": jnp.eye(4), "amax": jnp.ones(()), "scale": jnp.ones(())}
    return octopipe.compile(
        params,
        loss,
        optax.sgd(0.1),
        jnp.ones((4, 4)),
        mesh=pipe(2),
        microbatches=microbatches,
        progress=False,
        compiler_options=FAST,
        **options,
    )


def puts_in(p: Any, x: jax.Array) -> jax.Array:
    h = observed(jnp.tanh(x @ p["a"]), p["amax"])
    return jnp.mean(scaled(h, p["scale"]) @ p["b"])


@pytest.mark.parametrize("recompute", [False, True])
def test_gradients_of_no_cotangent_are_named_once(recompute):
    with pytest.warns(octopipe.GradientWarning, match="gradients of amax do not") as said:
        _compiled(puts_in, recompute=recompute)
    assert len(said) == 1
    assert said[0].filename == __file__
    assert "2 microbatches" in str(said[0].message)


def test_strict_makes_it_an_error():
    with pytest.raises(LossError, match="gradients of amax do not depend on the loss"):
        _compiled(puts_in, strict=True)


@pytest.mark.parametrize(
    ("loss", "microbatches"),
    [
        (puts_in, 1),
        (lambda p, x: jnp.mean(scaled(x @ p["a"], p["scale"]) @ p["b"]), 2),
        (lambda p, x: jnp.mean(x @ p["a"] @ p["b"]) + jnp.sum(p["amax"]), 2),
        (lambda p, x: jnp.mean(x @ p["a"] @ jax.lax.stop_gradient(p["b"])), 2),
    ],
    ids=["one microbatch", "a rule of its cotangent", "linear", "frozen"],
)
def test_others_are_not(loss, microbatches):
    with warnings.catch_warnings():
        warnings.simplefilter("error", octopipe.GradientWarning)
        _compiled(loss, microbatches)
