"""A mid-size hybrid (Mamba-2, attention, squared-ReLU layers) for `octopipe run` and `profile`.

octopipe run hybrid:mid -n 2 --pin --record        in this folder
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from octojax.models import nemotron_h


def mid(
    width: int = 128, layers: int = 14, rows: int = 4, length: int = 64, vocabulary: int = 256
) -> tuple[Any, ...]:
    """Returns model, loss and one microbatch of random bytes."""
    config = nemotron_h.tiny(width, layers, vocabulary)
    model = nemotron_h.NemotronH(config, rngs=nnx.Rngs(0))
    tokens = jax.random.randint(jax.random.key(1), (rows, length + 1), 0, 256, jnp.int32)
    return model, nemotron_h.loss, {"tokens": tokens}


def small() -> tuple[Any, ...]:
    """Returns the same with two layers of each kind, for a quick look."""
    return mid(64, 6, 2, 32)
