"""What every language model here begins and ends with.

Legend: B batch, T time, S = T + 1 tokens of a sample, D width, V vocabulary.
"""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike

from octojax.models.dense import EPSILON, Linear, RMSNorm


@jax.custom_vjp
def token_loss(logits_BTV: jax.Array, target_BT: jax.Array) -> jax.Array:
    """Returns the mean negative log likelihood of the targets, in nats, as a float32 scalar.

    The softmax is float32 and is rebuilt in the backward, so no second (B, T, V) is kept.
    """
    return _token_loss_forward(logits_BTV, target_BT)[0]


def _token_loss_forward(logits_BTV, target_BT):
    wide = logits_BTV.astype(jnp.float32)
    log_total_BT = jax.nn.logsumexp(wide, axis=-1)
    picked_BT = jnp.take_along_axis(wide, target_BT[..., None], axis=-1)[..., 0]
    return jnp.mean(log_total_BT - picked_BT), (logits_BTV, log_total_BT, target_BT)


def _token_loss_backward(residuals, gradient):
    logits_BTV, log_total_BT, target_BT = residuals
    softmax = jnp.exp(logits_BTV.astype(jnp.float32) - log_total_BT[..., None])
    hot = jax.nn.one_hot(target_BT, logits_BTV.shape[-1], dtype=jnp.float32)
    dlogits = (softmax - hot) * (gradient / target_BT.size)
    return dlogits.astype(logits_BTV.dtype), None


token_loss.defvjp(_token_loss_forward, _token_loss_backward)


class Embedding(nnx.Module):
    """Token vectors (V, D). `stream_dtype` is the residual stream's, `scale` Gemma's sqrt(D)."""

    def __init__(
        self,
        vocabulary: int,
        width: int,
        *,
        std: float,
        scale: float = 1.0,
        stream_dtype: DTypeLike,
        param_dtype: DTypeLike,
        rngs: nnx.Rngs,
    ):
        draw = jax.random.normal(rngs.params(), (vocabulary, width), param_dtype)
        self.table = nnx.Param(draw * jnp.asarray(std, param_dtype))
        self.scale = scale
        self.stream_dtype = stream_dtype

    def __call__(self, token_BT: jax.Array) -> jax.Array:
        x_BTD = jnp.take(self.table[...], token_BT, axis=0, mode="clip").astype(self.stream_dtype)
        return x_BTD if self.scale == 1.0 else x_BTD * jnp.asarray(self.scale, x_BTD.dtype)


class Head(nnx.Module):
    """Final norm and projection to the vocabulary; with `table` given, tied to the embedding.

    `cap` bounds the logits to `cap * tanh(logits / cap)` (Gemma 2).
    """

    def __init__(
        self,
        width: int,
        vocabulary: int,
        *,
        tied: bool = False,
        epsilon: float = EPSILON,
        centered: bool = False,
        cap: float | None = None,
        std: float,
        dtype: DTypeLike,
        param_dtype: DTypeLike,
        rngs: nnx.Rngs,
    ):
        kinds = {"dtype": dtype, "param_dtype": param_dtype}
        self.norm = RMSNorm(width, epsilon=epsilon, centered=centered, **kinds)
        self.cap = cap
        self.project = None if tied else Linear(width, vocabulary, std=std, rngs=rngs, **kinds)

    def __call__(self, x_BTD: jax.Array, table_VD: jax.Array | None = None) -> jax.Array:
        normed = self.norm(x_BTD)
        if self.project is not None:
            logits_BTV = self.project(normed)
        elif table_VD is None:
            raise ValueError("a tied head needs the embedding's table")
        else:
            logits_BTV = normed @ table_VD.astype(normed.dtype).T
        return logits_BTV if self.cap is None else self.cap * jnp.tanh(logits_BTV / self.cap)


class BalancedLanguageModel(nnx.Module):
    """Tokens (B, T) to logits (B, T, V), through layers that hand on `(x, balance)`.

    `balance` is the balance loss of the experts along the depth, None before the first of them.
    `layer(i)` makes layer i; `centered` is the head's norm's.
    """

    def __init__(
        self,
        config: Any,
        layer: Callable[[int], nnx.Module],
        *,
        centered: bool = False,
        rngs: nnx.Rngs,
    ):
        self.config = config
        sizes = config.vocabulary, config.width
        kinds = {"std": config.std, "param_dtype": config.param_dtype, "rngs": rngs}
        self.embedding = Embedding(*sizes, stream_dtype=config.dtype, **kinds)
        self.layers = nnx.List([layer(i) for i in range(config.layers)])
        self.head = Head(
            *reversed(sizes),
            epsilon=config.epsilon,
            centered=centered,
            dtype=config.dtype,
            **kinds,
        )

    def outputs(self, token_BT: jax.Array) -> tuple[jax.Array, jax.Array | None]:
        """Returns `(logits, balance)`."""
        x_BTD = self.embedding(token_BT)
        balance = None
        for layer in self.layers:
            x_BTD, balance = layer(x_BTD, balance)
        return self.head(x_BTD), balance

    def __call__(self, token_BT: jax.Array) -> jax.Array:
        return self.outputs(token_BT)[0]


def balanced_loss(
    model: BalancedLanguageModel, batch: Mapping[str, jax.Array], routed: int
) -> jax.Array:
    """Returns the mean next-token loss of `{"tokens": (B, T + 1)}`, plus the balance of the
    experts, which `routed` layers have."""
    token_BT, target_BT = inputs_and_targets(batch)
    logits_BTV, balance = model.outputs(token_BT)
    value = token_loss(logits_BTV, target_BT)
    if balance is None:
        return value
    return value + model.config.balance_weight / routed * balance


def inputs_and_targets(batch: Mapping[str, jax.Array]) -> tuple[jax.Array, jax.Array]:
    """Returns `(tokens[:, :-1], tokens[:, 1:])` of a batch `{"tokens": (B, T + 1) int32}`."""
    token_BS = batch["tokens"]
    return token_BS[:, :-1], token_BS[:, 1:]


def count_parameters(model: nnx.Module) -> int:
    """Returns the number of parameters; also of a model made by `nnx.eval_shape`."""
    leaves = jax.tree.leaves(nnx.state(model, nnx.Param))
    return sum(int(np.prod(leaf.shape)) for leaf in leaves)
