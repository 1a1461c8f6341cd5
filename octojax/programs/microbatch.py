"""How a batch becomes microbatches: rows are split, scalars shared, PRNG keys folded.

tokens int32[8, 64]   8 rows into 3 microbatches: rows 0-2, 3-5, 6-7
scale  float32[]      the same in every microbatch, as is any leaf that is said to be shared
key    key<fry>[]     jax.random.fold_in(key, microbatch)
keys   key<fry>[8]    rows, as tokens
"""

import enum
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from typing import Any

import jax
import numpy as np

from octojax.programs.recipe import Layout, is_key, raw


class Kind(enum.Enum):
    ROWS = "rows"
    SHARED = "shared"
    KEY = "key"


@dataclass(frozen=True)
class Microbatches:
    """`sizes[m]` rows of every leaf with rows go to microbatch m; `names` are for errors.

    With `shards` > 1 each microbatch is spread over that many devices, row blocks in order,
    and a key is folded with the shard too. `shared` are the leaves that have no rows although
    they are arrays.
    """

    sizes: tuple[int, ...]
    avals: tuple[jax.ShapeDtypeStruct, ...]
    names: tuple[str, ...]
    shards: int = 1
    shared: frozenset[int] = frozenset()

    @property
    def count(self) -> int:
        return len(self.sizes)

    @property
    def num_rows(self) -> int:
        return sum(self.sizes)

    @cached_property
    def bounds(self) -> tuple[int, ...]:
        return (0, *accumulate(self.sizes))

    @cached_property
    def kinds(self) -> tuple[Kind, ...]:
        return tuple(
            Kind.SHARED if k in self.shared else _kind(aval) for k, aval in enumerate(self.avals)
        )

    @cached_property
    def shares(self) -> tuple[float, ...]:
        """Each microbatch's share of all rows: what a mean over its rows counts."""
        return tuple(size / self.num_rows for size in self.sizes)

    @cached_property
    def layouts(self) -> tuple[Layout, ...]:
        table = {Kind.ROWS: Layout.ROWS, Kind.SHARED: Layout.WHOLE, Kind.KEY: Layout.STACKED}
        return tuple(table[kind] for kind in self.kinds)

    def shapes(self, microbatch: int) -> tuple[jax.ShapeDtypeStruct, ...]:
        """Returns the leaves of one microbatch as one data shard sees them."""
        rows = self.sizes[microbatch] // self.shards
        return tuple(
            jax.ShapeDtypeStruct((rows, *a.shape[1:]), a.dtype)
            if kind is Kind.ROWS
            else jax.ShapeDtypeStruct(a.shape, a.dtype)
            for a, kind in zip(self.avals, self.kinds, strict=True)
        )

    def extended(self, more: Sequence[tuple[str, Any, bool]]) -> "Microbatches":
        """Returns the same cut of a batch with further leaves: name, aval, whether it has rows."""
        first = len(self.avals)
        shared = {first + k for k, (_, _, rows) in enumerate(more) if not rows}
        return replace(
            self,
            avals=(*self.avals, *(aval for _, aval, _ in more)),
            names=(*self.names, *(name for name, _, _ in more)),
            shared=self.shared | shared,
        )

    def check(self, leaves: Sequence[Any]) -> None:
        """Raises `ValueError` unless the leaves have the shapes and dtypes compiled for."""
        wrong = [
            f"{name} is {_text(leaf)}, compiled for {aval.dtype}{list(aval.shape)}"
            for name, leaf, aval in zip(self.names, leaves, self.avals, strict=True)
            if jax.numpy.shape(leaf) != aval.shape or _dtype(leaf) != aval.dtype
        ]
        if wrong:
            raise ValueError(
                f"this batch differs from the one that the step was compiled for: "
                f"{'; '.join(wrong)}. Compile another step for it, or pad the batch"
            )

    def piece(self, leaf: int, value: Any, microbatch: int, shard: int | None = None) -> Any:
        """Returns what microbatch `microbatch` (of data shard `shard`) sees of a leaf."""
        match self.kinds[leaf]:
            case Kind.SHARED:
                return value
            case Kind.KEY:
                folded = jax.random.fold_in(value, microbatch)
                return folded if shard is None else jax.random.fold_in(folded, shard)
            case Kind.ROWS:
                start, stop = self.bounds[microbatch], self.bounds[microbatch + 1]
                if shard is not None:
                    size = (stop - start) // self.shards
                    start, stop = start + shard * size, start + (shard + 1) * size
                return value[start:stop]

    def split(
        self,
        leaves: dict[int, Any],
        pieces: Sequence[tuple[int, int]],
        first: Any,
        start: Any,
        size: int,
    ) -> tuple[Any, ...]:
        """Returns pieces `(leaf, k)` of microbatch `first + k` as programs store them: keys as
        integers. No leaf is shared.

        The microbatches have `size` rows each, the first begins at row `start`; it and `first`
        may be traced, so that one program serves many groups.
        """

        def piece(leaf: int, k: int) -> Any:
            if self.kinds[leaf] is Kind.ROWS:
                return jax.lax.dynamic_slice_in_dim(leaves[leaf], start + k * size, size)
            key = jax.random.fold_in(leaves[leaf], first + k)
            if self.shards == 1:
                return key
            return jax.vmap(lambda shard: jax.random.fold_in(key, shard))(np.arange(self.shards))

        return tuple(raw(piece(leaf, k)) for leaf, k in pieces)


