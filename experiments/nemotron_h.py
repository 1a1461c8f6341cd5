"""Trains a small Nemotron-H (Mamba-2, attention, squared-ReLU layers) through a pipeline.

python experiments/nemotron_h.py
python experiments/nemotron_h.py --ranks 2 --schedule zb-h1 --data my_texts/ --steps 200
"""

from typing import Any

from runner import Sizes, main


def build(sizes: Sizes) -> tuple[Any, Any]:
    from flax import nnx

    from octojax.models import nemotron_h

    config = nemotron_h.tiny(sizes.width, sizes.layers, sizes.vocabulary)
    return nemotron_h.NemotronH(config, rngs=nnx.Rngs(sizes.seed)), nemotron_h.loss


if __name__ == "__main__":
    main("nemotron_h", build, layers=14)
