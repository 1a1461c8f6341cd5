"""Multi-head latent attention: keys and values from one small vector per token.

Legend: B batch, T time, D width, Q and C widths of the latent queries and keys, H heads,
N and R head widths without and with positions, V head width of values.

Source: DeepSeek-AI, "DeepSeek-V2" (2024), section 2.1.
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from octojax.models.attention import causal_attention
from octojax.models.dense import Linear, RMSNorm
from octojax.models.rotary import Rotary, rotate


@dataclass(frozen=True)
class LatentConfig:
    """Sizes of one latent attention: every head has `plain` features without positions and
    `turning` ones with; those of the key are shared by all heads."""

    heads: int
    query_rank: int
    key_rank: int
    plain: int
    turning: int
    value: int


class LatentAttention(nnx.Module):
    """Causal attention whose queries, keys and values pass through normed latent vectors."""

    def __init__(
        self,
        width: int,
        config: LatentConfig,
        *,
        rotary: Rotary,
        epsilon: float,
        std: float,
        out_std: float,
        dtype: DTypeLike,
        param_dtype: DTypeLike,
        rngs: nnx.Rngs,
    ):
        norms: dict[str, Any] = {"dtype": dtype, "param_dtype": param_dtype, "epsilon": epsilon}
        kinds = {"dtype": dtype, "param_dtype": param_dtype, "rngs": rngs}
        heads, key = config.heads, config.plain + config.turning
        self.config, self.rotary = config, rotary
        self.query_down = Linear(width, config.query_rank, std=std, **kinds)
        self.query_norm = RMSNorm(config.query_rank, **norms)
        self.query_up = Linear(config.query_rank, heads * key, std=std, **kinds)
        self.key_down = Linear(width, config.key_rank + config.turning, std=std, **kinds)
        self.key_norm = RMSNorm(config.key_rank, **norms)
        outputs = heads * (config.plain + config.value)
        self.key_up = Linear(config.key_rank, outputs, std=std, **kinds)
        self.out = Linear(heads * config.value, width, std=out_std, **kinds)

    def __call__(self, x_BTD: jax.Array) -> jax.Array:
        config = self.config
        batch, time, _ = x_BTD.shape
        by_head = (batch, time, config.heads, -1)
        q = self.query_up(self.query_norm(self.query_down(x_BTD))).reshape(by_head)
        q_BTHN, q_BTHR = jnp.split(q, [config.plain], axis=-1)
        latent_BTC, k_BTR = jnp.split(self.key_down(x_BTD), [config.key_rank], axis=-1)
        kv = self.key_up(self.key_norm(latent_BTC)).reshape(by_head)
        k_BTHN, v_BTHV = jnp.split(kv, [config.plain], axis=-1)
        k_BT1R = rotate(k_BTR[:, :, None], self.rotary)
        k_BTHR = jnp.broadcast_to(k_BT1R, (*k_BTHN.shape[:3], config.turning))
        query = jnp.concatenate([q_BTHN, rotate(q_BTHR, self.rotary)], axis=-1)
        key = jnp.concatenate([k_BTHN, k_BTHR], axis=-1)
        out_BTHV = causal_attention(query, key, v_BTHV)
        return self.out(out_BTHV.reshape(batch, time, -1))
