"""How much work and memory the programs of a stage take, by XLA's own count and by their types."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.extend.core import jaxpr_as_fun

from octojax.stages import differentiate, input_bytes, kept_bytes, residual_bytes
from tests.stages.chain import Piece, assert_gradients, forward_stages

D = 32


def normal(*shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape) * 0.3, jnp.float32)


def operations(program):
    shapes = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in program.jaxpr.in_avals]
    cost = jax.jit(jaxpr_as_fun(program.jaxpr)).lower(*shapes).compile().cost_analysis()
    return (cost[0] if isinstance(cost, list) else cost)["flops"]


def middle(run, shapes, recompute=False, width=D):
    """Returns the stage between an embedding and a mean, and what to check it with."""
    units = tuple(range(1, len(shapes) + 1))
    pieces = [
        Piece(lambda p, b, i: (b[0] @ p[0],), (0,)),
        Piece(run, units),
        Piece(lambda p, b, i: (jnp.mean(i[0] ** 2),), ()),
    ]
    params = [normal(*s, seed=i) for i, s in enumerate([(width, width), *shapes])]
    batch = (normal(2, 64, width, seed=9),)
    stages = differentiate(forward_stages(pieces, params, batch), None, (False, recompute, False))
    return stages, pieces, params, batch


def matmuls(p, batch, inputs):
    h = inputs[0]
    for w in p:
        h = h @ w
    return (h,)


def squared_relu(p, batch, inputs):
    return (inputs[0] + jnp.square(jax.nn.relu(inputs[0] @ p[0])) @ p[1],)


def swiglu(p, batch, inputs):
    (x,) = inputs
    xn = x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6) * p[3][None, None]
    return (x + (jax.nn.silu(xn @ p[0]) * (xn @ p[1])) @ p[2],)


def scanned(p, batch, inputs):
    def step(c, x):
        c = jnp.tanh(c @ p[0] + x @ p[1])
        return c, c

    return (jax.lax.scan(step, inputs[0][:, 0], inputs[0].swapaxes(0, 1))[1].swapaxes(0, 1),)


HIDDEN = [(D, 4 * D), (4 * D, D)]
GATED = [(D, 4 * D), (D, 4 * D), (4 * D, D), (D,)]


@pytest.mark.parametrize(
    ("run", "shapes"),
    [(matmuls, [(D, D)] * 3), (squared_relu, HIDDEN), (swiglu, GATED)],
)
def test_splitting_adds_no_work(run, shapes):
    (_, stage, _), *_ = middle(run, shapes)
    forward, fused = operations(stage.forward), operations(stage.backward)
    split = operations(stage.input_grad) + operations(stage.weight_grad)
    assert forward + split == pytest.approx(forward + fused, rel=0.02)


def test_a_matmul_layer_takes_three_units_and_at_most_four_with_recompute():
    (_, stage, _), *_ = middle(matmuls, [(D, D)] * 3)
    (_, again, _), *_ = middle(matmuls, [(D, D)] * 3, recompute=True)
    unit = operations(again.forward)
    assert unit == pytest.approx(3 * 2 * 128 * D * D, rel=0.01)
    assert operations(stage.forward) + operations(stage.backward) == pytest.approx(
        3 * unit, rel=0.01
    )
    redone = operations(again.forward) + operations(again.backward)
    # The last product is no operand of any gradient, so it is not computed again.
    assert redone == pytest.approx((4 - 1 / 3) * unit, rel=0.01)
    rebuilt = operations(again.recompute) + operations(again.backward_after_recompute)
    assert unit + rebuilt == pytest.approx((4 - 1 / 3) * unit, rel=0.01)


@pytest.mark.parametrize(
    ("run", "shapes", "residual", "kept"),
    [
        # kept: hidden values, their gradients, the output's gradient. The operand of the first
        # product is the stage's input or follows from it by a multiplication, and costs nothing.
        (squared_relu, HIDDEN, 4, 4 + 4 + 1),
        (swiglu, GATED, 12, 4 + 4 + 4 + 1),
        (matmuls, [(D, D)] * 2, 1, 1 + 1 + 1),
    ],
)
def test_bytes_are_the_textbooks(run, shapes, residual, kept):
    (_, stage, _), *_ = middle(run, shapes)
    size = input_bytes(stage)
    assert kept_bytes(stage) / size == pytest.approx(kept, rel=0.05)
    assert residual_bytes(stage) / size <= residual + 0.1


def test_a_recurrence_stores_its_states_once():
    (_, stage, _), *_ = middle(scanned, [(D, D)] * 2)
    # states before and after each step differ by one shift, and are two stacks
    assert residual_bytes(stage) <= 3 * input_bytes(stage)
    assert kept_bytes(stage) <= 4 * input_bytes(stage)


def looped(w, x):
    return jax.lax.scan(lambda h, _: (jnp.tanh(h @ w), None), x, None, length=2)[0]


BLOCKS = {
    "dense": lambda w, v, x: x @ w,
    "bias": lambda w, v, x: x + v[None, None],
    "tanh": lambda w, v, x: jnp.tanh(x),
    "norm": lambda w, v, x: x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-3),
    "scale": lambda w, v, x: x * v[None, None],
    "transposed": lambda w, v, x: jnp.sin(x @ w.T) + x,
    "loop": lambda w, v, x: looped(w, x),
    "branch": lambda w, v, x: jax.lax.cond(v[0] > 0, lambda x: x @ w, lambda x: x * 2, x),
    "remat": lambda w, v, x: x + jax.checkpoint(lambda x, w: jnp.sin(x @ w) @ w)(x, w),
    "mix": lambda w, v, x: jnp.einsum("bij,bkj->bik", x @ w, x)[:, :, :8] * 0.1,
}


@settings(deadline=None, max_examples=8, derandomize=True)
@given(
    st.lists(st.sampled_from(sorted(BLOCKS)), min_size=1, max_size=4),
    st.booleans(),
    st.booleans(),
)
def test_any_composition_keeps_its_gradients(names, shared, recompute):
    """Random stages; with `shared` all blocks use the same weight."""
    width = 8
    count = 1 if shared else len(names)

    def run(p, batch, inputs):
        h = inputs[0][:, :width]
        for at, name in enumerate(names):
            w, v = p[2 * (at % count)], p[2 * (at % count) + 1]
            h = BLOCKS[name](w, v, h)
        return (h,)

    case = middle(run, [(width, width), (width,)] * count, recompute, width)
    assert_gradients(*case, tolerance=5e-6)
