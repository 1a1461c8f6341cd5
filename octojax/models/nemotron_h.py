"""Nemotron-H: Mamba-2, attention, feed-forward and expert layers, one mixer per layer.

Legend: B batch, T time, D width of the residual stream.

Source: NVIDIA, "Nemotron-H" (2025); patterns and sizes as published with the models.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from octojax.models.attention import Attention
from octojax.models.dense import MLP, RMSNorm
from octojax.models.language import Embedding, Head, inputs_and_targets, token_loss
from octojax.models.mamba2 import Mamba2, Mamba2Config
from octojax.models.moe import MoE, MoEConfig

SYMBOLS = {"M": "Mamba-2", "*": "attention", "-": "feed-forward", "E": "experts"}


@dataclass(frozen=True)
class NemotronHConfig:
    """Sizes of a Nemotron-H. `pattern` has one symbol per layer: M, *, - or E.

    `dtype` is that of the layers' arithmetic; the residual stream is float32 with
    `residual_in_fp32` and `dtype` without. `balance_weight` scales the experts' balance loss.
    """

    pattern: str
    width: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    mamba: Mamba2Config
    vocabulary: int
    moe: MoEConfig | None = None
    balance_weight: float = 1e-2
    epsilon: float = 1e-5
    residual_in_fp32: bool = True
    dtype: DTypeLike = jnp.float32
    param_dtype: DTypeLike = jnp.float32
    std: float = 0.02

    def __post_init__(self) -> None:
        unknown = sorted(set(self.pattern) - set(SYMBOLS))
        if unknown or not self.pattern:
            raise ValueError(
                f"pattern {self.pattern!r} holds {unknown or 'nothing'}; write one symbol per "
                f"layer: " + ", ".join(f"{k} {v}" for k, v in SYMBOLS.items())
            )
        if "E" in self.pattern and self.moe is None:
            raise ValueError(f"pattern {self.pattern!r} has expert layers; give moe=MoEConfig(...)")

    @property
    def stream_dtype(self) -> DTypeLike:
        return jnp.float32 if self.residual_in_fp32 else self.dtype


def _mixer(symbol: str, config: NemotronHConfig, rngs: nnx.Rngs) -> nnx.Module:
    kinds = {
        "std": config.std,
        "out_std": config.std / math.sqrt(len(config.pattern)),
        "dtype": config.dtype,
        "param_dtype": config.param_dtype,
        "rngs": rngs,
    }
    if symbol == "M":
        return Mamba2(config.width, config.mamba, **kinds)
    if symbol == "*":
        return Attention(config.width, config.heads, config.kv_heads, config.head_dim, **kinds)
    if symbol == "-":
        return MLP(config.width, config.hidden, activation="squared_relu", **kinds)
    assert config.moe is not None
    return MoE(config.width, config.moe, **kinds)


class Layer(nnx.Module):
    """`x + mixer(norm(x))`; an expert layer returns its balance loss as well."""

    def __init__(self, symbol: str, config: NemotronHConfig, rngs: nnx.Rngs):
        self.symbol = symbol
        self.norm = RMSNorm(
            config.width,
            epsilon=config.epsilon,
            dtype=config.dtype,
            param_dtype=config.param_dtype,
        )
        self.mixer = _mixer(symbol, config, rngs)

    def __call__(self, x_BTD: jax.Array) -> tuple[jax.Array, jax.Array | None]:
        mixed = self.mixer(self.norm(x_BTD))
        y_BTD, balance = mixed if self.symbol == "E" else (mixed, None)
        return x_BTD + y_BTD.astype(x_BTD.dtype), balance


class NemotronH(nnx.Module):
    """The language model: tokens (B, T) to logits (B, T, V)."""

    def __init__(self, config: NemotronHConfig, *, rngs: nnx.Rngs):
        self.config = config
        kinds = {"std": config.std, "param_dtype": config.param_dtype, "rngs": rngs}
        self.embedding = Embedding(
            config.vocabulary, config.width, stream_dtype=config.stream_dtype, **kinds
        )
        self.layers = nnx.List([Layer(symbol, config, rngs) for symbol in config.pattern])
        self.head = Head(
            config.width, config.vocabulary, epsilon=config.epsilon, dtype=config.dtype, **kinds
        )

    def outputs(self, token_BT: jax.Array) -> tuple[jax.Array, jax.Array | None]:
        """Returns `(logits, balance)`; the balance loss is None without expert layers.

        Between two layers only the residual stream lives, and the balance so far.
        """
        x_BTD = self.embedding(token_BT)
        total = None
        for layer in self.layers:
            x_BTD, balance = layer(x_BTD)
            if balance is not None:
                total = balance if total is None else total + balance
        return self.head(x_BTD), total

    def __call__(self, token_BT: jax.Array) -> jax.Array:
        return self.outputs(token_BT)[0]


def loss(model: NemotronH, batch: Mapping[str, jax.Array]) -> jax.Array:
    """Returns the mean next-token loss of `{"tokens": (B, T + 1)}`, plus the experts' balance."""
    token_BT, target_BT = inputs_and_targets(batch)
    logits_BTV, balance = model.outputs(token_BT)
    value = token_loss(logits_BTV, target_BT)
    if balance is None:
        return value
    return value + model.config.balance_weight / model.config.pattern.count("E") * balance


