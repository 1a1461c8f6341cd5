"""Trains a small Jamba (Mamba, attention, experts with a balance loss) through a pipeline.

python experiments/jamba.py
python experiments/jamba.py --ranks 2 --microbatches 4 --schedule 1f1b
python experiments/jamba.py --preset jamba-1.5-large --devices 64 --dry-run
"""

from dataclasses import replace
from typing import Any

from dry_runs import Published, chosen
from runner import Sizes, main


def build(sizes: Sizes) -> tuple[Any, Any]:
    from flax import nnx

    from octojax.models import jamba

    config = jamba.tiny(sizes.width, sizes.layers, sizes.vocabulary)
    return jamba.Jamba(config, rngs=nnx.Rngs(sizes.seed)), jamba.loss


def published(preset: str, param_dtype: str | None) -> Published:
    """Bfloat16 parameters by default: in float32 the large one needs 93 GiB a device on 64."""
    import jax.numpy as jnp
    from flax import nnx

    from octojax.models import jamba

    kept = jnp.dtype(param_dtype or "bfloat16")
    made = chosen(jamba.PRESETS, preset)()
    config = replace(made, dtype=jnp.bfloat16, param_dtype=kept)
    halves = {"m": ("mamba1", "mlp"), "B": ("mamba1", "moe"), "a": ("attention", "mlp")}
    halves["A"] = ("attention", "moe")
    kinds = ("embedding", *(k for symbol in config.pattern for k in halves[symbol]), "head+loss")
    return Published(lambda: jamba.Jamba(config, rngs=nnx.Rngs(0)), jamba.loss, kinds)


if __name__ == "__main__":
    main("jamba", build, layers=8, steps=48, published=published)
