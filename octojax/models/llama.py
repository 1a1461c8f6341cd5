"""LLaMA 2, 3 and 3.1: rotary positions, grouped heads, SwiGLU.

Source: Meta, "Llama 2" (2023), "The Llama 3 Herd of Models" (2024), table 3.
"""

from octojax.models.rotary import Smoothing
from octojax.models.transformer import Transformer as Llama
from octojax.models.transformer import TransformerConfig as LlamaConfig
from octojax.models.transformer import loss as loss

__all__ = ["PRESETS", "Llama", "LlamaConfig", "llama", "loss", "octopipe_table_2", "tiny"]

_SIZES = {
    # name: layers, width, hidden, heads, kv_heads
    "llama-2-7b": (32, 4096, 11008, 32, 32),
    "llama-2-13b": (40, 5120, 13824, 40, 40),
    "llama-2-70b": (80, 8192, 28672, 64, 8),
    "llama-3-8b": (32, 4096, 14336, 32, 8),
    "llama-3-70b": (80, 8192, 28672, 64, 8),
    "llama-3-405b": (126, 16384, 53248, 128, 8),
}


def llama(name: str) -> LlamaConfig:
    """Returns a published LLaMA by name, such as `llama-3-8b`."""
    if name not in _SIZES:
        raise ValueError(f"unknown model {name!r}; known are {', '.join(_SIZES)}")
    layers, width, hidden, heads, kv_heads = _SIZES[name]
    second = name.startswith("llama-2")
    longer = name == "llama-3-405b"  # published as 3.1 alone, with positions stretched
    return LlamaConfig(
        layers=layers,
        width=width,
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=128,
        vocabulary=32_000 if second else 128_256,
        rope_base=10_000.0 if second else 500_000.0,
        rope_stretch=8.0 if longer else 1.0,
        rope_smoothing=Smoothing() if longer else None,
    )


def octopipe_table_2(size: str) -> LlamaConfig:
    """Returns the OctoPipe paper's TABLE II: `S`, `M` or `L` with 32, 64 or 128 layers."""
    times = {"S": 1, "M": 2, "L": 4}[size]
    return LlamaConfig(
        layers=32 * times,
        width=1536,
        hidden=5376,
        heads=24,
        kv_heads=8,
        head_dim=64,
        vocabulary=131_072 * times,
    )


def tiny(width: int = 128, layers: int = 6, vocabulary: int = 256) -> LlamaConfig:
    """Returns a byte-level model with LLaMA-3's ratios (3.5 times as wide inside)."""
    return LlamaConfig(
        layers=layers,
        width=width,
        hidden=7 * width // 2,
        heads=max(1, width // 32),
        kv_heads=max(1, width // 64),
        head_dim=32,
        vocabulary=vocabulary,
        rope_base=10_000.0,
    )


PRESETS = {
    **{name: (lambda name=name: llama(name)) for name in _SIZES},
    "llama-s": lambda: octopipe_table_2("S"),
    "llama-m": lambda: octopipe_table_2("M"),
    "llama-l": lambda: octopipe_table_2("L"),
    "tiny": tiny,
}
"""Configurations by name; the published ones count as published."""
