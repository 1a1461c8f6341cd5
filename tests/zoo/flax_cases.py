"""Flax modules: an nnx hybrid, a linen transformer, ties, dropout streams, batch statistics."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen, nnx

from tests.zoo.case import Case, D, T, V, cross_entropy, mse, tokens, vectors


class Mixer(nnx.Module):
    """A gated diagonal recurrence over time, small kin of Mamba: h_t = a_t h_{t-1} + b_t x_t."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.inside = nnx.Linear(D, 3 * D, use_bias=False, rngs=rngs)
        self.outside = nnx.Linear(D, D, use_bias=False, rngs=rngs)
        self.decay = nnx.Param(jnp.zeros(D))

    def __call__(self, x_BTD: jax.Array) -> jax.Array:
        u, gate, b = jnp.split(self.inside(x_BTD), 3, axis=-1)
        a = jax.nn.sigmoid(b + self.decay[...][None, None])

        def step(h: jax.Array, at: Any) -> tuple[jax.Array, jax.Array]:
            a_t, u_t = at
            h = a_t * h + u_t
            return h, h

        inputs = (jnp.moveaxis(a, 1, 0), jnp.moveaxis(u, 1, 0))
        _, h = jax.lax.scan(step, jnp.zeros_like(u[:, 0]), inputs)
        return self.outside(jnp.moveaxis(h, 0, 1) * jax.nn.silu(gate))


