"""Every kind of layer code: fused and split gradients equal those of the whole function."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from octojax.stages import Role, differentiate, kept_bytes
from tests.stages.chain import Piece, assert_gradients, forward_stages

D = 16


def normal(*shape, seed=0, dtype=jnp.float32):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape) * 0.5, dtype)


def rnn(params, batch, inputs):
    """Weights as constants of the scan; state in the carry."""
    wx, wh, b = params
    (x,) = inputs

    def step(h, x_t):
        h = jnp.tanh(x_t @ wx + h @ wh + b[None, :])
        return h, h

    return (jax.lax.scan(step, x[:, 0], jnp.swapaxes(x, 0, 1))[1].swapaxes(0, 1),)


def rnn_twice(params, batch, inputs):
    """A weight used twice in the body, once transposed."""
    (w,) = params

    def step(h, x_t):
        h = jnp.tanh(x_t @ w + h @ w.T)
        return h, h * 2

    return (jax.lax.scan(step, inputs[0][:, 0], jnp.swapaxes(inputs[0], 0, 1))[1].swapaxes(0, 1),)


def scanned_stack(params, batch, inputs):
    """Weights stacked over the scan's steps."""
    ws, bs = params

    def step(h, wb):
        return h + jnp.tanh(h @ wb[0] + wb[1]), None

    return (jax.lax.scan(step, inputs[0], (ws, bs[:, None, None, :]))[0],)


def nested_scan(params, batch, inputs):
    w, ws = params

    def outer(h, w_layer):
        def inner(c, x_t):
            c = jnp.tanh(c @ w_layer + x_t @ w)
            return c, c

        return jax.lax.scan(inner, jnp.zeros_like(h[0]), h)[1], None

    return (jax.lax.scan(outer, inputs[0], ws)[0],)


def chunked_head(params, batch, inputs):
    """A scan over chunks with a weight as constant and a sum in the carry."""
    (w,) = params
    chunks = inputs[0].reshape(4, -1, D)

    def step(total, chunk):
        return total + jax.nn.logsumexp(chunk @ w, axis=-1).sum(), None

    total = jax.lax.scan(step, jnp.float32(0), chunks)[0]
    return (inputs[0] * jnp.reshape(total, (1, 1, 1)),)


def branches(params, batch, inputs):
    w1, w2, w3 = params
    x = inputs[0]
    return (
        jax.lax.switch(
            (batch[1][0, 0] > 100).astype(int),
            [
                lambda: jnp.tanh(x @ w1),
                lambda: jax.nn.relu(x @ w2) @ w3,
            ],
        ),
    )


def other_branch(params, batch, inputs):
    w1, w2, w3 = params
    x = inputs[0]
    take = batch[1][0, 0] < 100
    return (jax.lax.cond(take, lambda: jax.nn.relu(x @ w2) @ w3, lambda: x @ w1),)


def skip_branch(params, batch, inputs):
    """One branch does nothing with the weight."""
    (w,) = params
    take = batch[1][0, 0] < 100
    return (jax.lax.cond(take, lambda x: jnp.sin(x @ w), lambda x: x, inputs[0]),)


def cond_in_scan(params, batch, inputs):
    w, v = params

    def step(h, i):
        return jax.lax.cond(i % 2 == 0, lambda h: jnp.tanh(h @ w), lambda h: h @ v + h, h), None

    return (jax.lax.scan(step, inputs[0], jnp.arange(3))[0],)


def checkpointed(policy, params, batch, inputs):
    w1, w2 = params

    @functools.partial(jax.checkpoint, policy=policy)
    def block(x):
        return x + jax.nn.gelu(x @ w1) @ w2

    return (block(block(inputs[0])),)


def checkpointed_scan(params, batch, inputs):
    (w,) = params

    @jax.checkpoint
    def step(h, _):
        return h + jnp.sin(h @ w) @ w, None

    return (jax.lax.scan(step, inputs[0], None, length=3)[0],)


@jax.custom_vjp
def doubled(x, w):
    return x @ w


doubled.defvjp(
    lambda x, w: (x @ w, (x, w)),
    lambda res, g: (2 * g @ res[1].T, 2 * jnp.einsum("bti,bto->io", res[0], g)),
)


