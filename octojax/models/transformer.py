"""Transformers of one shape: LLaMA's and Gemma's layers.

Legend: B batch, T time, D width of the residual stream.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from octojax.models.attention import Attention, Mask
from octojax.models.dense import MLP, RMSNorm
from octojax.models.language import Embedding, Head, inputs_and_targets, token_loss
from octojax.models.rotary import Rotary, Smoothing


@dataclass(frozen=True)
class TransformerConfig:
    """Sizes of a transformer.

    Layer i attends globally where `i % period` is in `global_at`, else to the `window` latest
    positions; `window` None makes every layer global. `local_rope_base` None means the same
    base everywhere; `rope_stretch` and `rope_smoothing` are those of global layers
    (`octojax.models.rotary`). `post_norm` norms a half's output too, `centered_norm` keeps the
    distance of every norm's scale from 1, `scale_embedding` multiplies by sqrt(D), `tied` uses
    the embedding as the head's weights. `attention_scale` None is 1 / sqrt(head_dim);
    `attention_cap` and `logit_cap` bound scores and logits softly.
    """

    layers: int
    width: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    rope_base: float = 500_000.0
    activation: str = "swiglu"
    tied: bool = False
    scale_embedding: bool = False
    window: int | None = None
    period: int = 1
    global_at: tuple[int, ...] = (0,)
    local_rope_base: float | None = None
    rope_stretch: float = 1.0
    rope_smoothing: Smoothing | None = None
    post_norm: bool = False
    qk_norm: bool = False
    centered_norm: bool = False
    epsilon: float = 1e-5
    attention_scale: float | None = None
    attention_cap: float | None = None
    logit_cap: float | None = None
    dtype: DTypeLike = jnp.float32
    param_dtype: DTypeLike = jnp.float32
    std: float = 0.02

    def is_global(self, layer: int) -> bool:
        return self.window is None or layer % self.period in self.global_at

    def rotary(self, layer: int) -> Rotary:
        if self.is_global(layer):
            return Rotary(self.rope_base, self.rope_stretch, self.rope_smoothing)
        return Rotary(self.rope_base if self.local_rope_base is None else self.local_rope_base)

    @property
    def pattern(self) -> str:
        """`G` for a global layer, `L` for a local one."""
        return "".join("G" if self.is_global(i) else "L" for i in range(self.layers))


class Layer(nnx.Module):
    """`x + attention(norm(x))`, then `x + mlp(norm(x))`."""

    def __init__(self, index: int, config: TransformerConfig, rngs: nnx.Rngs):
        dtypes = {"dtype": config.dtype, "param_dtype": config.param_dtype}
        kinds = {
            "std": config.std,
            "out_std": config.std / math.sqrt(2 * config.layers),
            "rngs": rngs,
            **dtypes,
        }
        norms = {**dtypes, "epsilon": config.epsilon, "centered": config.centered_norm}
        window = None if config.is_global(index) else config.window
        self.attention_norm = RMSNorm(config.width, **norms)
        self.attention = Attention(
            config.width,
            config.heads,
            config.kv_heads,
            config.head_dim,
            rotary=config.rotary(index),
            mask=Mask(window, scale=config.attention_scale, cap=config.attention_cap),
            qk_norm=config.qk_norm,
            centered=config.centered_norm,
            epsilon=config.epsilon,
            **kinds,
        )
        self.mlp_norm = RMSNorm(config.width, **norms)
        self.mlp = MLP(config.width, config.hidden, activation=config.activation, **kinds)
        post = config.post_norm
        self.attention_post_norm = RMSNorm(config.width, **norms) if post else None
        self.mlp_post_norm = RMSNorm(config.width, **norms) if post else None

    def __call__(self, x_BTD: jax.Array) -> jax.Array:
        y_BTD = self.attention(self.attention_norm(x_BTD))
        if self.attention_post_norm is not None:
            y_BTD = self.attention_post_norm(y_BTD)
        x_BTD = x_BTD + y_BTD
        y_BTD = self.mlp(self.mlp_norm(x_BTD))
        if self.mlp_post_norm is not None:
            y_BTD = self.mlp_post_norm(y_BTD)
        return x_BTD + y_BTD


class Transformer(nnx.Module):
    """The language model: tokens (B, T) to logits (B, T, V)."""

    def __init__(self, config: TransformerConfig, *, rngs: nnx.Rngs):
        self.config = config
        kinds = {"std": config.std, "param_dtype": config.param_dtype, "rngs": rngs}
        self.embedding = Embedding(
            config.vocabulary,
            config.width,
            scale=math.sqrt(config.width) if config.scale_embedding else 1.0,
            stream_dtype=config.dtype,
            **kinds,
        )
        self.layers = nnx.List([Layer(i, config, rngs) for i in range(config.layers)])
        self.head = Head(
            config.width,
            config.vocabulary,
            tied=config.tied,
            dtype=config.dtype,
            epsilon=config.epsilon,
            centered=config.centered_norm,
            cap=config.logit_cap,
            **kinds,
        )

    def __call__(self, token_BT: jax.Array) -> jax.Array:
        x_BTD = self.embedding(token_BT)
        for layer in self.layers:
            x_BTD = layer(x_BTD)
        return self.head(x_BTD, self.embedding.table[...] if self.config.tied else None)


def loss(model: Transformer, batch: Mapping[str, jax.Array]) -> jax.Array:
    """Returns the mean next-token loss of `{"tokens": (B, T + 1)}`."""
    token_BT, target_BT = inputs_and_targets(batch)
    return token_loss(model(token_BT), target_BT)