class Attention(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.qkv = nnx.Linear(D, 3 * D, use_bias=False, rngs=rngs)
        self.out = nnx.Linear(D, D, use_bias=False, rngs=rngs)

    def __call__(self, x_BTD: jax.Array) -> jax.Array:
        q, k, v = jnp.split(self.qkv(x_BTD), 3, axis=-1)
        scores = jnp.einsum("btd,bsd->bts", q, k) / D**0.5
        mask = jnp.tril(jnp.ones((x_BTD.shape[1],) * 2, bool))[None]
        return self.out(jax.nn.softmax(jnp.where(mask, scores, -1e9)) @ v)


class Mlp(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.up = nnx.Linear(D, 2 * D, rngs=rngs)
        self.down = nnx.Linear(2 * D, D, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.down(jax.nn.relu(self.up(x)) ** 2)


class Layer(nnx.Module):
    def __init__(self, kind: type[nnx.Module], rngs: nnx.Rngs) -> None:
        self.norm = nnx.RMSNorm(D, rngs=rngs)
        self.mixer: Any = kind(rngs)  # pyright: ignore[reportCallIssue]

    def __call__(self, x: jax.Array) -> jax.Array:
        return x + self.mixer(self.norm(x))


class Hybrid(nnx.Module):
    """Embedding, recurrences, attention and MLP layers, norm and head."""

    def __init__(self, rngs: nnx.Rngs, tied: bool = False) -> None:
        self.embed = nnx.Embed(V, D, rngs=rngs)
        kinds = (Mixer, Mlp, Attention, Mlp, Mixer, Mlp)
        self.layers = nnx.List([Layer(kind, rngs) for kind in kinds])
        self.norm = nnx.RMSNorm(D, rngs=rngs)
        self.head = self.embed if tied else nnx.Linear(D, V, use_bias=False, rngs=rngs)

    def __call__(self, ids: jax.Array) -> jax.Array:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        x = self.norm(x)
        return x @ self.embed.embedding[...].T if self.head is self.embed else self.head(x)


def nnx_lm_loss(model: Any, batch: Any) -> tuple[jax.Array, Any]:
    logits = model(batch["inputs"])
    accuracy = jnp.mean((jnp.argmax(logits, -1) == batch["targets"]).astype(jnp.float32))
    return cross_entropy(logits, batch["targets"]), {"accuracy": accuracy}


def nnx_hybrid() -> Case:
    return Case("nnx-hybrid", Hybrid(nnx.Rngs(0)), nnx_lm_loss, tokens, layers=8)


def nnx_tied() -> Case:
    """One nnx.Embed held under two names."""
    return Case("nnx-tied", Hybrid(nnx.Rngs(1), tied=True), nnx_lm_loss, tokens, layers=8)


def nnx_frozen() -> Case:
    """Only the head and the MLPs are trained; the rest is frozen by a filter."""

    def trained(path: Any, value: Any) -> bool:
        return isinstance(value, nnx.Param) and ("up" in path or "down" in path or "head" in path)

    model = Hybrid(nnx.Rngs(2))
    options = {"trainable": trained}
    return Case("nnx-frozen", model, nnx_lm_loss, tokens, layers=8, options=options)


class LinenBlock(linen.Module):
    @linen.compact
    def __call__(self, x: jax.Array, mask: jax.Array) -> jax.Array:
        h = linen.LayerNorm(name="norm1")(x)
        h = linen.MultiHeadDotProductAttention(num_heads=2, name="attn")(h, h, mask=mask)
        x = x + h
        h = linen.Dense(2 * D, name="up")(linen.LayerNorm(name="norm2")(x))
        return x + linen.Dense(D, name="down")(linen.gelu(h))


class LinenTransformer(linen.Module):
    @linen.compact
    def __call__(self, ids: jax.Array) -> jax.Array:
        x = linen.Embed(V, D, name="embed")(ids)
        x = x + self.param("position", linen.initializers.normal(0.1), (1, T, D))
        mask = linen.make_causal_mask(ids)
        for i in range(3):
            x = LinenBlock(name=f"block_{i}")(x, mask)
        return linen.Dense(V, name="head")(linen.LayerNorm(name="norm")(x))


def linen_transformer() -> Case:
    model = LinenTransformer()
    variables = model.init(jax.random.key(0), jnp.zeros((1, T), jnp.int32))

    def loss(variables: Any, batch: Any) -> jax.Array:
        return cross_entropy(model.apply(variables, batch["inputs"]), batch["targets"])

    return Case("linen-transformer", model, loss, tokens, layers=8, params=variables)


class Regularized(nnx.Module):
    """Dense layers with dropout and, if asked for, batch statistics."""

    def __init__(self, rngs: nnx.Rngs, statistics: bool) -> None:
        self.dense = nnx.List([nnx.Linear(D, D, rngs=rngs) for _ in range(4)])
        self.drop = nnx.List([nnx.Dropout(0.25, rngs=rngs) for _ in range(4)])
        norms = [nnx.BatchNorm(D, rngs=rngs) if statistics else nnx.RMSNorm(D, rngs=rngs)] * 1
        self.norms = nnx.List(norms + [nnx.RMSNorm(D, rngs=rngs) for _ in range(3)])

    def __call__(self, h: jax.Array) -> jax.Array:
        for dense, drop, norm in zip(self.dense, self.drop, self.norms):
            h = drop(jnp.tanh(norm(dense(h))))
        return h


def _regularized(name: str, statistics: bool) -> Case:
    model = Regularized(nnx.Rngs(0, dropout=1), statistics)

    def loss(model: Regularized, batch: Any) -> jax.Array:
        return mse(model(batch["x"]), batch["y"])

    more = {"per_sample": False, "mixes_rows": statistics}
    return Case(name, model, loss, vectors, layers=4, **more)


def dropout_rngs() -> Case:
    """Dropout from streams that the nnx module counts on."""
    return _regularized("dropout-rngs", statistics=False)


def nnx_batchnorm() -> Case:
    """Running statistics of nnx.BatchNorm beside dropout streams."""
    return _regularized("nnx-batchnorm", statistics=True)


class LinenNorm(linen.Module):
    @linen.compact
    def __call__(self, h: jax.Array, train: bool) -> jax.Array:
        for i in range(3):
            h = linen.Dense(D, name=f"dense_{i}")(h)
            h = jnp.tanh(linen.BatchNorm(use_running_average=not train, name=f"norm_{i}")(h))
        return h


def linen_batchnorm(train: bool = True) -> Case:
    """linen.BatchNorm: updates of "batch_stats" returned as aux in training, frozen otherwise."""
    model = LinenNorm()
    variables = model.init(jax.random.key(0), jnp.ones((2, D)), train=True)

    def training(variables: Any, batch: Any) -> tuple[jax.Array, Any]:
        h, updates = model.apply(variables, batch["x"], train=True, mutable=["batch_stats"])
        return mse(h, batch["y"]), updates

    def evaluation(variables: Any, batch: Any) -> jax.Array:
        return mse(model.apply(variables, batch["x"], train=False), batch["y"])

    name = "linen-batchnorm" if train else "linen-batchnorm-eval"
    loss = training if train else evaluation
    more = {"per_sample": not train, "mixes_rows": train}
    return Case(name, model, loss, vectors, layers=3, params=variables, **more)


FLAX_CASES: dict[str, Callable[[], Case]] = {
    "nnx-hybrid": nnx_hybrid,
    "nnx-tied": nnx_tied,
    "nnx-frozen": nnx_frozen,
    "linen-transformer": linen_transformer,
    "dropout-rngs": dropout_rngs,
    "nnx-batchnorm": nnx_batchnorm,
    "linen-batchnorm": linen_batchnorm,
    "linen-batchnorm-eval": lambda: linen_batchnorm(train=False),
}
