"""Real models in Flax NNX: Nemotron-H, Jamba, LLaMA, Gemma, DeepSeek and Qwen3-Next.

Each module has a frozen config, presets by name in `PRESETS` (the published sizes, the
OctoPipe paper's TABLE II, and `tiny`), a model class `Model(config, rngs=...)` and
`loss(model, batch)` for batches `{"tokens": (B, T + 1) int32}`. They know nothing of
pipelines: between two layers one residual stream lives, and that is all the compiler needs.
"""

from octojax.models import deepseek, gemma, jamba, llama, nemotron_h, qwen3_next
from octojax.models.language import count_parameters

__all__ = ["count_parameters", "deepseek", "gemma", "jamba", "llama", "nemotron_h", "qwen3_next"]
