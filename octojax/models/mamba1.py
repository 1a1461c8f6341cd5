"""The Mamba-1 mixer: a selective state space model with one decay per channel and state.

Legend: B batch, T time, D width, E inner width, N state size, L chunks, Q chunk length.

Source: Gu and Dao, "Mamba" (2023), section 3; the norms on dt, B and C are Jamba's.
"""

import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from octojax.models.dense import EPSILON, Linear, keeping_inputs, rms_norm
from octojax.models.mamba2 import causal_conv


@dataclass(frozen=True)
class Mamba1Config:
    """Sizes of one mixer."""

    inner: int
    state: int
    dt_rank: int
    conv: int = 4
    chunk: int = 16


def selective_scan(
    x_BTE: jax.Array,
    dt_BTE: jax.Array,
    a_EN: jax.Array,
    b_BTN: jax.Array,
    c_BTN: jax.Array,
    chunk: int,
) -> jax.Array:
    """Returns y of `h_t = exp(dt_t a) h_{t-1} + dt_t x_t b_t`, `y_t = c_t . h_t`.

    A scan over chunks carries the (E, N) state; inside a chunk a parallel prefix builds the
    states, which are rebuilt in the backward, so at most one chunk of them is ever alive.
    """
    batch, time, inner = x_BTE.shape
    chunk = min(chunk, time)
    chunks = math.ceil(time / chunk)

    def in_chunks(v: jax.Array) -> jax.Array:
        padded = jnp.pad(v, ((0, 0), (0, chunks * chunk - time), (0, 0)))
        return jnp.moveaxis(padded.reshape(batch, chunks, chunk, -1), 1, 0)

    def combine(early, late):
        return early[0] * late[0], early[1] * late[0] + late[1]

    @jax.checkpoint
    def one_chunk(h_BEN, at):
        x, dt, b, c = at
        decay = jnp.exp(dt[..., None] * a_EN[None, None])
        gain = (dt * x)[..., None] * b[:, :, None]
        decays, states = jax.lax.associative_scan(combine, (decay, gain), axis=1)
        states = states + decays * h_BEN[:, None]
        return states[:, -1], jnp.einsum("BQEN,BQN->BQE", states, c)

    start = jnp.zeros((batch, inner, a_EN.shape[1]), x_BTE.dtype)
    _, y = jax.lax.scan(one_chunk, start, tuple(map(in_chunks, (x_BTE, dt_BTE, b_BTN, c_BTN))))
    return jnp.moveaxis(y, 0, 1).reshape(batch, chunks * chunk, inner)[:, :time]


def _convolved(x, weight, bias):
    f32 = jnp.float32
    return jax.nn.silu(causal_conv(x.astype(f32), weight.astype(f32), bias.astype(f32))).astype(
        x.dtype
    )


@jax.custom_vjp
def convolved(x_BTE: jax.Array, weight_KE: jax.Array, bias_E: jax.Array) -> jax.Array:
    """Returns silu of the causal convolution; keeps its inputs alone."""
    return _convolved(x_BTE, weight_KE, bias_E)


convolved.defvjp(
    lambda *inputs: (_convolved(*inputs), inputs),
    lambda inputs, gradient: jax.vjp(_convolved, *inputs)[1](gradient),
)


@keeping_inputs
def mamba1_core(chunk, z, x, dt, b, c, dt_bias, a_log, skip):
    """Returns the gated output of the recurrence."""
    f32 = jnp.float32
    wide = x.astype(f32)
    step = jax.nn.softplus(dt.astype(f32) + dt_bias.astype(f32)[None, None])
    rates = -jnp.exp(a_log.astype(f32))
    y = selective_scan(wide, step, rates, b.astype(f32), c.astype(f32), chunk)
    y = y + wide * skip.astype(f32)[None, None]
    return (y * jax.nn.silu(z.astype(f32))).astype(z.dtype)


class Mamba1(nnx.Module):
    """One mixer of Jamba: in, convolution, selective scan with normed dt, B and C, out."""

    def __init__(
        self,
        width: int,
        config: Mamba1Config,
        *,
        epsilon: float = EPSILON,
        std: float,
        out_std: float,
        dtype: DTypeLike,
        param_dtype: DTypeLike,
        rngs: nnx.Rngs,
    ):
        kinds = {"dtype": dtype, "param_dtype": param_dtype, "rngs": rngs}
        inner, state, rank = config.inner, config.state, config.dt_rank
        self.config = config
        self.dtype, self.epsilon = dtype, epsilon
        self.into = Linear(width, 2 * inner, std=std, **kinds)
        self.select = Linear(inner, rank + 2 * state, std=std, **kinds)
        self.dt = Linear(rank, inner, std=rank**-0.5, **kinds)
        self.out = Linear(inner, width, std=out_std, **kinds)
        bound = 1 / math.sqrt(config.conv)
        draw = jax.random.uniform(rngs.params(), (config.conv, inner), param_dtype, -bound, bound)
        self.conv_weight = nnx.Param(draw)
        self.conv_bias = nnx.Param(jnp.zeros((inner,), param_dtype))
        dt = jnp.exp(
            jax.random.uniform(rngs.params(), (inner,), param_dtype, math.log(1e-3), math.log(1e-1))
        )
        self.dt_bias = nnx.Param(dt + jnp.log(-jnp.expm1(-dt)))
        rates = jnp.arange(1, state + 1, dtype=param_dtype)
        self.a_log = nnx.Param(jnp.log(jnp.broadcast_to(rates, (inner, state))))
        self.skip = nnx.Param(jnp.ones((inner,), param_dtype))
        self.dt_scale = nnx.Param(jnp.ones((rank,), param_dtype))
        self.b_scale = nnx.Param(jnp.ones((state,), param_dtype))
        self.c_scale = nnx.Param(jnp.ones((state,), param_dtype))

    def __call__(self, x_BTD: jax.Array) -> jax.Array:
        rank, state = self.config.dt_rank, self.config.state
        x, z = jnp.split(self.into(x_BTD), 2, axis=-1)
        x = convolved(x, self.conv_weight[...], self.conv_bias[...])
        dt, b, c = jnp.split(self.select(x), [rank, rank + state], axis=-1)
        dt = self.dt(rms_norm(dt, self.dt_scale[...], self.dtype, self.epsilon))
        b = rms_norm(b, self.b_scale[...], self.dtype, self.epsilon)
        c = rms_norm(c, self.c_scale[...], self.dtype, self.epsilon)
        y = mamba1_core(
            self.config.chunk, z, x, dt, b, c, self.dt_bias[...], self.a_log[...], self.skip[...]
        )
        return self.out(y)
