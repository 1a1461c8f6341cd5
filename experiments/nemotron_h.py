"""Trains a small Nemotron-H (Mamba-2, attention, squared-ReLU layers) through a pipeline.

python experiments/nemotron_h.py
python experiments/nemotron_h.py --ranks 2 --schedule zb-h1 --data my_texts/ --steps 200
python experiments/nemotron_h.py --preset nemotron-h-56b --devices 64 --dry-run
"""

from dataclasses import replace
from typing import Any

from dry_runs import Published, chosen
from runner import Sizes, main


def build(sizes: Sizes) -> tuple[Any, Any]:
    from flax import nnx

    from octojax.models import nemotron_h

    config = nemotron_h.tiny(sizes.width, sizes.layers, sizes.vocabulary)
    return nemotron_h.NemotronH(config, rngs=nnx.Rngs(sizes.seed)), nemotron_h.loss


def published(preset: str, param_dtype: str | None) -> Published:
    import jax.numpy as jnp
    from flax import nnx

    from octojax.models import nemotron_h

    kept = jnp.dtype(param_dtype or "float32")
    made = chosen(nemotron_h.PRESETS, preset)()
    config = replace(made, dtype=jnp.bfloat16, param_dtype=kept)
    names = {"M": "mamba2", "*": "attention", "-": "mlp", "E": "moe"}
    kinds = ("embedding", *(names[symbol] for symbol in config.pattern), "head+loss")
    return Published(lambda: nemotron_h.NemotronH(config, rngs=nnx.Rngs(0)), nemotron_h.loss, kinds)


if __name__ == "__main__":
    main("nemotron_h", build, layers=10, published=published)