def custom_backward(params, batch, inputs):
    """CASES 13: the user's backward doubles the gradient."""
    return (doubled(inputs[0], params[0]),)


def norm_swiglu(params, batch, inputs):
    scale, wg, wu, wd = params
    (x,) = inputs
    xn = x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6) * scale[None, None, :]
    return (x + (jax.nn.silu(xn @ wg) * (xn @ wu)) @ wd,)


def attention(params, batch, inputs):
    wq, wk, wv, wo = params
    (x,) = inputs
    q, k, v = (jnp.reshape(x @ w, (*x.shape[:2], 2, -1)) for w in (wq, wk, wv))
    s = jnp.einsum("bqhd,bkhd->bhqk", q, k)
    mask = jnp.tril(jnp.ones(s.shape[-2:], bool))
    p = jax.nn.softmax(jnp.where(mask[None, None], s, -1e9), axis=-1)
    return (x + jnp.einsum("bhqk,bkhd->bqhd", p, v).reshape(x.shape) @ wo,)


def routed(params, batch, inputs):
    """Top-1 routing with gather and scatter, every expert's weight stacked."""
    router, experts = params
    x = inputs[0].reshape(-1, D)
    gates = jax.nn.softmax(x @ router, -1)
    best = jnp.argmax(gates, -1)
    order = jnp.argsort(best)
    sizes = jnp.bincount(best, length=experts.shape[0])
    y = jax.lax.ragged_dot(x[order], experts, sizes.astype(jnp.int32))
    back = jnp.zeros_like(x).at[order].add(y)
    gate = jnp.take_along_axis(gates, best[:, None], 1)
    return ((x + back * gate).reshape(inputs[0].shape),)


def one_hot_routed(params, batch, inputs):
    router, experts = params
    gates, best = jax.lax.top_k(jax.nn.softmax(inputs[0] @ router, -1), 2)
    chosen = (jax.nn.one_hot(best, experts.shape[0]) * gates[..., None]).sum(-2)
    y = jnp.einsum("btd,edf,bte->btf", inputs[0], experts, chosen)
    return (inputs[0] + y,)


def depthwise(params, batch, inputs):
    (k,) = params
    x = jnp.pad(inputs[0], ((0, 0), (3, 0), (0, 0)))
    y = jax.lax.conv_general_dilated(
        x, k, (1,), "VALID", dimension_numbers=("NWC", "WIO", "NWC"), feature_group_count=D
    )
    return (jax.nn.silu(y),)


def convolution(params, batch, inputs):
    (k,) = params
    y = jax.lax.conv_general_dilated(
        inputs[0], k, (1,), "SAME", dimension_numbers=("NWC", "WIO", "NWC")
    )
    return (inputs[0] + jnp.tanh(y),)


def complex_layer(params, batch, inputs):
    w, phase = params
    z = jax.lax.complex(inputs[0], jnp.zeros_like(inputs[0])) @ w
    return (jnp.real(z * jnp.exp(1j * phase)[None, None, :]),)


def weight_normalized(params, batch, inputs):
    v, g = params
    w = g[None, :] * v / jnp.linalg.norm(v, axis=0, keepdims=True)
    return (jnp.tanh(inputs[0] @ w),)


def merged_lora(params, batch, inputs):
    w, a, b = params
    return (inputs[0] @ (w + a @ b),)


def nothing(params, batch, inputs):
    return (jnp.sin(inputs[0]),)


def dropout(params, batch, inputs):
    key = jax.random.fold_in(jax.random.wrap_key_data(batch[2]), 3)
    keep = jax.random.bernoulli(key, 0.7, inputs[0].shape)
    return (jnp.where(keep, inputs[0] @ params[0] / 0.7, 0.0),)


def jitted(params, batch, inputs):
    @jax.jit
    def inner(x, w):
        return jax.jit(jnp.tanh)(x @ w)

    return (inner(inner(inputs[0], params[0]), params[0]),)


