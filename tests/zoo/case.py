"""The record of one model of the zoo, and the arrays that they are all made of."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from octojax.frontends import PureLoss, adapt

D, T, V = 8, 6, 16  # width, sequence, vocabulary


@dataclass(frozen=True)
class Case:
    """A model in the user's form. `layers` is how many layers the front end finds."""

    name: str
    model: Any
    loss_fn: Callable[..., Any]
    batch: Callable[[int], Any]
    layers: int
    params: Any = None
    options: Mapping[str, Any] = field(default_factory=dict)  # of adapt
    per_sample: bool = True
    adds_up: bool = False  # rules put in gradients in each microbatch, see docs/exactness.md
    mixes_rows: bool = False  # batch statistics: said aloud, see docs/exactness.md

    def pure(self) -> PureLoss:
        return adapt(self.model, self.loss_fn, self.params, **self.options)


def weights(seed: int, **shapes: tuple[int, ...]) -> dict[str, jax.Array]:
    """Normal weights scaled by their fan-in, one per name."""
    rng = np.random.default_rng(seed)
    return {
        name: jnp.asarray(
            rng.normal(size=shape) / np.sqrt(shape[-2] if len(shape) > 1 else 1)
        ).astype(jnp.float32)
        for name, shape in shapes.items()
    }


def vectors(size: int) -> dict[str, jax.Array]:
    """A regression batch: x and y of shape (size, D)."""
    rng = np.random.default_rng(7)
    return {k: jnp.asarray(rng.normal(size=(size, D)), jnp.float32) for k in ("x", "y")}


def tokens(size: int) -> dict[str, jax.Array]:
    """A language batch: inputs, targets and a float mask of shape (size, T)."""
    rng = np.random.default_rng(11)
    ids = rng.integers(0, V, size=(size, T + 1))
    return {"inputs": jnp.asarray(ids[:, :-1]), "targets": jnp.asarray(ids[:, 1:])}


def with_key(batch: Callable[[int], dict[str, Any]]) -> Callable[[int], dict[str, Any]]:
    """The batch with a typed scalar key under "key"."""
    return lambda size: {**batch(size), "key": jax.random.key(3)}


def mse(y: jax.Array, target: jax.Array) -> jax.Array:
    return jnp.mean((y - target) ** 2)


def cross_entropy(logits_BTV: jax.Array, targets_BT: jax.Array) -> jax.Array:
    logp = jax.nn.log_softmax(logits_BTV.astype(jnp.float32))
    return -jnp.mean(jnp.take_along_axis(logp, targets_BT[..., None], axis=-1))


def rms_norm(x: jax.Array, scale: jax.Array) -> jax.Array:
    scale = jnp.expand_dims(scale, range(x.ndim - 1))
    return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-6) * scale


def attention(x_BTD: jax.Array, p: dict[str, jax.Array], mask_BTT: jax.Array) -> jax.Array:
    q, k, v = x_BTD @ p["q"], x_BTD @ p["k"], x_BTD @ p["v"]
    scores = jnp.einsum("btd,bsd->bts", q, k) / np.sqrt(q.shape[-1])
    return jax.nn.softmax(jnp.where(mask_BTT, scores, -1e9)) @ v @ p["o"]


def causal(ids_BT: jax.Array) -> jax.Array:
    """A causal mask from the batch alone: (B, T, T)."""
    t = ids_BT.shape[1]
    return jnp.broadcast_to(jnp.tril(jnp.ones((t, t), bool))[None], (ids_BT.shape[0], t, t))
