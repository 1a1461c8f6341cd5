"""Causal attention with grouped heads that never keeps a score matrix.

Legend: B batch, T queries, S keys, D width, H query heads, G key/value heads, R = H / G,
K head width. The width of values (and of the output) may be another.
"""

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from octojax.models.dense import EPSILON, Linear, RMSNorm
from octojax.models.rotary import Rotary, rotate

MAX_BLOCKS = 16  # query blocks are unrolled; longer sequences get longer blocks


class Mask(NamedTuple):
    """Which keys a query sees: its own position and those before, `window` of them or all.

    Scores are multiplied by `scale` (None: 1 / sqrt(K)) and softly capped to
    `cap * tanh(score / cap)` (Gemma 2).
    """

    window: int | None = None
    block: int = 512
    scale: float | None = None
    cap: float | None = None

    def factor(self, width: int) -> float:
        return 1 / math.sqrt(width) if self.scale is None else self.scale


CAUSAL = Mask()


def _causal_attention(
    q_BTHK: jax.Array, k_BTGK: jax.Array, v_BTGK: jax.Array, mask: Mask = CAUSAL
) -> jax.Array:
    """Returns softmax(scale q k^T) v under the causal mask, as (B, T, H, K).

    Works on blocks of queries against the keys they can see, and keeps q, k, v, the output
    and the log of the softmax's denominator (FlashAttention, Dao et al. 2022, algorithm 1).
    Scores and softmax are float32 whatever the inputs are.
    """
    return _attention_forward(q_BTHK, k_BTGK, v_BTGK, mask)[0]


def _blocks(length: int, mask: Mask) -> list[tuple[int, int, int]]:
    """Returns `(first query, end, first key)` of each block; its keys end where it ends."""
    size = max(mask.block, math.ceil(length / MAX_BLOCKS))
    starts = range(0, length, size)
    back = length if mask.window is None else mask.window - 1
    return [(start, min(start + size, length), max(0, start - back)) for start in starts]


def _scores(q_BTGRK, k_BSGK, first_query: int, first_key: int, mask: Mask) -> jax.Array:
    scores = jnp.einsum(
        "BTGRK,BSGK->BGRTS", q_BTGRK, k_BSGK, preferred_element_type=jnp.float32
    ) * mask.factor(q_BTGRK.shape[-1])
    if mask.cap is not None:
        scores = mask.cap * jnp.tanh(scores / mask.cap)
    query_T = first_query + jnp.arange(q_BTGRK.shape[1])
    key_S = first_key + jnp.arange(k_BSGK.shape[1])
    distance_TS = query_T[:, None] - key_S[None, :]
    visible = distance_TS >= 0
    if mask.window is not None:
        visible &= distance_TS < mask.window
    return jnp.where(visible[None, None, None], scores, -jnp.inf)


