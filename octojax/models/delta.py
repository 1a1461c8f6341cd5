"""The gated delta rule: a linear attention that corrects its memory instead of adding to it.

Legend: B batch, T time, D width, G key heads, H value heads, R = H / G, K key width, V value
width, C chunks, Q chunk length.

Source: Yang, Kautz and Hatamizadeh, "Gated Delta Networks" (2024), section 3; projections are
laid out as in Qwen3-Next.
"""

import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from octojax.models.dense import Linear, RMSNorm, keeping_inputs
from octojax.models.mamba2 import causal_conv


@dataclass(frozen=True)
class DeltaConfig:
    """Sizes of one mixer."""

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    conv: int = 4
    chunk: int = 64

    def __post_init__(self) -> None:
        if self.value_heads % self.key_heads:
            raise ValueError(
                f"{self.value_heads} value heads cannot share {self.key_heads} key heads evenly; "
                f"use a divisor of {self.value_heads}"
            )

    @property
    def mixed(self) -> int:
        """Channels that pass through the convolution: queries, keys and values."""
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim


def delta_rule(
    q_BTHK: jax.Array,
    k_BTHK: jax.Array,
    v_BTHV: jax.Array,
    decay_BTH: jax.Array,
    beta_BTH: jax.Array,
    chunk: int,
) -> jax.Array:
    """Returns o of `S = exp(decay_t) S; S += k_t beta_t (v_t - S^T k_t)^T; o_t = S^T q_t`.

    Inside a chunk the corrections solve one triangular system; between chunks only the (K, V)
    states are carried. Any T: the last chunk is padded with steps that change no state.
    """
    batch, time, heads, _ = q_BTHK.shape
    chunk = min(chunk, time)
    chunks = math.ceil(time / chunk)

    def in_chunks(x: jax.Array) -> jax.Array:  # (C, B, H, Q, ...)
        gap = [(0, 0), (0, chunks * chunk - time)] + [(0, 0)] * (x.ndim - 2)
        x = jnp.pad(x, gap).reshape(batch, chunks, chunk, *x.shape[2:])
        return jnp.moveaxis(jnp.moveaxis(x, 1, 0), 3, 2)

    upto = jnp.tril(jnp.ones((chunk, chunk), bool))[None, None]
    before = jnp.tril(jnp.ones((chunk, chunk), bool), -1)[None, None]

    def one_chunk(state, at):
        q, k, v, decay, beta = at
        total = jnp.cumsum(decay, axis=-1)
        gap = total[..., :, None] - total[..., None, :]
        fading = jnp.exp(jnp.where(upto, gap, -jnp.inf))
        alike = jnp.einsum("BHQK,BHSK->BHQS", k, k) * fading * beta[..., None]
        system = jnp.where(before, alike, 0)
        prediction = jnp.einsum("BHQK,BHKV->BHQV", k, state) * jnp.exp(total)[..., None]
        update = (v - prediction) * beta[..., None]
        correction = jax.lax.linalg.triangular_solve(
            system, update, left_side=True, lower=True, unit_diagonal=True
        )
        scores = jnp.einsum("BHQK,BHSK->BHQS", q, k) * fading
        out = jnp.einsum("BHQS,BHSV->BHQV", scores, correction)
        out += jnp.einsum("BHQK,BHKV->BHQV", q, state) * jnp.exp(total)[..., None]
        later = k * jnp.exp(total[..., -1:] - total)[..., None]
        state = state * jnp.exp(total[..., -1])[..., None, None]
        return state + jnp.einsum("BHQK,BHQV->BHKV", later, correction), out

    start = jnp.zeros((batch, heads, q_BTHK.shape[-1], v_BTHV.shape[-1]), q_BTHK.dtype)
    inputs = tuple(map(in_chunks, (q_BTHK, k_BTHK, v_BTHV, decay_BTH, beta_BTH)))
    _, out = jax.lax.scan(jax.checkpoint(one_chunk), start, inputs)
    out = jnp.moveaxis(jnp.moveaxis(out, 2, 3), 0, 1)
    return out.reshape(batch, chunks * chunk, heads, -1)[:, :time]