KINDS = {
    "rnn": (rnn, [(D, D), (D, D), (D,)]),
    "rnn_twice": (rnn_twice, [(D, D)]),
    "scanned_stack": (scanned_stack, [(3, D, D), (3, D)]),
    "nested_scan": (nested_scan, [(D, D), (2, D, D)]),
    "chunked_head": (chunked_head, [(D, 24)]),
    "branches": (branches, [(D, D), (D, 2 * D), (2 * D, D)]),
    "other_branch": (other_branch, [(D, D), (D, 2 * D), (2 * D, D)]),
    "skip_branch": (skip_branch, [(D, D)]),
    "cond_in_scan": (cond_in_scan, [(D, D), (D, D)]),
    "checkpoint": (functools.partial(checkpointed, None), [(D, D), (D, D)]),
    "checkpoint_dots": (
        functools.partial(checkpointed, jax.checkpoint_policies.dots_saveable),
        [(D, D), (D, D)],
    ),
    "checkpointed_scan": (checkpointed_scan, [(D, D)]),
    "custom_vjp": (custom_backward, [(D, D)]),
    "swiglu": (norm_swiglu, [(D,), (D, 4 * D), (D, 4 * D), (4 * D, D)]),
    "attention": (attention, [(D, D)] * 4),
    "ragged": (routed, [(D, 3), (3, D, D)]),
    "top_k": (one_hot_routed, [(D, 3), (3, D, D)]),
    "depthwise": (depthwise, [(4, 1, D)]),
    "convolution": (convolution, [(3, D, D)]),
    "weight_normalized": (weight_normalized, [(D, D), (D,)]),
    "lora": (merged_lora, [(D, D), (D, 4), (4, D)]),
    "nothing": (nothing, []),
    "dropout": (dropout, [(D, D)]),
    "jitted": (jitted, [(D, D)]),
}


def embed(params, batch, inputs):
    return (params[0][batch[0]],)


def loss(params, batch, inputs):
    return (jnp.mean((inputs[0] @ params[0] - batch[1][..., None]) ** 2),)


def model(kind):
    run, shapes = KINDS[kind]
    units = tuple(range(1, len(shapes) + 1))
    pieces = [Piece(embed, (0,)), Piece(run, units), Piece(loss, (len(shapes) + 1,))]
    params = [normal(*s, seed=i) for i, s in enumerate([(11, D), *shapes, (D, D)])]
    rng = np.random.default_rng(7)
    batch = (
        jnp.asarray(rng.integers(0, 11, (2, 8))),
        normal(2, 8, seed=5),
        jax.random.key_data(jax.random.key(1)),
    )
    return pieces, params, batch


@pytest.mark.parametrize("kind", KINDS)
def test_middle_stage(kind):
    pieces, params, batch = model(kind)
    stages = differentiate(forward_stages(pieces, params, batch))
    assert_gradients(stages, pieces, params, batch, tolerance=2e-6)


@pytest.mark.parametrize("kind", ["nested_scan", "branches", "checkpoint", "ragged", "dropout"])
def test_recomputing_stage(kind):
    pieces, params, batch = model(kind)
    stages = differentiate(forward_stages(pieces, params, batch), None, (False, True, True))
    modes = ("fused", "split", "split+R")
    assert_gradients(stages, pieces, params, batch, tolerance=2e-6, modes=modes)
    assert not any(w.role is Role.RESIDUAL for w in stages[1].forward.writes)


LOOPS_WITH_DEFERRED_WEIGHTS = (
    "rnn",
    "rnn_twice",
    "scanned_stack",
    "nested_scan",
    "branches",
    "other_branch",
    "skip_branch",
    "checkpointed_scan",
)


@pytest.mark.parametrize("kind", LOOPS_WITH_DEFERRED_WEIGHTS)
def test_weight_gradients_leave_the_loop(kind):
    pieces, params, batch = model(kind)
    stage = differentiate(forward_stages(pieces, params, batch))[1]
    matrices = [w.index for w in stage.backward.writes if w.role is Role.PARAM_GRAD]
    matrices = [i for i in matrices if sum(n > 3 for n in params[i].shape) >= 2]
    late = [w.index for w in stage.weight_grad.writes]
    assert set(matrices) <= set(late)
    assert kept_bytes(stage) > 0
