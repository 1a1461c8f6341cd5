"""The Mamba-2 mixer: a state space model computed as matrix products over chunks.

Legend: B batch, T time, D width, E inner width, H heads, P head width (H P = E), G groups,
R = H / G, N state size, C chunks, Q chunk length.

Source: Dao and Gu, "Transformers are SSMs" (2024), section 6 and listing 1.
"""

import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from octojax.models.dense import EPSILON, Linear, keeping_inputs, rms_norm


@dataclass(frozen=True)
class Mamba2Config:
    """Sizes of one mixer. `inner` is `heads * head_dim`."""

    heads: int
    head_dim: int
    groups: int
    state: int
    conv: int = 4
    chunk: int = 128
    epsilon: float = EPSILON

    def __post_init__(self) -> None:
        if self.heads % self.groups:
            raise ValueError(
                f"{self.heads} Mamba-2 heads cannot form {self.groups} groups evenly; "
                f"use a divisor of {self.heads}"
            )

    @property
    def inner(self) -> int:
        return self.heads * self.head_dim

    @property
    def mixed(self) -> int:
        """Channels that pass through the convolution: x, B and C."""
        return self.inner + 2 * self.groups * self.state


def causal_conv(x_BTE: jax.Array, weight_KE: jax.Array, bias_E: jax.Array) -> jax.Array:
    """Returns the depthwise convolution over the K latest positions, the last row newest."""
    width, time = weight_KE.shape[0], x_BTE.shape[1]
    padded = jnp.pad(x_BTE, ((0, 0), (width - 1, 0), (0, 0)))
    taps = [padded[:, k : k + time] * weight_KE[k][None, None] for k in range(width)]
    return sum(taps[1:], taps[0]) + bias_E[None, None]


def ssd(
    x_BTHP: jax.Array,
    dt_BTH: jax.Array,
    a_H: jax.Array,
    b_BTGN: jax.Array,
    c_BTGN: jax.Array,
    chunk: int,
) -> jax.Array:
    """Returns y of `h_t = exp(dt_t a) h_{t-1} + dt_t b_t x_t`, `y_t = c_t h_t`, per head.

    Inside a chunk y is a masked matrix product, as attention is; between chunks only the
    (N, P) states are carried, by one short scan. Any T: the last chunk is padded with dt = 0,
    which changes no state.
    """
    batch, time, heads, width = x_BTHP.shape
    groups, state = b_BTGN.shape[2:]
    per_group = heads // groups
    chunk = min(chunk, time)
    chunks = math.ceil(time / chunk)

    def in_chunks(v: jax.Array, *rest: int) -> jax.Array:
        gap = [(0, 0), (0, chunks * chunk - time)] + [(0, 0)] * (v.ndim - 2)
        return jnp.pad(v, gap).reshape(batch, chunks, chunk, *rest)

    x = in_chunks(x_BTHP, groups, per_group, width)
    dt = in_chunks(dt_BTH, groups, per_group)
    b, c = in_chunks(b_BTGN, groups, state), in_chunks(c_BTGN, groups, state)
    rate = dt * a_H.reshape(1, 1, 1, groups, per_group)
    total = jnp.cumsum(rate, axis=2)  # log of the decay since the chunk began
    end = total[:, :, -1:]
    x_dt = x * dt[..., None]

    later = jnp.tril(jnp.ones((chunk, chunk), bool))[None, None, :, :, None, None]
    log_decay = jnp.where(later, total[:, :, :, None] - total[:, :, None], -jnp.inf)
    scores = jnp.einsum("BCQGN,BCSGN->BCQSG", c, b)[..., None] * jnp.exp(log_decay)
    inside = jnp.einsum("BCQSGR,BCSGRP->BCQGRP", scores, x_dt)

    gains = jnp.einsum("BCQGN,BCQGRP->BCGRNP", b, x_dt * jnp.exp(end - total)[..., None])
    decays = jnp.exp(end[:, :, 0])

    def carry(h, at):
        decay, gain = at
        return h * decay[..., None, None] + gain, h

    start = jnp.zeros((batch, groups, per_group, state, width), x.dtype)
    _, entering = jax.lax.scan(
        carry, start, (jnp.moveaxis(decays, 1, 0), jnp.moveaxis(gains, 1, 0))
    )
    outside = jnp.einsum("BCQGN,CBGRNP->BCQGRP", c, entering) * jnp.exp(total)[..., None]
    y = (inside + outside).reshape(batch, chunks * chunk, heads, width)
    return y[:, :time]