def _unit(x: jax.Array) -> jax.Array:
    return x * jax.lax.rsqrt(jnp.sum(x * x, axis=-1, keepdims=True) + 1e-6)


@keeping_inputs
def delta_core(config: DeltaConfig, qkv, decay, beta, conv_weight, dt_bias, a_log):
    """Returns the outputs of all heads; everything between the projections and the norm."""
    f32 = jnp.float32
    batch, time, _ = qkv.shape
    weight = conv_weight.astype(f32)
    bias = jnp.zeros(weight.shape[1:], f32)
    qkv = jax.nn.silu(causal_conv(qkv.astype(f32), weight, bias))
    keys = config.key_heads * config.key_dim
    q, k, v = jnp.split(qkv, [keys, 2 * keys], axis=-1)
    times = config.value_heads // config.key_heads
    q, k = (_unit(x.reshape(batch, time, config.key_heads, -1)) for x in (q, k))
    q, k = (jnp.repeat(x, times, axis=2) for x in (q / math.sqrt(config.key_dim), k))
    v = v.reshape(batch, time, config.value_heads, -1)
    step = jax.nn.softplus(decay.astype(f32) + dt_bias.astype(f32)[None, None])
    decay = -jnp.exp(a_log.astype(f32))[None, None] * step
    return delta_rule(q, k, v, decay, jax.nn.sigmoid(beta.astype(f32)), config.chunk)


class GatedDelta(nnx.Module):
    """One mixer: projections per key head to (q, k, v, z) and (beta, decay), the recurrence, a
    norm of every head gated by z, projection back."""

    def __init__(
        self,
        width: int,
        config: DeltaConfig,
        *,
        epsilon: float,
        std: float,
        out_std: float,
        dtype: DTypeLike,
        param_dtype: DTypeLike,
        rngs: nnx.Rngs,
    ):
        kinds = {"dtype": dtype, "param_dtype": param_dtype, "rngs": rngs}
        inner, heads = config.value_heads * config.value_dim, config.value_heads
        self.config, self.dtype = config, dtype
        self.into = Linear(width, config.mixed + inner, std=std, **kinds)
        self.rates = Linear(width, 2 * heads, std=std, **kinds)
        self.out = Linear(inner, width, std=out_std, **kinds)
        bound = 1 / math.sqrt(config.conv)
        draw = jax.random.uniform(
            rngs.params(), (config.conv, config.mixed), param_dtype, -bound, bound
        )
        self.conv_weight = nnx.Param(draw)
        self.dt_bias = nnx.Param(jnp.ones((heads,), param_dtype))
        rates = jax.random.uniform(rngs.params(), (heads,), param_dtype, 0.01, 16.0)
        self.a_log = nnx.Param(jnp.log(rates))
        self.norm = RMSNorm(
            config.value_dim, dtype=jnp.float32, param_dtype=param_dtype, epsilon=epsilon
        )

    def __call__(self, x_BTD: jax.Array) -> jax.Array:
        config = self.config
        batch, time, _ = x_BTD.shape
        per_key = config.value_heads // config.key_heads
        by_key = self.into(x_BTD).reshape(batch, time, config.key_heads, -1)
        ends = [config.key_dim, 2 * config.key_dim]
        parts = jnp.split(by_key, [*ends, ends[1] + per_key * config.value_dim], axis=-1)
        q, k, v, z = (x.reshape(batch, time, -1) for x in parts)
        rates = self.rates(x_BTD).reshape(batch, time, config.key_heads, -1)
        beta, decay = (x.reshape(batch, time, -1) for x in jnp.split(rates, 2, axis=-1))
        qkv = jnp.concatenate([q, k, v], axis=-1)
        parameters = (self.conv_weight[...], self.dt_bias[...], self.a_log[...])
        out_BTHV = self.norm(delta_core(config, qkv, decay, beta, *parameters))
        gate = jax.nn.silu(z.astype(jnp.float32)).reshape(out_BTHV.shape)
        return self.out((out_BTHV * gate).reshape(batch, time, -1).astype(self.dtype))
