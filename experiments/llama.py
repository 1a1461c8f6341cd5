"""Trains a small LLaMA (rotary attention, SwiGLU) through a pipeline.

python experiments/llama.py
python experiments/llama.py --layers 12 --ranks 4 --schedule interleaved
"""

from typing import Any

from runner import Sizes, main


def build(sizes: Sizes) -> tuple[Any, Any]:
    from flax import nnx

    from octojax.models import llama

    config = llama.tiny(sizes.width, sizes.layers, sizes.vocabulary)
    return llama.Llama(config, rngs=nnx.Rngs(sizes.seed)), llama.loss


if __name__ == "__main__":
    main("llama", build, layers=6, steps=96, lr=3e-3)
