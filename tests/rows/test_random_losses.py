"""Losses composed at random: without a warning, they are those of the whole batch.

The pieces mix rows, time, chunks and counts in ways that real losses do, and in some that they do
not. A warning may come where it need not; a number without one must be right.
"""

import warnings
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax

from octojax.api.reference import by_microbatches
from octojax.errors import RowsWarning
from tests.pipelines import relative_error
from tests.rows.test_whole import D, V, batch, fused, mask, params, whole_batch
from tests.rows.test_whole import quick_compilation as quick_compilation

CHUNK = jnp.array([1.0, 2.0])


def weights(b: Any) -> jax.Array:
    return mask(b).sum(1)


def in_chunks(h: jax.Array) -> jax.Array:
    return h.reshape(2, -1, *h.shape[1:])


LAYERS = {
    "dense": lambda p, b, h: jnp.tanh(h @ p["w"]),
    "checkpoint": lambda p, b, h: jax.checkpoint(lambda x: jnp.sin(x @ p["w"]))(h),
    "norm": lambda p, b, h: h / jnp.sqrt((h**2).mean(-1, keepdims=True) + 1e-2),
    "softmax": lambda p, b, h: jax.nn.softmax(h),
    "flat": lambda p, b, h: jnp.tanh(h.reshape(-1)).reshape(h.shape),
    "embedding": lambda p, b, h: h + p["embed"][b["t"][:, 0]],
    "stack": lambda p, b, h: lax.scan(
        lambda x, w: (jnp.tanh(x @ w), None), h, jnp.stack([p["w"], p["w"].T])
    )[0],
    "rows": lambda p, b, h: lax.map(lambda r: jnp.tanh(r @ p["w"]), h),
    "chunks": lambda p, b, h: lax.map(lambda r: jnp.tanh(r @ p["w"]), in_chunks(h)).reshape(-1, D),
    "cond": lambda p, b, h: lax.cond(b["scale"] > 0, jnp.tanh, lambda x: x, h),
    "position": lambda p, b, h: h * jnp.arange(1.0, len(h) + 1)[:, None],
    "two views": lambda p, b, h: jnp.split(jnp.concatenate([h, jnp.tanh(h)]), 2)[1],
    "standardized": lambda p, b, h: (h - b["x"].mean(0)) / b["x"].std(0),
    "frequencies": lambda p, b, h: h / jnp.zeros(V).at[b["t"][:, 0]].add(1.0)[b["t"][:, :1]],
    "pairs of rows": lambda p, b, h: (
        h.reshape(-1, 2, D) - h.reshape(-1, 2, D).mean(1, keepdims=True)
    ).reshape(-1, D),
    "rolled": lambda p, b, h: jnp.roll(h, 1, 0),
    "centered": lambda p, b, h: h - h.mean(0),
    "along rows": lambda p, b, h: jnp.cumsum(h, 0),
    "by chunk": lambda p, b, h: (in_chunks(h) * CHUNK[:, None, None]).reshape(-1, D),
    "running count": lambda p, b, h: h * jnp.cumsum(jnp.ones(len(h)))[:, None],
}

ROWS = {
    "cross entropy": lambda p, b, h: (
        -jnp.take_along_axis(jax.nn.log_softmax(h @ p["out"]), b["t"][:, :1], 1)[:, 0]
    ),
    "by index": lambda p, b, h: -jax.nn.log_softmax(h @ p["out"])[jnp.arange(len(h)), b["t"][:, 1]],
    "squares": lambda p, b, h: (h**2).sum(-1),
    "largest": lambda p, b, h: (h @ p["out"]).max(-1),
    "logsumexp": lambda p, b, h: jax.nn.logsumexp(h, -1),
}

