"""Gradients that rules of the user's make, also of no cotangent, against `jax.grad`."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from octojax.stages import Role, differentiate
from tests.stages.chain import Piece, assert_gradients, forward_stages

D = 4


def rule(forward, backward):
    """A custom_vjp function of `(x, p)` that returns `x`; `backward(x, p, g)` its gradients."""

    @jax.custom_vjp
    def f(x, p):
        return forward(x, p)

    f.defvjp(lambda x, p: (forward(x, p), (x, p)), lambda kept, g: backward(*kept, g))
    return f


def keep(x, p):
    return x


RULES = {
    "value of the forward": rule(keep, lambda x, p, g: (g, jnp.max(jnp.abs(x)) * jnp.ones_like(p))),
    "number": rule(keep, lambda x, p, g: (g, jnp.full_like(p, 3.0))),
    "the parameter itself": rule(keep, lambda x, p, g: (g, p)),
    "to the input": rule(keep, lambda x, p, g: (x, jnp.zeros_like(p))),
    "the input itself": rule(keep, lambda x, p, g: (x, p)),
    "zeros to the input": rule(keep, lambda x, p, g: (jnp.zeros_like(x), jnp.sum(x) + p)),
    "nothing to the input": rule(keep, lambda x, p, g: (None, jnp.sum(x) + p)),
    "added": rule(keep, lambda x, p, g: (g + 0.1 * x, jnp.sum(g) + p)),
    "straight through": rule(
        lambda x, p: jnp.round(x) * p, lambda x, p, g: (g, jnp.sum(g * x) + 0 * p)
    ),
    "scaled": rule(keep, lambda x, p, g: (2 * g, jnp.zeros_like(p))),
}


def pieces_of(some, wrapped):
    """Three stages; a rule in each, whose effects the others see."""

    def dense(x, w):
        return jnp.tanh(x @ w)

    def first(params, batch, inputs):
        w, p = params
        return (wrapped(some)(dense(batch[0], w), p),)

    def middle(params, batch, inputs):
        w, p = params
        return (dense(wrapped(some)(inputs[0], p), w),)

    def last(params, batch, inputs):
        w, p = params
        return (jnp.mean(wrapped(some)(dense(inputs[0], w), p) ** 2),)

    return [Piece(first, (0, 1)), Piece(middle, (2, 3)), Piece(last, (4, 5))]


def in_scan(f):
    """The rule twice over in a loop, as in a recurrence."""

    def run(x, p):
        return jax.lax.scan(lambda h, _: (f(h * 0.5, p), None), x, length=2)[0]

    return run


WRAPPED = {"plain": lambda f: f, "scan": in_scan, "checkpoint": jax.checkpoint, "jit": jax.jit}


def values(p_shape):
    rng = np.random.default_rng(0)
    params = []
    for _ in range(3):
        params += [rng.normal(size=(D, D)) / 2, rng.normal(size=p_shape)]
    return [jnp.asarray(p, jnp.float32) for p in params], (
        jnp.asarray(rng.normal(size=(2, D)), jnp.float32),
    )


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("wrapped", WRAPPED)
def test_rules(name, wrapped):
    params, batch = values(())
    pieces = pieces_of(RULES[name], WRAPPED[wrapped])
    for recompute in (False, True):
        stages = differentiate(forward_stages(pieces, params, batch), None, (recompute,) * 3)
        modes = ("fused", "split", "split+R")[: 3 if recompute else 2]
        assert_gradients(stages, pieces, params, batch, modes=modes)


def test_a_derivative_that_nobody_asks_for_calls_no_rule():
    """JAX calls no rule behind a `stop_gradient`; behind one that returns zeros it does."""

    def first(params, batch, inputs):
        return (RULES["number"](batch[0] @ params[0], params[1]),)

    def stopped(params, batch, inputs):
        return (jnp.mean(jnp.sign(inputs[0]) @ params[0]),)

    params, batch = values(())
    pieces = [Piece(first, (0, 1)), Piece(stopped, (2,))]
    stages = differentiate(forward_stages(pieces, params, batch))
    assert_gradients(stages, pieces, params, batch)
    assert not stages[0].backward.writes


def test_a_rule_behind_nothing_but_silence_is_called():
    """The last stage asks for the derivative and has no gradient to give."""

    def first(params, batch, inputs):
        return (RULES["number"](batch[0] @ params[0], params[1]),)

    def silent(params, batch, inputs):
        return (jnp.sum(RULES["nothing to the input"](inputs[0], params[0])),)

    params, batch = values(())
    pieces = [Piece(first, (0, 1)), Piece(silent, (3,))]
    for recompute in (False, True):
        stages = differentiate(forward_stages(pieces, params, batch), None, (recompute,) * 2)
        assert_gradients(stages, pieces, params, batch)
    assert not any(r.role is Role.OUTPUT_GRAD for r in stages[0].backward.reads)