@keeping_inputs
def mamba2_core(config: Mamba2Config, zxbcdt, conv_weight, conv_bias, dt_bias, a_log, skip, scale):
    """Returns convolution, recurrence, skip, gate and norm of the projected (z, x, B, C, dt).

    Computing the recurrence again is cheap next to the projections, where keeping decay matrices
    would cost Q times the layer's input.
    """
    sizes = [config.inner, config.inner + config.mixed]
    z, xbc, dt = jnp.split(zxbcdt, sizes, axis=-1)
    batch, time, _ = z.shape
    f32 = jnp.float32
    xbc = jax.nn.silu(causal_conv(xbc.astype(f32), conv_weight.astype(f32), conv_bias.astype(f32)))
    bc = config.groups * config.state
    x, b, c = jnp.split(xbc, [config.inner, config.inner + bc], axis=-1)
    x = x.reshape(batch, time, config.heads, config.head_dim)
    b = b.reshape(batch, time, config.groups, config.state)
    c = c.reshape(batch, time, config.groups, config.state)
    dt = jax.nn.softplus(dt.astype(f32) + dt_bias.astype(f32)[None, None])
    y = ssd(x, dt, -jnp.exp(a_log.astype(f32)), b, c, config.chunk)
    y = y + x * skip.astype(f32)[None, None, :, None]
    gated = y.reshape(batch, time, -1) * jax.nn.silu(z.astype(f32))
    grouped = gated.reshape(batch, time, config.groups, -1)  # one norm per group
    ones = jnp.ones(grouped.shape[-1:], f32)
    normed = rms_norm(grouped, ones, f32, config.epsilon).reshape(gated.shape)
    return (normed * scale.astype(f32)[None, None]).astype(zxbcdt.dtype)


class Mamba2(nnx.Module):
    """One mixer: projection to (z, x, B, C, dt), the recurrence, projection back."""

    def __init__(
        self,
        width: int,
        config: Mamba2Config,
        *,
        std: float,
        out_std: float,
        dtype: DTypeLike,
        param_dtype: DTypeLike,
        rngs: nnx.Rngs,
    ):
        kinds = {"dtype": dtype, "param_dtype": param_dtype, "rngs": rngs}
        outputs = config.inner + config.mixed + config.heads
        self.config = config
        self.into = Linear(width, outputs, std=std, **kinds)
        self.out = Linear(config.inner, width, std=out_std, **kinds)
        bound = 1 / math.sqrt(config.conv)
        draw = jax.random.uniform(
            rngs.params(), (config.conv, config.mixed), param_dtype, -bound, bound
        )
        self.conv_weight = nnx.Param(draw)
        self.conv_bias = nnx.Param(jnp.zeros((config.mixed,), param_dtype))
        # Time steps between 1e-3 and 1e-1, decay rates between 1 and 16, as published.
        dt = jnp.exp(
            jax.random.uniform(
                rngs.params(), (config.heads,), param_dtype, math.log(1e-3), math.log(1e-1)
            )
        )
        self.dt_bias = nnx.Param(dt + jnp.log(-jnp.expm1(-dt)))  # softplus's inverse
        rates = jax.random.uniform(rngs.params(), (config.heads,), param_dtype, 1.0, 16.0)
        self.a_log = nnx.Param(jnp.log(rates))
        self.skip = nnx.Param(jnp.ones((config.heads,), param_dtype))
        self.scale = nnx.Param(jnp.ones((config.inner,), param_dtype))

    def __call__(self, x_BTD: jax.Array) -> jax.Array:
        parameters = (
            self.conv_weight,
            self.conv_bias,
            self.dt_bias,
            self.a_log,
            self.skip,
            self.scale,
        )
        return self.out(mamba2_core(self.config, self.into(x_BTD), *(p[...] for p in parameters)))
