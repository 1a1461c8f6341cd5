"""Jamba: Mamba mixers with an attention layer in eight, experts in every second layer.

Legend: B batch, T time, D width of the residual stream.

Source: AI21, "Jamba" (2024), section 3 and its published configuration.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from octojax.models.attention import Attention
from octojax.models.dense import MLP, RMSNorm
from octojax.models.language import BalancedLanguageModel, balanced_loss
from octojax.models.mamba1 import Mamba1, Mamba1Config
from octojax.models.mamba2 import Mamba2, Mamba2Config
from octojax.models.moe import MoE, MoEConfig


@dataclass(frozen=True)
class JambaConfig:
    """Sizes of a Jamba. Layer i attends where `i % attention_every == attention_at`, and its
    feed-forward half has experts where `i % experts_every == experts_at`.

    A `Mamba1Config` makes the published mixer, a `Mamba2Config` the newer one.
    """

    layers: int
    width: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    mamba: Mamba1Config | Mamba2Config
    moe: MoEConfig
    vocabulary: int
    attention_every: int = 8
    attention_at: int = 4
    experts_every: int = 2
    experts_at: int = 1
    balance_weight: float = 1e-2
    epsilon: float = 1e-6
    dtype: DTypeLike = jnp.float32
    param_dtype: DTypeLike = jnp.float32
    std: float = 0.02

    def attends(self, layer: int) -> bool:
        return layer % self.attention_every == self.attention_at

    def routes(self, layer: int) -> bool:
        return layer % self.experts_every == self.experts_at

    @property
    def pattern(self) -> str:
        """`m` Mamba, `a` attention, capitals (`B` and `A`) with experts, one per layer."""
        symbols = {(False, False): "m", (False, True): "B", (True, False): "a", (True, True): "A"}
        return "".join(symbols[self.attends(i), self.routes(i)] for i in range(self.layers))


class Layer(nnx.Module):
    """`x + mixer(norm(x))`, then `x + feed_forward(norm(x))`, adding to the balance loss."""

    def __init__(self, index: int, config: JambaConfig, rngs: nnx.Rngs):
        dtypes: dict[str, Any] = {"dtype": config.dtype, "param_dtype": config.param_dtype}
        kinds = {
            "std": config.std,
            "out_std": config.std / math.sqrt(2 * config.layers),
            "rngs": rngs,
            **dtypes,
        }
        self.mixer_norm = RMSNorm(config.width, epsilon=config.epsilon, **dtypes)
        self.feed_forward_norm = RMSNorm(config.width, epsilon=config.epsilon, **dtypes)
        if config.attends(index):
            sizes = config.heads, config.kv_heads, config.head_dim
            self.mixer = Attention(config.width, *sizes, **kinds)
        elif isinstance(config.mamba, Mamba1Config):
            self.mixer = Mamba1(config.width, config.mamba, epsilon=config.epsilon, **kinds)
        else:
            self.mixer = Mamba2(config.width, config.mamba, **kinds)
        if config.routes(index):
            self.feed_forward = MoE(config.width, config.moe, **kinds)
        else:
            self.feed_forward = MLP(config.width, config.hidden, activation="swiglu", **kinds)

    def __call__(
        self, x_BTD: jax.Array, balance: jax.Array | None
    ) -> tuple[jax.Array, jax.Array | None]:
        x_BTD = x_BTD + self.mixer(self.mixer_norm(x_BTD)).astype(x_BTD.dtype)
        normed_BTD = self.feed_forward_norm(x_BTD)
        if isinstance(self.feed_forward, MoE):
            y_BTD, more = self.feed_forward(normed_BTD)
            balance = more if balance is None else balance + more
        else:
            y_BTD = self.feed_forward(normed_BTD)
        return x_BTD + y_BTD.astype(x_BTD.dtype), balance


class Jamba(BalancedLanguageModel):
    """The language model: tokens (B, T) to logits (B, T, V)."""

    def __init__(self, config: JambaConfig, *, rngs: nnx.Rngs):
        super().__init__(config, lambda i: Layer(i, config, rngs), rngs=rngs)


def loss(model: Jamba, batch: Mapping[str, jax.Array]) -> jax.Array:
    """Returns the mean next-token loss of `{"tokens": (B, T + 1)}`, plus the experts' balance."""
    return balanced_loss(model, batch, sum(map(model.config.routes, range(model.config.layers))))


def jamba_v0_1() -> JambaConfig:
    """32 layers, 52 billion parameters, 12 active: 28 Mamba, 4 attention, experts in 16."""
    return JambaConfig(
        layers=32,
        width=4096,
        hidden=14336,
        heads=32,
        kv_heads=8,
        head_dim=128,
        mamba=Mamba1Config(inner=8192, state=16, dt_rank=256),
        moe=MoEConfig(experts=16, chosen=2, hidden=14336, capacity_factor=1.25),
        vocabulary=65536,
    )


def jamba_1_5_large() -> JambaConfig:
    """72 layers, 398 billion parameters, 94 active."""
    return replace(
        jamba_v0_1(),
        layers=72,
        width=8192,
        hidden=24576,
        heads=64,
        mamba=Mamba1Config(inner=16384, state=16, dt_rank=512),
        moe=MoEConfig(experts=16, chosen=2, hidden=24576, capacity_factor=1.25),
    )


def octopipe_table_2(size: str) -> JambaConfig:
    """Returns OctoPipe's TABLE II: `S`, `M` or `L`, the period of eight 2, 4 or 8 times."""
    times = {"S": 1, "M": 2, "L": 4}[size]
    return replace(
        jamba_v0_1(),
        layers=16 * times,
        width=2048,
        hidden=7168,
        heads=16,
        mamba=Mamba1Config(inner=4096, state=16, dt_rank=128),
        moe=MoEConfig(experts=16, chosen=2, hidden=7168, capacity_factor=1.25),
        vocabulary=65536 * times,
    )


def tiny(width: int = 128, layers: int = 8, vocabulary: int = 256) -> JambaConfig:
    """Returns a byte-level model of one published period (mBmBaBmB): four experts, two chosen."""
    return JambaConfig(
        layers=layers,
        width=width,
        hidden=7 * width // 2,
        heads=max(1, width // 32),
        kv_heads=max(1, width // 64),
        head_dim=32,
        mamba=Mamba2Config(heads=2 * width // 32, head_dim=32, groups=1, state=16, chunk=32),
        moe=MoEConfig(experts=4, chosen=2, hidden=2 * width, capacity_factor=1.5),
        vocabulary=vocabulary,
    )


PRESETS = {
    "jamba-v0.1": jamba_v0_1,
    "jamba-1.5-large": jamba_1_5_large,
    "jamba-s": lambda: octopipe_table_2("S"),
    "jamba-m": lambda: octopipe_table_2("M"),
    "jamba-l": lambda: octopipe_table_2("L"),
    "tiny": tiny,
}
"""Configurations by name; the published ones count as published."""
