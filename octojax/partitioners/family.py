"""What a named partitioner is."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from octojax.partitioners.cut import Division


@dataclass(frozen=True)
class Partitioner:
    """A published partitioner. `divide(chain, stages, microbatches, **options)` cuts the chain.

    `options` are its options with their defaults.
    """

    name: str
    summary: str
    source: str
    divide: Callable[..., Division]
    options: tuple[tuple[str, Any], ...] = ()