def _grouped(x_BTHK: jax.Array, groups: int) -> jax.Array:
    batch, time, heads, width = x_BTHK.shape
    return x_BTHK.reshape(batch, time, groups, heads // groups, width)


def _attention_forward(q_BTHK, k_BTGK, v_BTGK, mask):
    q_BTGRK = _grouped(q_BTHK, k_BTGK.shape[2])
    outputs, logs = [], []
    for start, end, key in _blocks(q_BTHK.shape[1], mask):
        scores = _scores(q_BTGRK[:, start:end], k_BTGK[:, key:end], start, key, mask)
        top = jnp.max(scores, axis=-1, keepdims=True)
        weights = jnp.exp(scores - top)
        total = jnp.sum(weights, axis=-1, keepdims=True)
        outputs.append(
            jnp.einsum(
                "BGRTS,BSGK->BTGRK",
                (weights / total).astype(v_BTGK.dtype),
                v_BTGK[:, key:end],
                preferred_element_type=jnp.float32,
            ).astype(q_BTHK.dtype)
        )
        logs.append((top + jnp.log(total))[..., 0])
    out_BTHK = jnp.concatenate(outputs, axis=1).reshape(*q_BTHK.shape[:3], -1)
    log_BGRT = jnp.concatenate(logs, axis=-1)
    return out_BTHK, (q_BTHK, k_BTGK, v_BTGK, out_BTHK, log_BGRT)


def _attention_backward(mask, residuals, dout_BTHK):
    q_BTHK, k_BTGK, v_BTGK, out_BTHK, log_BGRT = residuals
    groups, dtype = k_BTGK.shape[2], q_BTHK.dtype
    q_BTGRK, dout_BTGRK = _grouped(q_BTHK, groups), _grouped(dout_BTHK, groups)
    along = jnp.sum(dout_BTHK.astype(jnp.float32) * out_BTHK.astype(jnp.float32), axis=-1)
    along_BGRT = jnp.moveaxis(_grouped(along[..., None], groups)[..., 0], 1, -1)
    einsum = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)
    dq, dk, dv = [], jnp.zeros(k_BTGK.shape, jnp.float32), jnp.zeros(v_BTGK.shape, jnp.float32)
    for start, end, key in _blocks(q_BTHK.shape[1], mask):
        q, k, v = q_BTGRK[:, start:end], k_BTGK[:, key:end], v_BTGK[:, key:end]
        dout = dout_BTGRK[:, start:end]
        scores = _scores(q, k, start, key, mask)
        weights = jnp.exp(scores - log_BGRT[..., start:end, None])
        dweights = einsum("BTGRK,BSGK->BGRTS", dout, v)
        dscores = weights * (dweights - along_BGRT[..., start:end, None])
        if mask.cap is not None:  # the derivative of tanh; masked scores have no weight
            dscores *= 1 - jnp.square(jnp.where(weights > 0, scores, 0) / mask.cap)
        dscores = (dscores * mask.factor(q.shape[-1])).astype(dtype)
        dq.append(einsum("BGRTS,BSGK->BTGRK", dscores, k).astype(dtype))
        dk = dk.at[:, key:end].add(einsum("BGRTS,BTGRK->BSGK", dscores, q))
        dv = dv.at[:, key:end].add(einsum("BGRTS,BTGRK->BSGK", weights.astype(dtype), dout))
    dq_BTHK = jnp.concatenate(dq, axis=1).reshape(q_BTHK.shape)
    return dq_BTHK, dk.astype(k_BTGK.dtype), dv.astype(v_BTGK.dtype)


causal_attention = jax.custom_vjp(_causal_attention, nondiff_argnums=(3,))
causal_attention.defvjp(_attention_forward, _attention_backward)


class Attention(nnx.Module):
    """Causal attention with `heads` query heads over `kv_heads` key/value heads.

    `rotary` None leaves positions out (Nemotron-H, Jamba); `qk_norm` norms every head's
    queries and keys before the rotation, `centered` and `epsilon` are those norms'.
    """

    def __init__(
        self,
        width: int,
        heads: int,
        kv_heads: int,
        head_dim: int,
        *,
        rotary: Rotary | None = None,
        mask: Mask = CAUSAL,
        qk_norm: bool = False,
        centered: bool = False,
        epsilon: float = EPSILON,
        std: float,
        out_std: float,
        dtype: DTypeLike,
        param_dtype: DTypeLike,
        rngs: nnx.Rngs,
    ):
        if heads % kv_heads:
            raise ValueError(
                f"{heads} query heads cannot share {kv_heads} key/value heads evenly; "
                f"use a divisor of {heads}"
            )
        kinds = {"dtype": dtype, "param_dtype": param_dtype, "rngs": rngs}
        self.heads, self.kv_heads, self.head_dim = heads, kv_heads, head_dim
        self.rotary, self.mask = rotary, mask
        self.qkv = Linear(width, (heads + 2 * kv_heads) * head_dim, std=std, **kinds)
        self.out = Linear(heads * head_dim, width, std=out_std, **kinds)
        norms = {
            "dtype": dtype,
            "param_dtype": param_dtype,
            "epsilon": epsilon,
            "centered": centered,
        }
        self.q_norm = RMSNorm(head_dim, **norms) if qk_norm else None
        self.k_norm = RMSNorm(head_dim, **norms) if qk_norm else None

    def __call__(self, x_BTD: jax.Array) -> jax.Array:
        batch, time, _ = x_BTD.shape
        qkv = self.qkv(x_BTD).reshape(batch, time, -1, self.head_dim)
        q_BTHK = qkv[:, :, : self.heads]
        k_BTGK = qkv[:, :, self.heads : self.heads + self.kv_heads]
        v_BTGK = qkv[:, :, self.heads + self.kv_heads :]
        if self.q_norm is not None and self.k_norm is not None:
            q_BTHK, k_BTGK = self.q_norm(q_BTHK), self.k_norm(k_BTGK)
        if self.rotary is not None:
            q_BTHK, k_BTGK = rotate(q_BTHK, self.rotary), rotate(k_BTGK, self.rotary)
        out_BTHK = causal_attention(q_BTHK, k_BTGK, v_BTGK, self.mask)
        return self.out(out_BTHK.reshape(batch, time, -1))
