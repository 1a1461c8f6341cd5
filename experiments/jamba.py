"""Trains a small Jamba (Mamba, attention, experts with a balance loss) through a pipeline.

python experiments/jamba.py
python experiments/jamba.py --ranks 2 --microbatches 4 --schedule 1f1b
"""

from typing import Any

from runner import Sizes, main


def build(sizes: Sizes) -> tuple[Any, Any]:
    from flax import nnx

    from octojax.models import jamba

    config = jamba.tiny(sizes.width, sizes.layers, sizes.vocabulary)
    return jamba.Jamba(config, rngs=nnx.Rngs(sizes.seed)), jamba.loss


if __name__ == "__main__":
    main("jamba", build, layers=8)
