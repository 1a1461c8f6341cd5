"""Losses that go over chunks of their batch: which rows a chunk holds depends on the microbatch."""

from collections.abc import Callable
from functools import cache
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
from tests.rows.test_whole import D, batch, features, losses, mask, params, whole_batch
from tests.rows.test_whole import quick_compilation as quick_compilation

COEFFICIENTS = jnp.array([1.0, 2.0])


def chunks(b: Any, count: int = 2) -> jax.Array:
    return b["x"].reshape(count, -1, D)


def squares(p: Any, x: jax.Array) -> jax.Array:
    return jnp.tanh(x @ p["w"]) ** 2


def mean_of(p: Any) -> Callable[[jax.Array], jax.Array]:
    return lambda x: jnp.mean(squares(p, x))


def counted(p: Any, b: Any, rows: jax.Array) -> jax.Array:
    """The number of the iteration is a coefficient."""
    step = lambda c, x: ((c[0] + 1, c[1] + c[0] * jnp.mean(squares(p, x))), None)  # noqa: E731
    return lax.scan(step, (1.0, 0.0), rows)[0][1]


def masked_chunks(p: Any, b: Any) -> jax.Array:
    weights = 1 + mask(b).sum(1)
    parts = [a.reshape(2, -1, *a.shape[1:]) for a in (b["x"], weights)]
    mean = lambda a: jnp.average(squares(p, a[0]).sum(-1), weights=a[1])  # noqa: E731
    return jnp.mean(lax.map(mean, tuple(parts)))


def masked_by_all(p: Any, b: Any) -> jax.Array:
    """Chunks divided by the count of the whole batch."""
    count = mask(b).sum()
    part = lambda t: (losses(p, {"t": t}) * mask({"t": t})).sum() / count  # noqa: E731
    return lax.map(part, b["t"].reshape(2, -1, b["t"].shape[1])).sum()


EXACT = {
    "mean of means": lambda p, b: jnp.mean(lax.map(mean_of(p), chunks(b))),
    "checkpointed": lambda p, b: jnp.mean(lax.map(jax.checkpoint(mean_of(p)), chunks(b))),
    "vmap": lambda p, b: jnp.mean(jax.vmap(mean_of(p))(chunks(b)) + 1),
    "by size": lambda p, b: jnp.mean(lax.map(lambda c: squares(p, c).sum() / len(c), chunks(b))),
    "more behind": lambda p, b: 2 - 3 * jnp.sum(lax.map(mean_of(p), chunks(b)) - 1),
    "carried": lambda p, b: (
        lax.scan(lambda t, c: (t + mean_of(p)(c), None), jnp.sum(p["w"]), chunks(b))[0] / 2
    ),
    "nested": lambda p, b: jnp.mean(
        lax.map(lambda c: jnp.mean(lax.map(mean_of(p), c.reshape(2, -1, D))), chunks(b, 1))
    ),
    "as many as rows allow": lambda p, b: jnp.mean(lax.map(mean_of(p), b["x"].reshape(-1, 2, D))),
    "strided": lambda p, b: (
        lax.map(mean_of(p), b["x"].reshape(-1, 2, D).swapaxes(0, 1)) @ COEFFICIENTS
    ),
    "and back": lambda p, b: jnp.mean(
        lax.map(lambda c: jnp.tanh(c @ p["w"]), chunks(b)).reshape(-1, D) * b["x"]
    ),
    "by the count of all": masked_by_all,
    "tiled": lambda p, b: jnp.mean(
        squares(p, b["x"]).reshape(-1) * jnp.tile(jnp.arange(float(D)), len(b["x"]))
    ),
    "two views": lambda p, b: jnp.mean(
        squares(p, jnp.concatenate([b["x"], b["x"] + 1]))
        * jnp.repeat(COEFFICIENTS, len(b["x"]))[:, None]
    ),
}