REDUCTIONS = {
    "mean": lambda p, b, x: x.mean(),
    "sum": lambda p, b, x: x.sum(),
    "masked": lambda p, b, x: (x * weights(b)).sum() / weights(b).sum(),
    "average": lambda p, b, x: jnp.average(x, weights=1 + weights(b)),
    "where": lambda p, b, x: jnp.mean(x, where=weights(b) > 1),
    "custom": lambda p, b, x: fused(x, weights(b)),
    "softmax of data": lambda p, b, x: x @ jax.nn.softmax(b["x"][:, 0]),
    "means of chunks": lambda p, b, x: lax.map(jnp.mean, in_chunks(x)).mean(),
    "carried": lambda p, b, x: lax.scan(lambda t, c: (t + c.mean(), None), 0.0, in_chunks(x))[0],
    "masked in chunks": lambda p, b, x: jax.vmap(lambda c, m: jnp.average(c, weights=1 + m))(
        in_chunks(x), in_chunks(weights(b))
    ).mean(),
    "strided": lambda p, b, x: lax.map(jnp.mean, x.reshape(-1, 2).T) @ CHUNK,
    "by chunk": lambda p, b, x: in_chunks(x).mean(1) @ CHUNK,
    "counted": lambda p, b, x: lax.scan(lambda c, r: ((c[0] + 1, c[1] + c[0] * r), None),
                                        (1.0, 0.0), x)[0][1],
    "per class": lambda p, b, x: (
        jax.ops.segment_sum(x, b["t"][:, 0], V) / (1 + jnp.zeros(V).at[b["t"][:, 0]].add(1.0))
    ).mean(),
    "mean in cond": lambda p, b, x: lax.cond(
        b["scale"] > 0, lambda m: 2 * m, lambda m: m, x.mean()
    ),
    "mean in checkpoint": lambda p, b, x: jax.checkpoint(lambda m: 2 * m)(x.mean()),
    "mean in scan": lambda p, b, x: (
        lambda m: lax.scan(lambda t, w: (t + w * m, None), 0.0, CHUNK)[0]
    )(x.mean()),
    "of all ones": lambda p, b, x: jnp.mean(jnp.ones((x.size, x.size)) @ x),
    "power": lambda p, b, x: jnp.mean(x**x.size),
    "repeated": lambda p, b, x: jnp.repeat(x, 2) @ jnp.repeat(CHUNK, x.size),
    "half": lambda p, b, x: x[: x.size // 2].mean(),
    "log": lambda p, b, x: jnp.log(1 + (x**2).mean()),
    "logsumexp": lambda p, b, x: jax.nn.logsumexp(x),
    "penalized": lambda p, b, x: x.mean() * 2 + 0.1 * jnp.sum(p["w"] ** 2),
}  # fmt: skip

terms = st.tuples(
    st.lists(st.sampled_from(sorted(LAYERS)), max_size=2),
    st.sampled_from(sorted(ROWS)),
    st.sampled_from(sorted(REDUCTIONS)),
)


def composed(parts: Any) -> Any:
    def loss(p: Any, b: Any) -> jax.Array:
        total = jnp.float32(0)
        for scale, (layers, row, reduction) in enumerate(parts, 1):
            h = jnp.tanh(b["x"] @ p["w"])
            for name in layers:
                h = LAYERS[name](p, b, h)
            total = total + scale * REDUCTIONS[reduction](p, b, ROWS[row](p, b, h))
        return total

    return loss


def assert_right_or_told(loss: Any, microbatches: int, shards: int = 1) -> None:
    b = batch()
    whole = whole_batch(loss, b, microbatches, shards)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always", RowsWarning)
        whole.check()
    if told:
        return
    value, _, grads, _ = by_microbatches(whole, params(), None, b)
    wanted = jax.jit(jax.value_and_grad(loss))(params(), b)
    assert relative_error((value, grads), wanted) < 1e-5


@given(parts=st.lists(terms, min_size=1, max_size=2), cut=st.sampled_from([(2, 1), (4, 1), (2, 2)]))
@settings(max_examples=5, deadline=None, derandomize=True)
def test_a_loss_is_right_or_its_rows_are_told(parts, cut):
    assert_right_or_told(composed(parts), *cut)


UNSEEN = ("mean in cond", "mean in scan", "of all ones", "power", "repeated", "by chunk", "counted")


@pytest.mark.parametrize("name", UNSEEN)
def test_coefficients_that_no_factor_of_the_result_shows_are_told(name):
    with pytest.warns(RowsWarning):
        whole_batch(composed([([], "squares", name)]), batch(), 4).check()


def test_a_loss_that_each_layer_adds_to_is_exact():
    def loss(p: Any, b: Any) -> jax.Array:
        step = lambda c, w: ((jnp.tanh(c[0] @ w), c[1] + (c[0] ** 2).mean()), None)  # noqa: E731
        (h, more), _ = lax.scan(step, (b["x"], 0.0), jnp.stack([p["w"], p["w"].T]))
        return h.mean() + more

    whole_batch(loss, batch(), 4, strict=True).check()
    assert_right_or_told(loss, 4)


def test_coefficients_before_a_checkpoint_and_counts_of_rows_are_exact():
    parts = [(["running count"], "squares", "mean in checkpoint"), ([], "logsumexp", "sum")]
    whole_batch(composed(parts), batch(), 4, strict=True).check()
    assert_right_or_told(composed(parts), 4)