def plan_microbatches(
    leaves: Sequence[Any],
    names: Sequence[str],
    count: int,
    shards: int = 1,
    *,
    shared: Collection[int] = (),
) -> Microbatches:
    """Returns how `count` microbatches are cut from a batch with these leaves.

    Rows that do not divide are dealt out as evenly as can be, larger microbatches first.
    Raises `ValueError` if the leading axes differ, there are too few rows, or a leaf may be a raw
    PRNG key; `TypeError` for a leaf that is no array.
    """
    avals = tuple(_aval(x, name) for x, name in zip(leaves, names, strict=True))
    rows = {
        name: a.shape[0]
        for k, (name, a) in enumerate(zip(names, avals, strict=True))
        if a.shape and k not in shared
    }
    if len(set(rows.values())) > 1:
        lengths = Counter(rows.values()).most_common()
        listed = "; ".join(
            f"{n} in {_few([name for name, length in rows.items() if length == n])}"
            for n, _ in lengths
        )
        raise ValueError(
            f"the leaves of the batch have different leading axes: {listed}. Every leaf but "
            f"scalars is split along axis 0 into microbatches, so all need the same length "
            f"there; name leaves without rows in shared=, and pass PRNG keys as typed "
            f"keys (jax.random.key)"
        )
    for k, (name, aval) in enumerate(zip(names, avals, strict=True)):
        if k not in shared and aval.shape == (2,) and aval.dtype == np.uint32:
            raise ValueError(
                f"{name} is uint32[2]: a raw PRNG key, or two rows of integers? Pass a key as a "
                f"typed one (jax.random.key, or jax.random.wrap_key_data of this), rows as int32"
            )
    total = next(iter(rows.values()), count * shards)
    if count < 1:
        raise ValueError(f"microbatches = {count}, expected a number >= 1")
    units, rest = divmod(total, shards)
    if rest or units < count:
        spread = f" spread over {shards} devices of the data axis" if shards > 1 else ""
        remedy = (
            f"The nearest possible number of microbatches is {units}"
            if units and not rest
            else f"Give a batch of {max(1, round(total / shards)) * shards} rows"
        )
        raise ValueError(
            f"a batch of {total} rows cannot form {count} microbatches{spread}. {remedy}"
        )
    each, more = divmod(units, count)
    sizes = tuple((each + (m < more)) * shards for m in range(count))
    return Microbatches(sizes, avals, tuple(names), shards, frozenset(shared))


def _few(names: Sequence[str]) -> str:
    if len(names) <= 8:
        return ", ".join(names)
    return f"{', '.join(names[:4])}, ... ({len(names)} leaves)"


def _kind(aval: Any) -> Kind:
    if aval.shape:
        return Kind.ROWS
    return Kind.KEY if is_key(aval) else Kind.SHARED


def _aval(leaf: Any, name: str) -> jax.ShapeDtypeStruct:
    try:
        if isinstance(leaf, str):  # JAX would take it for the name of a dtype
            raise TypeError
        return jax.ShapeDtypeStruct(jax.numpy.shape(leaf), _dtype(leaf))
    except TypeError:
        raise TypeError(
            f"{name} is of type {type(leaf).__name__}, expected an array of numbers; close over "
            f"what is not part of the batch"
        ) from None


def _dtype(leaf: Any) -> Any:
    dtype = getattr(leaf, "dtype", None)
    if dtype is not None and jax.numpy.issubdtype(dtype, jax.dtypes.extended):
        return dtype
    return jax.dtypes.canonicalize_dtype(jax.numpy.result_type(leaf))


def _text(leaf: Any) -> str:
    return f"{_dtype(leaf)}{list(jax.numpy.shape(leaf))}"