MIXING = {
    "a coefficient for each": lambda p, b: jnp.sum(
        squares(p, chunks(b)) * COEFFICIENTS[:, None, None]
    ),
    "behind": lambda p, b: squares(p, chunks(b)).mean((1, 2)) @ COEFFICIENTS,
    "einsum": lambda p, b: jnp.einsum("crd,c->", squares(p, chunks(b)), COEFFICIENTS),
    "scanned": lambda p, b: jnp.sum(
        lax.map(lambda a: a[1] * jnp.mean(squares(p, a[0])), (chunks(b), COEFFICIENTS))
    ),
    "counted": lambda p, b: counted(p, b, chunks(b)),
    "counted rows": lambda p, b: counted(p, b, b["x"]),
    "masked in each": masked_chunks,
    "largest of means": lambda p, b: squares(p, chunks(b)).mean(1).max(-1).mean(),
    "sorted means": lambda p, b: jnp.sort(squares(p, chunks(b)).mean(1), axis=-1)[:, 0].mean(),
    "a mean for each row": lambda p, b: jnp.mean(
        jnp.broadcast_to(squares(p, chunks(b)).mean(1, keepdims=True), chunks(b).shape)
    ),
    "root": lambda p, b: jnp.mean(lax.map(lambda c: jnp.sqrt(mean_of(p)(c)), chunks(b))),
    "one of them": lambda p, b: lax.map(mean_of(p), chunks(b))[0],
    "repeated": lambda p, b: jnp.mean(
        features(p, b).reshape(-1) * jnp.repeat(jnp.arange(float(D)), len(b["x"]))
    ),
}


@cache
def plain() -> dict[str, Any]:
    """Values and gradients by plain JAX, compiled together."""
    run = lambda p, b: {k: jax.value_and_grad(f)(p, b) for k, f in EXACT.items()}  # noqa: E731
    return jax.jit(run)(params(), batch())


@pytest.mark.parametrize("name", EXACT)
def test_chunks_add_up(name):
    whole = whole_batch(EXACT[name], batch(), 2 if name == "nested" else 4)
    whole.check()  # a warning is an error here
    value, _, grads, _ = by_microbatches(whole, params(), None, batch())
    assert relative_error((value, grads), plain()[name]) < 2e-6


@pytest.mark.parametrize("name", MIXING)
def test_what_depends_on_the_chunk_of_a_row_is_told(name):
    with pytest.warns(RowsWarning, match="not of the whole batch"):
        whole_batch(MIXING[name], batch(), 4).check()


@given(
    chunks_=st.integers(1, 3),
    per_chunk=st.integers(1, 2),
    microbatches=st.integers(2, 3),
    shards=st.integers(1, 2),
    order=st.permutations(range(3)),
    views=st.booleans(),
)
@settings(max_examples=6)
def test_rows_of_aux_come_back_in_the_chunks_of_the_whole_batch(
    chunks_, per_chunk, microbatches, shards, order, views
):
    def loss(p: Any, b: Any) -> Any:
        x = jnp.concatenate([b["x"], -b["x"]]) if views else b["x"]
        dealt = x.reshape(chunks_, -1, D)
        return jnp.mean(squares(p, x)), {
            "moved": dealt.transpose(order),
            "strided": x.reshape(-1, chunks_, D).transpose(order),
            "labels": jnp.broadcast_to(jnp.arange(float(D)), dealt.shape) + dealt,
        }

    rows = chunks_ * per_chunk * microbatches * shards
    b = {"x": jax.random.normal(jax.random.key(rows), (rows, D))}
    whole = whole_batch(loss, b, microbatches, shards)
    aux = by_microbatches(whole, params(), None, b)[1]
    assert jax.tree.map(jnp.shape, aux) == jax.tree.map(jnp.shape, loss(params(), b)[1])
    assert relative_error(aux, loss(params(), b)[1]) == 0


def test_what_is_behind_a_warning_is_of_the_microbatches():
    """A masked mean within a chunk is no quantity of the whole batch: chunks hold other rows."""
    b = batch()
    whole = whole_batch(masked_chunks, b, 4)
    value, _, grads, _ = by_microbatches(whole, params(), None, b)
    parts = [
        jax.tree.map(lambda x, m=m: x[2 * m : 2 * m + 2] if x.ndim else x, b) for m in range(4)
    ]
    wanted = jax.value_and_grad(lambda p: sum(masked_chunks(p, part) for part in parts) / 4)
    assert relative_error((value, grads), wanted(params())) < 2e-6