_NANO_9B = "M-M-M-MM-M-M-M*-M-M-M*-M-M-M-M*-M-M-M-M*-M-MM-M-M-M-M-M-"


def nemotron_h_8b() -> NemotronHConfig:
    """52 layers: 24 Mamba-2, 24 feed-forward, 4 attention."""
    return NemotronHConfig(
        pattern="M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-",
        width=4096,
        hidden=21504,
        heads=32,
        kv_heads=8,
        head_dim=128,
        mamba=Mamba2Config(heads=128, head_dim=64, groups=8, state=128),
        vocabulary=131072,
    )


def nemotron_h_47b() -> NemotronHConfig:
    """98 layers: 45 Mamba-2, 48 feed-forward, 5 attention."""
    return NemotronHConfig(
        pattern="M-M-M-M-M-M-M-M-M*-M-M-M-M-M-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*"
        "-M-M-M-M-M-M-M---MM---M-M*-M-M-M-M-M-",
        width=8192,
        hidden=30720,
        heads=64,
        kv_heads=8,
        head_dim=128,
        mamba=Mamba2Config(heads=256, head_dim=64, groups=8, state=256),
        vocabulary=131072,
    )


def nemotron_h_56b() -> NemotronHConfig:
    """118 layers: 54 Mamba-2, 54 feed-forward, 10 attention."""
    return replace(
        nemotron_h_47b(), pattern="M-M-M-M*" + "-M-M-M-M-M*" * 9 + "-M-M-M-M-M-", hidden=32768
    )


def nemotron_nano_9b_v2() -> NemotronHConfig:
    """56 layers: 27 Mamba-2, 25 feed-forward, 4 attention."""
    return NemotronHConfig(
        pattern=_NANO_9B,
        width=4480,
        hidden=15680,
        heads=40,
        kv_heads=8,
        head_dim=128,
        mamba=Mamba2Config(heads=128, head_dim=80, groups=8, state=128),
        vocabulary=131072,
    )


def nemotron_nano_12b_v2() -> NemotronHConfig:
    """62 layers: 28 Mamba-2, 28 feed-forward, 6 attention."""
    return replace(
        nemotron_nano_9b_v2(),
        pattern="M-M-M-M*-M-M-M-M*-M-M-M-M*-M-M-M-M*-M-M-M-M*-M-M-M-M*-M-M-M-M-",
        width=5120,
        hidden=20480,
    )


def nemotron_3_nano_30b_a3b() -> NemotronHConfig:
    """52 layers: 23 Mamba-2, 23 expert layers (6 of 128 and a shared one), 6 attention."""
    return NemotronHConfig(
        pattern="MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME",
        width=2688,
        hidden=1856,
        heads=32,
        kv_heads=2,
        head_dim=128,
        mamba=Mamba2Config(heads=64, head_dim=64, groups=8, state=128),
        moe=MoEConfig(
            experts=128,
            chosen=6,
            hidden=1856,
            shared_hidden=3712,
            activation="squared_relu",
            router="sigmoid",
            normalize=True,
            weight_scale=2.5,
            capacity_factor=1.25,
            router_bias=True,
        ),
        vocabulary=131072,
    )


def octopipe_table_2(size: str) -> NemotronHConfig:
    """Returns the OctoPipe paper's TABLE II: `S`, `M` or `L`, the 9B-v2 pattern 1, 2 or 4 times."""
    times = {"S": 1, "M": 2, "L": 4}[size]
    return NemotronHConfig(
        pattern=_NANO_9B * times,
        width=1024,
        hidden=4096,
        heads=16,
        kv_heads=8,
        head_dim=64,
        mamba=Mamba2Config(heads=32, head_dim=64, groups=8, state=128),
        vocabulary=131072 * times,
    )


def tiny(width: int = 128, layers: int = 14, vocabulary: int = 256) -> NemotronHConfig:
    """Returns a byte-level model in the 9B-v2's proportions: 14 layers are 7 M, 6 - and 1 *."""
    base = "M-M-MM-M*-M-M-"
    pattern = (base * math.ceil(layers / len(base)))[:layers]
    return NemotronHConfig(
        pattern=pattern,
        width=width,
        hidden=7 * width // 2,
        heads=max(1, width // 32),
        kv_heads=max(1, width // 64),
        head_dim=32,
        mamba=Mamba2Config(heads=2 * width // 32, head_dim=32, groups=1, state=32, chunk=32),
        vocabulary=vocabulary,
    )


PRESETS = {
    "nemotron-h-8b": nemotron_h_8b,
    "nemotron-h-47b": nemotron_h_47b,
    "nemotron-h-56b": nemotron_h_56b,
    "nemotron-nano-9b-v2": nemotron_nano_9b_v2,
    "nemotron-nano-12b-v2": nemotron_nano_12b_v2,
    "nemotron-3-nano-30b-a3b": nemotron_3_nano_30b_a3b,
    "nemotron-h-s": lambda: octopipe_table_2("S"),
    "nemotron-h-m": lambda: octopipe_table_2("M"),
    "nemotron-h-l": lambda: octopipe_table_2("L"),
    "tiny": tiny,
}
"""Configurations by name; the published ones count as published."""
