"""Rotary positions, as they were published and as they were stretched to longer texts.

Legend: B batch, T time, H heads, K head width.
"""

import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp


@dataclass(frozen=True)
class Smoothing:
    """LLaMA 3.1's blend: waves that turn at least `high` times within `original` positions keep
    their rate, those that turn at most `low` times are stretched, between the two is linear."""

    low: float = 1.0
    high: float = 4.0
    original: int = 8192


@dataclass(frozen=True)
class Rotary:
    """Rates of rotation: pair i turns by `base^(-2i/K)` radians a position, `stretch` times
    slower (Gemma 3 beyond 1B: 8), all of them or by `smoothing`.

    `part` is the share of the head's width that turns, from its beginning (Qwen3-Next: a
    quarter). `interleaved` pairs neighbours (DeepSeek-V3) where else halves are paired.
    """

    base: float
    stretch: float = 1.0
    smoothing: Smoothing | None = None
    part: float = 1.0
    interleaved: bool = False

    def rates(self, pairs: int) -> jax.Array:
        """Returns the radians per position of each pair, float32."""
        rates = self.base ** (-jnp.arange(pairs, dtype=jnp.float32) / pairs)
        if self.smoothing is None:
            return rates / self.stretch
        smooth = self.smoothing
        turns = smooth.original * rates / (2 * math.pi)
        share = jnp.clip((turns - smooth.low) / (smooth.high - smooth.low), 0, 1)
        return rates * (share + (1 - share) / self.stretch)


def rotate(x_BTHK: jax.Array, rotary: Rotary) -> jax.Array:
    """Returns x with rotary positions (Su et al. 2021); with `interleaved` its pairs come out
    as halves, which leaves products of queries and keys as they are."""
    turning = int(x_BTHK.shape[-1] * rotary.part)
    x_BTHK, rest = x_BTHK[..., :turning], x_BTHK[..., turning:]
    half = turning // 2
    if rotary.interleaved:
        left, right = x_BTHK[..., ::2], x_BTHK[..., 1::2]
    else:
        left, right = x_BTHK[..., :half], x_BTHK[..., half:]
    time_T = jnp.arange(x_BTHK.shape[1], dtype=jnp.float32)
    angle_TK = time_T[:, None] * rotary.rates(half)[None, :]
    cos = jnp.cos(angle_TK)[None, :, None].astype(x_BTHK.dtype)
    sin = jnp.sin(angle_TK)[None, :, None].astype(x_BTHK.dtype)
    turned = [left * cos - right * sin, right * cos + left * sin]
    return jnp.concatenate([*turned, rest] if rest.shape[-1] else turned, axis=-1)
