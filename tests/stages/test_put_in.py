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


def _rule(backward: Any) -> Any:
    """`x`, whose rule makes gradients of `x` and `s` of the cotangent."""
    f = jax.custom_vjp(lambda x, s: x)
    f.defvjp(lambda x, s: (x, s), lambda s, g: backward(g, s))
    return f


amax_of_gradient = _rule(lambda g, s: (g, jnp.max(jnp.abs(g))))
clipped_by_norm = _rule(lambda g, s: (g / jnp.maximum(1, jnp.linalg.norm(g)), jnp.zeros_like(s)))
clipped_by_row = _rule(
    lambda g, s: (
        g / jnp.maximum(1, jnp.linalg.norm(g, axis=-1, keepdims=True)),
        jnp.sum(jnp.clip(g, -0.1, 0.1)),
    )
)


@jax.custom_vjp
def clipped(w: jax.Array) -> jax.Array:
    """`w`, whose gradient is clipped: a sum over rows in each microbatch."""
    return w


clipped.defvjp(lambda w: (w, None), lambda _, g: (jnp.clip(g, -0.1, 0.1),))


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


def _stacked(rule: Any) -> Any:
    """The rule within a scan over layers, behind a cond and a checkpoint."""

    def layer(h: jax.Array, w: jax.Array, s: jax.Array) -> jax.Array:
        same = jax.lax.cond(jnp.sum(w) > 0, lambda h: rule(h, s), lambda h: 1 * h, h)
        return jnp.tanh(same @ w)

    def loss(p: Any, x: jax.Array) -> jax.Array:
        def body(h: jax.Array, w: jax.Array) -> tuple[jax.Array, None]:
            return jax.checkpoint(layer)(h, w, p["scale"]), None

        h, _ = jax.lax.scan(body, x @ p["b"], jnp.stack([p["a"]] * 3))
        return jnp.mean(h)

    return loss


@pytest.mark.parametrize(
    ("loss", "names"),
    [
        (
            lambda p, x: jnp.mean(amax_of_gradient(x @ p["a"], p["scale"]) @ p["b"]),
            "1 parameters .scale.",
        ),
        (lambda p, x: jnp.mean(x @ clipped(p["a"]) @ p["b"]), "1 parameters .a."),
        (
            lambda p, x: jnp.mean(clipped_by_norm(x @ p["a"], p["scale"]) @ p["b"]),
            "1 parameters .a.",
        ),
        (
            lambda p, x: jnp.mean(jnp.tanh(clipped_by_norm(x @ p["a"] @ p["b"], p["scale"]))),
            "2 parameters .a, b.",
        ),
        (_stacked(amax_of_gradient), "1 parameters .scale."),
        (_stacked(clipped_by_norm), "2 parameters .a, b."),
    ],
    ids=["amax", "parameter", "activation", "over stages", "amax in a scan", "norm in a scan"],
)
def test_gradients_that_mix_rows_are_named_with_the_line(loss, names):
    with pytest.warns(octopipe.GradientWarning, match=f"gradients of {names} are not sums") as said:
        _compiled(loss)
    assert [x.filename for x in said] == [__file__]
    assert "test_put_in.py:" in str(said[0].message)
    with pytest.raises(LossError, match="are not sums over the rows"):
        _compiled(loss, strict=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error", octopipe.GradientWarning)
        _compiled(loss, 1)


@pytest.mark.parametrize(
    ("loss", "microbatches"),
    [
        (puts_in, 1),
        (lambda p, x: jnp.mean(clipped_by_row(x @ p["a"], p["scale"]) @ p["b"]), 2),
        (_stacked(clipped_by_row), 2),
        (_stacked(scaled), 2),
        (lambda p, x: jnp.mean(scaled(x @ p["a"], p["scale"]) @ p["b"]), 2),
        (lambda p, x: jnp.mean(x @ p["a"] @ p["b"]) + jnp.sum(p["amax"]), 2),
        (lambda p, x: jnp.mean(x @ p["a"] @ jax.lax.stop_gradient(p["b"])), 2),
    ],
    ids=[
        "one microbatch",
        "by row",
        "by row in a scan",
        "linear in a scan",
        "a rule of its cotangent",
        "linear",
        "frozen",
    ],
)
def test_others_are_not(loss, microbatches):
    with warnings.catch_warnings():
        warnings.simplefilter("error", octopipe.GradientWarning)
        _compiled(loss, microbatches)
