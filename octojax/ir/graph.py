"""The layers of a traced model, as plain data: what the partitioner moves."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Layer:
    """The smallest piece the partitioner moves.

    `name` comes from module paths where they can be had; `kind` groups equal layers.
    `flops` are forward operations, `param_bytes` weights read, `output_bytes` everything
    alive at the border after it (what a cut there would send), all for one microbatch.
    """

    name: str
    kind: str
    flops: float
    param_bytes: int
    output_bytes: int


@dataclass(frozen=True)
class LayerGraph:
    """A model as a chain of layers. `layers[i]` feeds `layers[i + 1]`."""

    layers: tuple[Layer, ...]

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    def __str__(self) -> str:
        rows = [
            f"{i:4d}  {x.name:32.32s} {x.flops / 1e6:12.3f} Mflop "
            f"{x.param_bytes / 1024:10.1f} KiB params {x.output_bytes / 1024:10.1f} KiB out"
            for i, x in enumerate(self.layers)
        ]
        return "\n".join(rows)
