"""Every named partitioner, found by listing this folder: a file with `FAMILIES` joins in."""

import difflib
import importlib
import pkgutil
from collections.abc import Mapping, Sequence
from functools import cache
from types import MappingProxyType
from typing import Any

import octojax.partitioners
from octojax.ir.partition import Partition
from octojax.ir.profile import Profile
from octojax.partitioners.chain import Chain
from octojax.partitioners.cut import Division, check_counts
from octojax.partitioners.family import Partitioner

ORDER = ("uniform", "balanced", "pipedream", "dapple", "alpa", "adapipe", "metis", "mist", "ilp")


@cache
def partitioners() -> Mapping[str, Partitioner]:
    """Returns every partitioner by name."""
    by_name: dict[str, Partitioner] = {}
    for module in pkgutil.iter_modules(octojax.partitioners.__path__):
        loaded = importlib.import_module(f"octojax.partitioners.{module.name}")
        by_name |= {family.name: family for family in getattr(loaded, "FAMILIES", ())}
    rank = {name: i for i, name in enumerate(ORDER)}
    names = sorted(by_name, key=lambda name: (rank.get(name, len(rank)), name))
    return MappingProxyType({name: by_name[name] for name in names})


def divide(
    name: str,
    costs: Profile | Sequence[float] | Chain,
    stages: int,
    microbatches: int = 1,
    **options: Any,
) -> Division:
    """Returns the named partitioner's partition with its objective, recompute and rank order.

    `costs` is a profile, or seconds per layer for forward and backward together. Raises
    `ValueError` for unknown names (suggesting the nearest), `PlanError` for more stages than
    layers, `CapacityError` where nothing fits.
    """
    known = partitioners()
    if name not in known:
        raise ValueError(
            f"unknown partitioner {name!r}{_suggest(name, known)}. Known: {', '.join(known)}"
        )
    partitioner = known[name]
    values = dict(partitioner.options)
    unknown = [option for option in options if option not in values]
    if unknown:
        raise ValueError(
            f"{name} has no option {unknown[0]!r}{_suggest(unknown[0], values)}. "
            f"Its options: {', '.join(values) or 'none'}"
        )
    chain = Chain.of(costs)
    check_counts(chain.num_layers, stages, microbatches)
    return partitioner.divide(chain, stages, microbatches, **(values | options))


def partition(
    name: str,
    costs: Profile | Sequence[float] | Chain,
    stages: int,
    microbatches: int = 1,
    **options: Any,
) -> Partition:
    """Returns only the partition that `divide` finds."""
    return divide(name, costs, stages, microbatches, **options).partition


def _suggest(name: str, known: Any) -> str:
    near = difflib.get_close_matches(name.lower(), list(known), n=1, cutoff=0.4)
    return f"; did you mean {near[0]!r}" if near else ""
