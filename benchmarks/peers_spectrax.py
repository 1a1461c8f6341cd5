"""A stage of the model of `peers.py` as SpectraX wants it: a module that its registry can find."""

from typing import Any

import jax
import spectrax as spx  # type: ignore[import-not-found]
from peers_model import apply


class Stage(spx.Module):
    """Some neighbouring layers; every array is a parameter of the module."""

    def __init__(self, blocks: list[Any]) -> None:
        super().__init__()
        self.names = tuple(tuple(block) for block in blocks)
        for n, block in enumerate(blocks):
            for name, value in block.items():
                setattr(self, f"{name}_{n}", spx.Parameter(value))

    def forward(self, x: jax.Array) -> jax.Array:
        for n, names in enumerate(self.names):
            x = apply({name: getattr(self, f"{name}_{n}").value for name in names}, x)
        return x
