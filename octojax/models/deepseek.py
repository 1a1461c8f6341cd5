"""DeepSeek-V3: latent attention, a few dense layers, then experts with a shared one.

Legend: B batch, T time, D width of the residual stream.

Source: DeepSeek-AI, "DeepSeek-V3" (2024), sections 2.1 and 4.2, and the published
configuration. Positions are those of the first 4,096 tokens, as pretrained (YaRN's
stretching comes later), and the layer for multi-token prediction is left out.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from octojax.models.dense import MLP, RMSNorm
from octojax.models.language import BalancedLanguageModel, balanced_loss
from octojax.models.latent import LatentAttention, LatentConfig
from octojax.models.moe import MoE, MoEConfig
from octojax.models.rotary import Rotary


@dataclass(frozen=True)
class DeepSeekConfig:
    """Sizes of a DeepSeek-V3: the first `dense` layers have no experts."""

    layers: int
    dense: int
    width: int
    hidden: int
    attention: LatentConfig
    moe: MoEConfig
    vocabulary: int
    rope_base: float = 10_000.0
    balance_weight: float = 1e-4
    epsilon: float = 1e-6
    dtype: DTypeLike = jnp.float32
    param_dtype: DTypeLike = jnp.float32
    std: float = 0.006

    @property
    def pattern(self) -> str:
        """`D` for a dense layer, `E` for one with experts."""
        return "".join("D" if i < self.dense else "E" for i in range(self.layers))


class Layer(nnx.Module):
    """`x + attention(norm(x))`, then `x + feed_forward(norm(x))`, adding to the balance loss."""

    def __init__(self, index: int, config: DeepSeekConfig, rngs: nnx.Rngs):
        dtypes: dict[str, Any] = {"dtype": config.dtype, "param_dtype": config.param_dtype}
        out_std = config.std / math.sqrt(2 * config.layers)
        kinds = {"std": config.std, "out_std": out_std, "rngs": rngs, **dtypes}
        self.attention_norm = RMSNorm(config.width, epsilon=config.epsilon, **dtypes)
        self.attention = LatentAttention(
            config.width,
            config.attention,
            rotary=Rotary(config.rope_base, interleaved=True),
            epsilon=config.epsilon,
            **kinds,
        )
        self.feed_forward_norm = RMSNorm(config.width, epsilon=config.epsilon, **dtypes)
        if index < config.dense:
            self.feed_forward = MLP(config.width, config.hidden, activation="swiglu", **kinds)
        else:
            self.feed_forward = MoE(config.width, config.moe, **kinds)

    def __call__(
        self, x_BTD: jax.Array, balance: jax.Array | None
    ) -> tuple[jax.Array, jax.Array | None]:
        x_BTD = x_BTD + self.attention(self.attention_norm(x_BTD))
        normed_BTD = self.feed_forward_norm(x_BTD)
        if isinstance(self.feed_forward, MoE):
            y_BTD, more = self.feed_forward(normed_BTD)
            return x_BTD + y_BTD, more if balance is None else balance + more
        return x_BTD + self.feed_forward(normed_BTD), balance


class DeepSeek(BalancedLanguageModel):
    """The language model: tokens (B, T) to logits (B, T, V)."""

    def __init__(self, config: DeepSeekConfig, *, rngs: nnx.Rngs):
        super().__init__(config, lambda i: Layer(i, config, rngs), rngs=rngs)


def loss(model: DeepSeek, batch: Mapping[str, jax.Array]) -> jax.Array:
    """Returns the mean next-token loss of `{"tokens": (B, T + 1)}`, plus the experts' balance."""
    return balanced_loss(model, batch, model.config.layers - model.config.dense)


def deepseek_v3() -> DeepSeekConfig:
    """61 layers, 671 billion parameters, 37 active: 3 dense, then 8 of 256 experts and one."""
    return DeepSeekConfig(
        layers=61,
        dense=3,
        width=7168,
        hidden=18432,
        attention=LatentConfig(
            heads=128, query_rank=1536, key_rank=512, plain=128, turning=64, value=128
        ),
        moe=MoEConfig(
            experts=256,
            chosen=8,
            hidden=2048,
            shared_hidden=2048,
            router="sigmoid",
            normalize=True,
            weight_scale=2.5,
            router_bias=True,
            groups=8,
            chosen_groups=4,
            method="ragged",
        ),
        vocabulary=129_280,
    )


def tiny(width: int = 128, layers: int = 6, vocabulary: int = 256) -> DeepSeekConfig:
    """Returns a byte-level model: one dense layer, then 2 of 8 experts and a shared one."""
    return DeepSeekConfig(
        layers=layers,
        dense=1,
        width=width,
        hidden=2 * width,
        attention=LatentConfig(
            heads=max(1, width // 32),
            query_rank=width // 2,
            key_rank=width // 4,
            plain=16,
            turning=8,
            value=16,
        ),
        moe=MoEConfig(
            experts=8,
            chosen=2,
            hidden=width // 2,
            shared_hidden=width // 2,
            router="sigmoid",
            normalize=True,
            groups=4,
            chosen_groups=2,
            method="ragged",
        ),
        vocabulary=vocabulary,
        std=0.02,
    )


PRESETS = {"deepseek-v3": deepseek_v3, "tiny": tiny}
"""Configurations by name; the published one counts as published."""
