"""Losses of microbatches, rewritten so that they add up, against plain JAX on the whole batch."""

from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octojax.api.options import Options
from octojax.api.reference import by_microbatches
from octojax.api.whole_batch import WholeBatch, user_line
from octojax.errors import LossError, RowsWarning
from octojax.frontends import adapt
from octojax.programs.microbatch import plan_microbatches
from tests.pipelines import relative_error

D, T, V, ROWS = 4, 5, 7, 8


@pytest.fixture(autouse=True, scope="module")
def quick_compilation():
    """Each program runs once."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


def params() -> dict[str, jax.Array]:
    keys = jax.random.split(jax.random.key(0), 3)
    return {
        "embed": jax.random.normal(keys[0], (V, D)),
        "w": jax.random.normal(keys[1], (D, D)),
        "out": jax.random.normal(keys[2], (D, V)),
    }


def batch(rows: int = ROWS, seed: int = 1) -> dict[str, jax.Array]:
    """Padded tokens (0 is padding), some rows of which are nothing else, and features."""
    rng = np.random.default_rng(seed)
    tokens = rng.integers(1, V, (rows, T + 1)) * (
        np.arange(T + 1) < rng.integers(0, T + 2, (rows, 1))
    )
    tokens[0, :] = 3
    x = jnp.asarray(rng.normal(size=(rows, D)), jnp.float32)
    return {"t": jnp.asarray(tokens), "x": x, "scale": jnp.float32(0.3)}


def losses(p: Any, b: Any) -> jax.Array:
    """The cross entropy of every token: (rows, T)."""
    h = jnp.tanh(p["embed"][b["t"][:, :-1]] @ p["w"])
    logp = jax.nn.log_softmax(h @ p["out"])
    return -jnp.take_along_axis(logp, b["t"][:, 1:, None], axis=-1)[..., 0]


def mask(b: Any) -> jax.Array:
    return (b["t"][:, 1:] > 0).astype(jnp.float32)


def masked(p: Any, b: Any) -> jax.Array:
    return (losses(p, b) * mask(b)).sum() / mask(b).sum()


def features(p: Any, b: Any) -> jax.Array:
    return jnp.tanh(b["x"] @ p["w"])


def chunked(p: Any, b: Any) -> jax.Array:
    """Sums over a fixed number of chunks of rows, one after the other."""

    @jax.checkpoint
    def add(carry: Any, part: Any) -> tuple[Any, None]:
        more = losses(p, {"t": part}), mask({"t": part})
        return (carry[0] + (more[0] * more[1]).sum(), carry[1] + more[1].sum()), None

    parts = b["t"].reshape(2, -1, T + 1)
    (total, count), _ = jax.lax.scan(add, (jnp.float32(0), jnp.float32(0)), parts)
    return total / jnp.maximum(count, 1)


def mapped_rows(p: Any, b: Any) -> jax.Array:
    """`lax.map` over the rows themselves."""
    each = jax.lax.map(
        lambda row: (losses(p, {"t": row[None]}) * mask({"t": row[None]})).sum(), b["t"]
    )
    return each.sum() / mask(b).sum()


@jax.custom_vjp
def fused(values: jax.Array, weights: jax.Array) -> jax.Array:
    return (values * weights).sum() / jnp.maximum(weights.sum(), 1)


fused.defvjp(
    lambda v, w: (fused(v, w), w),
    lambda w, g: (g * w / jnp.maximum(w.sum(), 1), jnp.zeros_like(w)),
)


def two_terms(p: Any, b: Any) -> jax.Array:
    away = 1 - mask(b)
    more = (losses(p, b) * away).sum() / (1 + away.sum())
    return masked(p, b) + 0.1 * jnp.mean(losses(p, b) ** 2) - 0.01 * more


def penalized(p: Any, b: Any) -> jax.Array:
    return masked(p, b) + 1e-2 * sum(jnp.sum(w**2) for w in jax.tree.leaves(p)) - 3


def balanced(p: Any, b: Any) -> jax.Array:
    """Weights from the frequencies of labels in the whole batch."""
    label = b["t"][:, 1]
    count = jnp.zeros(V).at[label].add(1.0)
    return jnp.mean(losses(p, b)[:, 0] / count[label])


def standardized(p: Any, b: Any) -> jax.Array:
    x = (b["x"] - b["x"].mean(0, keepdims=True)) / b["x"].std(0, keepdims=True)
    return jnp.mean(jnp.tanh(x @ p["w"]) ** 2)


def by_index(p: Any, b: Any) -> jax.Array:
    logp = jax.nn.log_softmax(features(p, b) @ p["out"])
    return -jnp.mean(logp[jnp.arange(b["x"].shape[0]), b["t"][:, 0]])


def first_half(p: Any, b: Any) -> jax.Array:
    """The position of a row in the whole batch counts."""
    early = jnp.arange(b["x"].shape[0])[:, None] < ROWS // 2
    return jnp.mean(features(p, b) * jnp.where(early, 2.0, 1.0))


EXACT = {
    "mean": lambda p, b: losses(p, b).mean(),
    "sum": lambda p, b: losses(p, b).sum(),
    "masked": masked,
    "masked, at least one": lambda p, b: (
        (losses(p, b) * mask(b)).sum() / jnp.maximum(mask(b).sum(), 1)
    ),
    "where": lambda p, b: jnp.mean(losses(p, b), where=b["t"][:, 1:] > 0),
    "average": lambda p, b: jnp.average(losses(p, b), weights=mask(b)),
    "einsum": lambda p, b: jnp.einsum("bt,bt->", losses(p, b), mask(b)) / mask(b).sum(),
    "weights first": lambda p, b: (losses(p, b) * (mask(b) / mask(b).sum())).sum(),
    "divided first": lambda p, b: (losses(p, b) / b["t"].shape[0]).sum(),
    "per row": lambda p, b: ((losses(p, b) * mask(b)).sum(1) / (1 + mask(b).sum(1))).mean(),
    "jit": jax.jit(masked),
    "checkpoint": lambda p, b: jax.checkpoint(masked)(p, b),
    "custom_vjp": lambda p, b: fused(losses(p, b), mask(b)),
    "vmap": lambda p, b: jax.vmap(lambda t: losses(p, {"t": t[None]}).sum())(b["t"]).mean(),
    "cond": lambda p, b: jax.lax.cond(
        b["scale"] > 0, jnp.mean, lambda x: jnp.mean(x**2), losses(p, b)
    ),
    "chunked": chunked,
    "mapped rows": mapped_rows,
    "two terms": two_terms,
    "penalized": penalized,
    "by position": lambda p, b: (losses(p, b).mean(0) * jnp.linspace(0, 1, T)).sum(),
    "along time": lambda p, b: jnp.cumsum(losses(p, b), axis=1).mean(),
    "balanced": balanced,
    "standardized": standardized,
    "rolled labels": lambda p, b: jnp.mean(features(p, b) * jnp.roll(b["x"], 1, axis=0)),
    "by index": by_index,
    "first half": first_half,
}


def part_of(b: Any, m: int) -> Any:
    """Microbatch m of two rows."""
    return jax.tree.map(lambda x: x[2 * m : 2 * m + 2] if x.ndim else x, b)


def whole_batch(
    loss: Any, b: Any, microbatches: int, shards: int = 1, **options: Any
) -> WholeBatch:
    leaves, tree = jax.tree.flatten(b)
    shared = options.pop("shared_leaves", ())
    names = sorted(b)
    cut = plan_microbatches(leaves, names, microbatches, shards, shared=shared)
    return WholeBatch(adapt(params(), loss), cut, tree, Options(microbatches, **options))


def assert_exact(
    loss: Any, b: Any, microbatches: int, shards: int = 1, wanted: Any = None, **options: Any
) -> None:
    whole = whole_batch(loss, b, microbatches, shards, **options)
    whole.check()  # a warning is an error here
    value, _, grads, _ = by_microbatches(whole, params(), None, b)
    wanted = wanted or jax.jit(jax.value_and_grad(loss))(params(), b)
    assert relative_error((value, grads), wanted) < 2e-6


@cache
def plain() -> dict[str, Any]:
    """Values and gradients of all exact losses by plain JAX, compiled together."""
    run = lambda p, b: {k: jax.value_and_grad(f)(p, b) for k, f in EXACT.items()}  # noqa: E731
    return jax.jit(run)(params(), batch())


@pytest.mark.parametrize("name", EXACT)
def test_losses_of_microbatches_add_up(name):
    assert_exact(EXACT[name], batch(), 4, wanted=plain()[name])


@pytest.mark.parametrize(("microbatches", "shards"), [(8, 1), (2, 2), (4, 2)])
@pytest.mark.parametrize("name", ["masked", "two terms", "by index", "custom_vjp"])
def test_single_rows_and_data_shards(name, microbatches, shards):
    assert_exact(EXACT[name], batch(), microbatches, shards, wanted=plain()[name])


@given(rows=st.integers(2, 9), microbatches=st.integers(1, 9), seed=st.integers(0, 3))
@settings(max_examples=3, deadline=None)
def test_uneven_microbatches_of_a_masked_loss(rows, microbatches, seed):
    assert_exact(masked, batch(rows, seed), min(rows, microbatches))


def test_what_a_mean_reads_is_a_number_and_a_masked_mean_one_input():
    assert whole_batch(EXACT["mean"], batch(), 4).first.extras == ()
    (extra,) = whole_batch(masked, batch(), 4).first.extras
    assert (extra.aval.shape, extra.rows) == ((), False)


# ------------------------------------------------------------------ what mixes rows


def contrastive(p: Any, b: Any) -> jax.Array:
    a = features(p, b)
    logits = a @ b["x"].T
    return -jnp.mean(jnp.diagonal(jax.nn.log_softmax(logits)))


def normalized(p: Any, b: Any) -> jax.Array:
    h = b["x"] @ p["w"]
    mean = h.mean(0, keepdims=True)
    return jnp.mean(jnp.tanh(h - mean) ** 2)


def load_balance(p: Any, b: Any) -> jax.Array:
    gates = jax.nn.softmax(features(p, b) @ p["out"])
    chosen = jax.nn.one_hot(jnp.argmax(gates, -1), V)
    return masked(p, b) + jnp.sum(chosen.mean(0) * gates.mean(0))


MIXING = {
    "contrastive": (contrastive, "logits = a @"),
    "normalized": (normalized, "jnp.tanh(h - mean)"),
    "load balance": (load_balance, "chosen.mean(0) * gates"),
    "root": (lambda p, b: jnp.sqrt(losses(p, b).mean()), "jnp.sqrt"),
    "sorted": (lambda p, b: jnp.sort(losses(p, b), axis=0)[0].sum(), "jnp.sort"),
    "largest": (lambda p, b: losses(p, b).max(), ".max()"),
    "recurrent over rows": (
        lambda p, b: jax.lax.scan(lambda h, x: (jnp.tanh(h + x), h), jnp.zeros(D), features(p, b))[
            0
        ].sum(),
        "jax.lax.scan",
    ),
}


@pytest.mark.parametrize("name", MIXING)
def test_what_mixes_rows_is_named_once_with_its_line(name):
    loss, text = MIXING[name]
    whole = whole_batch(loss, batch(), 4)
    lines = [user_line(eqn) for eqn in whole.first.mixing]
    with open(__file__) as file:
        source = file.read().splitlines()
    numbers = [int(x.removeprefix(f"{__file__}:").split()[0]) for x in lines if __file__ in x]
    assert any(text in source[n - 1] for n in numbers), lines
    with pytest.warns(RowsWarning, match="gradients will be those of the 4 microbatches of 2 rows"):
        whole.check()
    with pytest.raises(LossError, match="strict=True"):
        whole_batch(loss, batch(), 4, strict=True).check()
    whole_batch(loss, batch(), 1, strict=True).check()  # the microbatch is the batch


def test_a_masked_mean_over_normalized_rows_counts_the_tokens_of_the_whole_batch():
    """What mixes rows is per microbatch; the coefficients around it are not."""

    def loss(p: Any, b: Any, pieces: int = 1) -> jax.Array:
        h = b["x"] @ p["w"]
        parts = h.reshape(pieces, -1, D)
        h = (parts - parts.mean(1, keepdims=True)).reshape(h.shape)
        weights = mask(b).sum(1)
        return (jnp.tanh(h).sum(1) * weights).sum() / weights.sum()

    whole = whole_batch(loss, batch(), 4)
    with pytest.warns(RowsWarning):
        whole.check()
    value, _, grads, _ = by_microbatches(whole, params(), None, batch())
    wanted = jax.value_and_grad(lambda p: loss(p, batch(), 4))(params())
    assert relative_error((value, grads), wanted) < 1e-5


def test_a_weight_says_what_a_microbatch_counts():
    def loss(p: Any, b: Any) -> jax.Array:
        return jnp.log(jnp.mean(jnp.exp(losses(p, b))))

    b = batch()
    whole = whole_batch(loss, b, 4, weight=lambda part: mask(part).sum())
    whole.check()  # who gives a weight knows
    value, _, grads, _ = by_microbatches(whole, params(), None, b)

    def wanted(p: Any) -> jax.Array:
        parts = [part_of(b, m) for m in range(4)]
        return sum(loss(p, part) * mask(part).sum() for part in parts) / mask(b).sum()

    assert relative_error((value, grads), jax.value_and_grad(wanted)(params())) < 1e-5


def test_a_loss_whose_operations_depend_on_the_number_of_rows():
    def loss(p: Any, b: Any) -> jax.Array:
        return sum(jnp.sum(features(p, b)[i] ** 2) for i in range(b["x"].shape[0])) / 8

    whole = whole_batch(loss, batch(), 4)
    with pytest.warns(RowsWarning, match="has other operations than that of all 8"):
        whole.check()


# ------------------------------------------------------------------ leaves without rows


def test_a_leaf_indexed_by_the_data_is_that_of_the_whole_batch():
    def loss(p: Any, b: Any) -> jax.Array:
        return jnp.mean(losses(p, b)[:, 0] * b["weights"][b["t"][:, 1]])

    assert_exact(loss, {**batch(), "weights": jnp.linspace(0.1, 2, ROWS)}, 4)


def test_a_leaf_without_rows_of_the_same_length():
    def loss(p: Any, b: Any) -> jax.Array:
        return jnp.mean((features(p, b) @ p["out"]).max(-1) * b["table"].sum())

    b = {**batch(), "table": jnp.linspace(0.1, 2, ROWS)}
    assert_exact(loss, b, 4, shared_leaves=[sorted(b).index("table")])


def test_a_constant_as_long_as_the_batch():
    weights = jnp.linspace(0.1, 2, ROWS)[:, None]
    loss = lambda p, b: jnp.mean(features(p, b) * weights)  # noqa: E731
    with pytest.raises(LossError, match=r"2 rows of a microbatch.*test_whole.py(?s:.*)closes over"):
        whole_batch(loss, batch(), 4)
    with pytest.warns(RowsWarning, match="mul in"):
        whole_batch(loss, batch(), 8).check()


# ------------------------------------------------------------------ aux


def aux_of(p: Any, b: Any) -> tuple[jax.Array, dict[str, Any]]:
    h = features(p, b)
    return masked(p, b), {
        "rows": h,
        "columns": h.T,
        "two views": jnp.concatenate([h, -h]),
        "masked": masked(p, b),
        "tokens": (b["t"] > 0).sum(),
        "narrow": (b["t"] > 0).sum(dtype=jnp.int8) + (h > 9).sum(dtype=jnp.int8),
        "length": jnp.asarray(b["t"].shape[0]),
        "largest": h.max(),
        "finite": jnp.isfinite(h).all(),
        "weights": p["w"],
        "norm": jnp.sum(p["w"] ** 2),
        "square": jnp.full((2, 2), h.sum()),  # two is the size of a microbatch, by chance
    }


@pytest.mark.parametrize(("microbatches", "shards"), [(4, 1), (3, 1), (2, 2)])
def test_aux_is_that_of_the_whole_batch(microbatches, shards):
    whole = whole_batch(aux_of, batch(), microbatches, shards)
    _, aux, _, _ = by_microbatches(whole, params(), None, batch())
    wanted = aux_of(params(), batch())[1]
    for name, value in wanted.items():
        assert aux[name].shape == value.shape, name
        np.testing.assert_allclose(aux[name], value, rtol=1e-5, atol=1e-6, err_msg=name)


def test_declared_rules_of_aux():
    def loss(p: Any, b: Any) -> tuple[jax.Array, dict[str, Any]]:
        h = features(p, b)
        return masked(p, b), {"load": h.max(), "more": {"a": h.max(), "b": h.T}}

    whole = whole_batch(loss, batch(), 4, aux={"load": "sum", "more": {"a": "mean", "b": "rows"}})
    _, aux, _, _ = by_microbatches(whole, params(), None, batch())
    parts = [features(params(), {"x": batch()["x"][2 * m : 2 * m + 2]}).max() for m in range(4)]
    assert float(aux["load"]) == pytest.approx(float(sum(parts)), rel=1e-5)
    assert float(aux["more"]["a"]) == pytest.approx(float(sum(parts)) / 4, rel=1e-5)
    assert aux["more"]["b"].shape == (D, ROWS)
    with pytest.raises(LossError, match=r"unknown rule\(s\) in aux=: load: 'total'"):
        whole_batch(loss, batch(), 4, aux={"load": "total"})
    with pytest.raises(LossError, match="aux= names lod, which the loss does not return"):
        whole_batch(loss, batch(), 4, aux={"lod": "sum"})
