"""Gemma 2 and 3: local and global attention in turn, tied embedding, norms on both sides.

Source: Google, "Gemma 2" (2024), with soft caps on scores and logits, and "Gemma 3" (2025),
whose global layers' positions are stretched eight times; the text part of both.
"""

from octojax.models.transformer import Transformer as Gemma
from octojax.models.transformer import TransformerConfig as GemmaConfig
from octojax.models.transformer import loss as loss

__all__ = ["PRESETS", "Gemma", "GemmaConfig", "gemma", "loss", "tiny"]

_SIZES = {
    # name: layers, width, hidden, heads, kv_heads, head_dim
    "gemma-2-2b": (26, 2304, 9216, 8, 4, 256),
    "gemma-2-9b": (42, 3584, 14336, 16, 8, 256),
    "gemma-2-27b": (46, 4608, 36864, 32, 16, 128),
    "gemma-3-4b": (34, 2560, 10240, 8, 4, 256),
    "gemma-3-12b": (48, 3840, 15360, 16, 8, 256),
    "gemma-3-27b": (62, 5376, 21504, 32, 16, 128),
}


def gemma(name: str) -> GemmaConfig:
    """Returns a published Gemma by name, such as `gemma-3-4b` (text part)."""
    if name not in _SIZES:
        raise ValueError(f"unknown model {name!r}; known are {', '.join(_SIZES)}")
    layers, width, hidden, heads, kv_heads, head_dim = _SIZES[name]
    second = name.startswith("gemma-2")
    return GemmaConfig(
        layers=layers,
        width=width,
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        vocabulary=256_000 if second else 262_144,
        activation="geglu",
        tied=True,
        scale_embedding=True,
        post_norm=True,
        qk_norm=not second,
        window=4096 if second else 1024,
        period=2 if second else 6,
        global_at=(1,) if second else (5,),
        centered_norm=True,
        epsilon=1e-6,
        # Both 27B divide scores by sqrt(width / heads), all others by sqrt(head_dim).
        attention_scale=(width / heads) ** -0.5 if name.endswith("27b") else None,
        attention_cap=50.0 if second else None,
        logit_cap=30.0 if second else None,
        rope_stretch=1.0 if second else 8.0,
        rope_base=10_000.0 if second else 1_000_000.0,
        local_rope_base=10_000.0,
    )


def tiny(width: int = 128, layers: int = 6, vocabulary: int = 256) -> GemmaConfig:
    """Returns a byte-level model in Gemma 3's proportions: five local layers, then a global one."""
    return GemmaConfig(
        layers=layers,
        width=width,
        hidden=4 * width,
        heads=max(1, width // 32),
        kv_heads=max(1, width // 64),
        head_dim=32,
        vocabulary=vocabulary,
        activation="geglu",
        tied=True,
        scale_embedding=True,
        post_norm=True,
        qk_norm=True,
        centered_norm=True,
        epsilon=1e-6,
        window=32,
        period=6,
        global_at=(5,),
        rope_base=1_000_000.0,
        local_rope_base=10_000.0,
    )


PRESETS = {**{name: (lambda name=name: gemma(name)) for name in _SIZES}, "tiny": tiny}
"""Configurations by name; the published ones count as published."""
