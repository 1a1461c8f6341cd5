"""Every published pipeline schedule as data. `generate("1f1b", 4, 8)` is its table.

One file per schedule or per pair of close relatives; each lists its records in `FAMILIES`, and
the registry finds the files. Nothing here imports JAX, numba or SciPy when it is loaded.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from octojax.schedules.family import Family, Option

if TYPE_CHECKING:
    from octojax.ir.schedule import Schedule

__all__ = ["SCHEDULES", "Family", "Option", "family", "generate"]

SCHEDULES: Mapping[str, Family]
"""Name -> record of every schedule; filled on first use."""


def generate(
    name: str, ranks: int, microbatches: int, chunks: int | None = None, **options: Any
) -> "Schedule":
    """Returns the table of the named schedule; see `octojax.schedules.registry.generate`."""
    from octojax.schedules import registry

    return registry.generate(name, ranks, microbatches, chunks, **options)


def family(name: str) -> Family:
    """Returns the record of the named schedule. Raises `ValueError` suggesting the nearest."""
    from octojax.schedules import registry

    return registry.family(name)


def __getattr__(name: str) -> Any:
    if name == "SCHEDULES":
        from octojax.schedules import registry

        return registry.families()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
