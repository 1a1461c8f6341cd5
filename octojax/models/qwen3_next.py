"""Qwen3-Next: three gated delta mixers to one gated attention, experts in every layer.

Legend: B batch, T time, D width of the residual stream, H heads, K head width.

Source: Qwen Team, "Qwen3-Next" (2025), and the published configuration; the layer for
multi-token prediction is left out.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from octojax.models.attention import causal_attention
from octojax.models.delta import DeltaConfig, GatedDelta
from octojax.models.dense import Linear, RMSNorm
from octojax.models.language import BalancedLanguageModel, balanced_loss
from octojax.models.moe import MoE, MoEConfig
from octojax.models.rotary import Rotary, rotate


@dataclass(frozen=True)
class Qwen3NextConfig:
    """Sizes of a Qwen3-Next: layer i attends where `(i + 1) % attention_every == 0`."""

    layers: int
    width: int
    heads: int
    kv_heads: int
    head_dim: int
    delta: DeltaConfig
    moe: MoEConfig
    vocabulary: int
    attention_every: int = 4
    rope_base: float = 10_000_000.0
    rope_part: float = 0.25
    balance_weight: float = 1e-3
    epsilon: float = 1e-6
    dtype: DTypeLike = jnp.float32
    param_dtype: DTypeLike = jnp.float32
    std: float = 0.02

    def attends(self, layer: int) -> bool:
        return (layer + 1) % self.attention_every == 0

    @property
    def pattern(self) -> str:
        """`D` for a gated delta mixer, `A` for attention."""
        return "".join("A" if self.attends(i) else "D" for i in range(self.layers))


class GatedAttention(nnx.Module):
    """Grouped attention with normed queries and keys, whose output every query head gates."""

    def __init__(self, config: Qwen3NextConfig, out_std: float, rngs: nnx.Rngs):
        dtypes: dict[str, Any] = {"dtype": config.dtype, "param_dtype": config.param_dtype}
        kinds = {"rngs": rngs, **dtypes}
        norms: dict[str, Any] = {"epsilon": config.epsilon, "centered": True, **dtypes}
        width, head = config.width, config.head_dim
        self.rotary = Rotary(config.rope_base, part=config.rope_part)
        self.sizes = config.heads, config.kv_heads, head
        self.query = Linear(width, 2 * config.heads * head, std=config.std, **kinds)
        self.key = Linear(width, config.kv_heads * head, std=config.std, **kinds)
        self.value = Linear(width, config.kv_heads * head, std=config.std, **kinds)
        self.out = Linear(config.heads * head, width, std=out_std, **kinds)
        self.q_norm = RMSNorm(head, **norms)
        self.k_norm = RMSNorm(head, **norms)

    def __call__(self, x_BTD: jax.Array) -> jax.Array:
        heads, kv_heads, head = self.sizes
        batch, time, _ = x_BTD.shape
        both = self.query(x_BTD).reshape(batch, time, heads, 2 * head)
        q_BTHK, gate_BTHK = jnp.split(both, 2, axis=-1)
        k_BTGK = self.key(x_BTD).reshape(batch, time, kv_heads, head)
        v_BTGK = self.value(x_BTD).reshape(batch, time, kv_heads, head)
        q_BTHK = rotate(self.q_norm(q_BTHK), self.rotary)
        k_BTGK = rotate(self.k_norm(k_BTGK), self.rotary)
        out_BTHK = causal_attention(q_BTHK, k_BTGK, v_BTGK) * jax.nn.sigmoid(gate_BTHK)
        return self.out(out_BTHK.reshape(batch, time, -1))


class Layer(nnx.Module):
    """`x + mixer(norm(x))`, then `x + experts(norm(x))`, adding to the balance loss."""

    def __init__(self, index: int, config: Qwen3NextConfig, rngs: nnx.Rngs):
        dtypes: dict[str, Any] = {"dtype": config.dtype, "param_dtype": config.param_dtype}
        norms: dict[str, Any] = {"epsilon": config.epsilon, "centered": True, **dtypes}
        out_std = config.std / math.sqrt(2 * config.layers)
        kinds = {"std": config.std, "out_std": out_std, "rngs": rngs, **dtypes}
        self.mixer_norm = RMSNorm(config.width, **norms)
        self.experts_norm = RMSNorm(config.width, **norms)
        if config.attends(index):
            self.mixer = GatedAttention(config, out_std, rngs)
        else:
            self.mixer = GatedDelta(config.width, config.delta, epsilon=config.epsilon, **kinds)
        self.experts = MoE(config.width, config.moe, **kinds)

    def __call__(self, x_BTD: jax.Array, balance: jax.Array | None) -> tuple[jax.Array, jax.Array]:
        x_BTD = x_BTD + self.mixer(self.mixer_norm(x_BTD))
        y_BTD, more = self.experts(self.experts_norm(x_BTD))
        return x_BTD + y_BTD, more if balance is None else balance + more


class Qwen3Next(BalancedLanguageModel):
    """The language model: tokens (B, T) to logits (B, T, V)."""

    def __init__(self, config: Qwen3NextConfig, *, rngs: nnx.Rngs):
        super().__init__(config, lambda i: Layer(i, config, rngs), centered=True, rngs=rngs)


def loss(model: Qwen3Next, batch: Mapping[str, jax.Array]) -> jax.Array:
    """Returns the mean next-token loss of `{"tokens": (B, T + 1)}`, plus the experts' balance."""
    return balanced_loss(model, batch, model.config.layers)


def qwen3_next_80b_a3b() -> Qwen3NextConfig:
    """48 layers, 80 billion parameters, 3 active: 36 delta mixers, 12 attention, 10 of 512
    experts and a gated shared one."""
    return Qwen3NextConfig(
        layers=48,
        width=2048,
        heads=16,
        kv_heads=2,
        head_dim=256,
        delta=DeltaConfig(key_heads=16, value_heads=32, key_dim=128, value_dim=128),
        moe=MoEConfig(
            experts=512,
            chosen=10,
            hidden=512,
            shared_hidden=512,
            shared_gate=True,
            normalize=True,
            method="ragged",
        ),
        vocabulary=151_936,
    )


PRESETS = {"qwen3-next-80b-a3b": qwen3_next_80b_a3b}
"""Configurations by name; they count as published."""
