"""Where the values of a model's leaves come from: arrays at hand, files, or what makes them.

A rank asks for the parts that it keeps, so that no process needs to hold a whole model:

    GivenLeaves     arrays that the caller has
    ReadLeaves      slices, read by path from files of any kind
    Construction    programs that make one leaf each (octojax.api.initialization)
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Sharding

from octojax.api.state_layout import fresh
from octojax.api.structure import listed
from octojax.compat import is_key
from octojax.programs.recipe import raw, stored
from octojax.trace import Leaves


@dataclass(frozen=True)
class Part:
    """What one rank keeps of a leaf: all of it, or the index `row` of axis 0. `where` is of the
    value as it is kept (PRNG keys as integers)."""

    leaf: int
    row: int | None
    where: Sharding


class LeafSource(Protocol):
    """Gives values of leaves, each where it is kept, in buffers of its own."""

    def place(self, parts: Sequence[Part]) -> list[jax.Array]: ...


class Sliceable(Protocol):
    """An array that need not be in memory: `np.memmap`, `h5py.Dataset`, `zarr.Array`, ..."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def dtype(self) -> Any: ...

    def __getitem__(self, index: Any) -> Any: ...


Reader = Callable[[str], Sliceable]
"""From the path of a leaf, such as `layers.3.mlp.kernel`, to its array; `KeyError` without one."""


@dataclass(frozen=True)
class GivenLeaves:
    """The leaves of trees that the caller holds."""

    leaves: Sequence[Any]

    def place(self, parts: Sequence[Part]) -> list[jax.Array]:
        return [fresh(raw(jnp.asarray(self._value(part))), part.where) for part in parts]

    def _value(self, part: Part) -> Any:
        leaf = self.leaves[part.leaf]
        return leaf if part.row is None else leaf[part.row]


@dataclass(frozen=True)
class ReadLeaves:
    """Leaves that are read by path, and of each no more than its ranks keep.

    PRNG keys are read as the integers that they consist of.
    """

    read: Reader
    expected: Leaves
    what: str = "the parameters"

    def check(self) -> None:
        """Raises `ValueError` listing every leaf that is not there, or has another shape or type.

        Nothing but shapes and types is read.
        """
        missing, wrong = [], []
        for name, aval in zip(self.expected.names, self.expected.avals, strict=True):
            form = stored(aval)
            form_dtype = form.dtype if is_key(aval) else np.dtype(aval.dtype)
            try:
                leaf = self.read(name)
                shape, dtype = tuple(leaf.shape), np.dtype(leaf.dtype)
            except KeyError:
                missing.append(name or "the leaf")
                continue
            except (AttributeError, TypeError) as error:
                wrong.append(f"{name} cannot be read in slices ({error})")
                continue
            if (shape, dtype) != (form.shape, form_dtype):
                wrong.append(
                    f"{name} is {dtype}{list(shape)}, compiled for {form_dtype}{list(form.shape)}"
                )
        if missing or wrong:
            parts = (
                listed(f"{len(missing)} missing", missing),
                listed(f"{len(wrong)} of another shape or type", wrong),
            )
            raise ValueError(
                f"{self.what} that the reader has do not fit the model that was compiled "
                f"({len(self.expected)} leaves): {'; '.join(filter(None, parts))}. A reader is a "
                f"function from the path of a leaf to its array, and raises KeyError for another"
            )

    def place(self, parts: Sequence[Part]) -> list[jax.Array]:
        names, avals = self.expected.names, self.expected.avals
        return [slices_of(self.read(names[p.leaf]), avals[p.leaf], p) for p in parts]


@dataclass(frozen=True)
class StoredLeaves:
    """Leaves that are at hand in slices, such as those of a checkpoint."""

    leaves: Sequence[Sliceable]
    avals: Sequence[Any]

    def place(self, parts: Sequence[Part]) -> list[jax.Array]:
        return [slices_of(self.leaves[p.leaf], self.avals[p.leaf], p) for p in parts]


def slices_of(source: Sliceable, aval: Any, part: Part) -> jax.Array:
    """Returns a part of a leaf, of which every device's slice is read by itself."""
    form = stored(aval)
    shape = form.shape if part.row is None else form.shape[1:]
    slices: dict[str, np.ndarray] = {}  # devices that hold the same read it once

    def read(index: Any) -> np.ndarray:
        key = str(index)
        if key not in slices:
            at = index if part.row is None else (part.row, *index)
            slices[key] = np.array(source[at], form.dtype)
        return slices[key]

    return jax.make_array_from_callback(shape, part.where, read)


@dataclass(frozen=True)
class JoinedLeaves:
    """The leaves of several sources, one after the other: so many of each."""

    sources: Sequence[tuple[LeafSource, int]]

    def place(self, parts: Sequence[Part]) -> list[jax.Array]:
        placed: dict[int, jax.Array] = {}
        first = 0
        for source, count in self.sources:
            mine = [k for k, part in enumerate(parts) if first <= part.leaf < first + count]
            requests = [Part(parts[k].leaf - first, parts[k].row, parts[k].where) for k in mine]
            placed.update(zip(mine, source.place(requests), strict=True))
            first += count
        return [placed[k] for k in range(len(parts))]


@dataclass(frozen=True)
class Tail:
    """The leaves of `source` from number `first` on."""

    source: LeafSource
    first: int

    def place(self, parts: Sequence[Part]) -> list[jax.Array]:
        return self.source.place([Part(p.leaf + self.first, p.row, p.where) for p in parts])
