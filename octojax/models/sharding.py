"""How the models here lie over a tensor and an expert axis: partition specs by path.

    column   W (inputs, outputs / T)    qkv, up, into: what they make is spread over heads or F
    row      W (inputs / T, outputs)    out, down: partial sums, one all-reduce
    experts  W (experts / E, ...)       an expert is on one device of the expert axis
    table    W (vocabulary / T, width)  embedding and head

Source: Shoeybi et al., "Megatron-LM" (2019), section 3; Lepikhin et al., "GShard" (2020).

Columns of several parts (q, k and v; gate and up; z, x, B, C and dt) are cut where the axis cuts
them, whatever they mean: what is computed is the same, and XLA moves what is on the wrong side.
"""

import re
from collections.abc import Callable

from jax.sharding import PartitionSpec

_COLUMN, _ROW, _CHANNELS = ("", "T"), ("T", ""), ("T",)
_RULES: tuple[tuple[str, tuple[str, ...]], ...] = (
    (r"up_EDF$", ("E", "", "T")),
    (r"down_EFD$", ("E", "T", "")),
    (r"(qkv|up|into|dt)\.weight$", _COLUMN),
    (r"(out|down|select)\.weight$", _ROW),
    (r"embedding\.table$", _ROW),
    (r"project\.weight$", _COLUMN),
    (r"conv_weight$", _COLUMN),
    (r"(conv_bias|dt_bias|skip|mixer\.scale)$", _CHANNELS),
    (r"a_log$", _CHANNELS),
)
"""By the end of a path, the axis of each dimension: T tensor, E expert."""


def partition_specs(
    *,
    tensor: str | None = "tensor",
    expert: str | None = None,
    sizes: dict[str, int] | None = None,
) -> Callable[[str, tuple[int, ...]], PartitionSpec | None]:
    """Returns a function of path and shape for `octopipe.compile(..., param_specs=)`.

    It spreads projections, tables and experts over the mesh axes of these names, and leaves norms
    and routers whole. `sizes` are the lengths of the axes: a dimension that its axis does not
    divide stays whole then, instead of being refused.
    """
    names = {"T": tensor, "E": expert, "": None}
    lengths = sizes or {}

    def spec(path: str, shape: tuple[int, ...]) -> PartitionSpec | None:
        for pattern, axes in _RULES:
            if re.search(pattern, path.removesuffix(".value")) and len(axes) <= len(shape):
                entries = [names[axis] for axis in axes]
                fits = (
                    x if x is None or size % lengths.get(x, 1) == 0 else None
                    for x, size in zip(entries, shape, strict=False)
                )
                return PartitionSpec(*fits)
        return None

    return spec
