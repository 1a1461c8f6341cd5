"""Every named schedule, found by listing this folder: a file with a `FAMILIES` tuple joins in."""

import importlib
import pkgutil
from collections.abc import Mapping
from functools import cache
from types import MappingProxyType
from typing import Any

import octojax.schedules
from octojax.ir.schedule import Schedule
from octojax.schedules.family import Family, suggestion
from octojax.schedules.options import ranks_of_stages
from octojax.schedules.placed import on_placement

ORDER = (
    "gpipe",
    "1f1b",
    "1f1b-overlap",
    "interleaved",
    "looped-bfs",
    "zb-h1",
    "zb-h2",
    "zb-auto",
    "zb-v",
    "v-half",
    "v-min",
    "1f1b-v",
    "dualpipe",
    "dualpipe-v",
    "hanayo",
    "chimera",
    "tessel",
    "dynapipe",
)
"""How lists show the known ones, oldest idea first; a new name comes after them."""


@cache
def families() -> Mapping[str, Family]:
    """Returns every schedule by name, in `ORDER`."""
    by_name: dict[str, Family] = {}
    for module in pkgutil.iter_modules(octojax.schedules.__path__):
        loaded = importlib.import_module(f"octojax.schedules.{module.name}")
        by_name |= {family.name: family for family in getattr(loaded, "FAMILIES", ())}
    rank = {name: i for i, name in enumerate(ORDER)}
    names = sorted(by_name, key=lambda name: (rank.get(name, len(rank)), name))
    return MappingProxyType({name: by_name[name] for name in names})


def family(name: str) -> Family:
    """Returns the schedule of that name. Raises `ValueError` suggesting the nearest name."""
    known = families()
    aliases = {alias: f for f in known.values() for alias in f.aliases}
    if entry := known.get(name) or aliases.get(name):
        return entry
    raise ValueError(
        f"unknown schedule {name!r}{suggestion(name.lower(), known)}. Known: {', '.join(known)}"
    )


def generate(
    name: str, ranks: int, microbatches: int, chunks: int | None = None, **options: Any
) -> Schedule:
    """Returns the table of the named schedule for p ranks, m microbatches, v chunks per rank.

    `chunks` defaults to the family's own; `options` are those of `family(name).options`, as
    Python values or as text. `placement` (a `Placement`, ranks of stages, or text `0 1 1 0`) is
    an option of every schedule: on one that is not its own, see `octojax.schedules.placed`.
    Raises `ValueError` on an unknown name or option (suggesting the nearest), and on sizes that
    the schedule's rule forbids (naming the nearest valid ones).
    """
    entry = family(name)
    if options.get("placement") is None or "placement" in entry.defaults:
        return entry.generate(ranks, microbatches, chunks, **options)
    placement = ranks_of_stages(options.pop("placement"))
    return on_placement(entry, placement, ranks, microbatches, chunks, **options)
