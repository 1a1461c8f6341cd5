"""The model of `peers.py` in plain JAX: the same arrays and functions for every library.

A hybrid of blocks "mamlmamm": m a gated linear recurrence, a causal attention, l an MLP, each with
its norm and residual stream; an embedding and a vocabulary head around them.
"""

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

PATTERN = "mlmalmlm"
SIZES = {
    # width, hidden width, vocabulary, blocks, rows and tokens of the whole batch
    "tiny": (32, 64, 256, 16, 16, 32),
    "mid": (128, 512, 512, 16, 16, 128),
}
HEADS = 4
MICROBATCHES = 8

Block = dict[str, Any]


def parameters(size: str) -> list[Block]:
    """Returns the parameters of each layer: embedding, blocks, head."""
    width, hidden, vocabulary, blocks, _, _ = SIZES[size]
    random = np.random.default_rng(0)

    def matrix(rows: int, columns: int) -> np.ndarray:
        return random.normal(0, rows**-0.5, (rows, columns)).astype(np.float32)

    layers: list[Block] = [{"table": matrix(vocabulary, width) * vocabulary**0.5}]
    for kind in (PATTERN * blocks)[:blocks]:
        norm = {"scale": np.ones(width, np.float32)}
        if kind == "m":
            layers.append({**norm, "gate": matrix(width, width), "into": matrix(width, width)})
        elif kind == "a":
            layers.append({**norm, "qkv": matrix(width, 3 * width)})
        else:
            layers.append({**norm, "up": matrix(width, hidden), "down": matrix(hidden, width)})
        if kind != "l":
            layers[-1]["out"] = matrix(width, width)
    layers.append({"scale": np.ones(width, np.float32), "head": matrix(width, vocabulary)})
    return layers


def batch(size: str) -> tuple[np.ndarray, np.ndarray]:
    """Returns tokens and targets, each of rows x length."""
    _, _, vocabulary, _, rows, length = SIZES[size]
    tokens = np.random.default_rng(1).integers(0, vocabulary, (rows, length + 1), np.int32)
    return tokens[:, :-1], tokens[:, 1:]


def _normed(x: jax.Array, scale: jax.Array) -> jax.Array:
    return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6) * scale


def apply(block: Block, x: jax.Array) -> jax.Array:
    """Returns what one layer makes of its input."""
    if "table" in block:
        return block["table"][x]
    h = _normed(x, block["scale"])
    if "head" in block:
        return h @ block["head"]
    if "up" in block:
        return x + jnp.square(jax.nn.relu(h @ block["up"])) @ block["down"]
    if "gate" in block:
        decay, value = jax.nn.sigmoid(h @ block["gate"]), h @ block["into"]

        def both(left: Any, right: Any) -> Any:
            return left[0] * right[0], left[1] * right[0] + right[1]

        _, state = jax.lax.associative_scan(both, (decay, value), axis=1)
        return x + state @ block["out"]
    q, k, v = jnp.split((h @ block["qkv"]).reshape(*h.shape[:2], HEADS, -1), 3, axis=-1)
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) * q.shape[-1] ** -0.5
    length = h.shape[1]
    scores = jnp.where(jnp.tril(jnp.ones((length, length), bool)), scores, -1e30)
    mixed = jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), v)
    return x + mixed.reshape(h.shape) @ block["out"]


def cross_entropy(logits: jax.Array, targets: jax.Array) -> jax.Array:
    """Returns the mean negative log likelihood in nats."""
    chosen = jnp.take_along_axis(logits, targets[..., None], -1)[..., 0]
    return jnp.mean(jax.nn.logsumexp(logits, -1) - chosen)


def loss(layers: list[Block], tokens: jax.Array, targets: jax.Array) -> jax.Array:
    x = tokens
    for block in layers:
        x = apply(block, x)
    return cross_entropy(x, targets)


def stages(layers: list[Any], count: int) -> list[list[Any]]:
    """Returns the layers in `count` stages: blocks evenly, embedding and head at the ends."""
    blocks = len(layers) - 2
    bounds = [0] + [1 + blocks * k // count for k in range(1, count)] + [len(layers)]
    return [layers[a:b] for a, b in itertools.pairwise(bounds)]
