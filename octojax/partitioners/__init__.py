"""Published partitioners: which consecutive layers form a stage.

`partition("alpa", profile, stages=4, microbatches=8)` is the partition alone, `divide` also
says its objective, what is recomputed and on which ranks. Nothing here imports JAX; SciPy is
loaded by `ilp` alone, when it is called.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from octojax.partitioners.chain import Chain
from octojax.partitioners.cut import Division
from octojax.partitioners.family import Partitioner

if TYPE_CHECKING:
    from octojax.ir.partition import Partition

__all__ = ["PARTITIONERS", "Chain", "Division", "Partitioner", "divide", "partition"]

PARTITIONERS: Mapping[str, Partitioner]
"""Name -> record of every partitioner; filled on first use."""


def divide(name: str, costs: Any, stages: int, microbatches: int = 1, **options: Any) -> Division:
    """Returns a partition and what it costs; see `octojax.partitioners.registry.divide`."""
    from octojax.partitioners import registry

    return registry.divide(name, costs, stages, microbatches, **options)


def partition(
    name: str, costs: Any, stages: int, microbatches: int = 1, **options: Any
) -> "Partition":
    """Returns only the partition that `divide` finds."""
    return divide(name, costs, stages, microbatches, **options).partition


def __getattr__(name: str) -> Any:
    if name == "PARTITIONERS":
        from octojax.partitioners import registry

        return registry.partitioners()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
