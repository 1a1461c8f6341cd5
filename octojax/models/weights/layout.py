"""How a leaf of ours is made of published tensors, slice by slice, and taken apart again.

Tensor(name)            the tensor as it is
Transposed(source)      its last two axes exchanged (PyTorch keeps (outputs, inputs))
Taps(name)              a depthwise convolution: (E, 1, K) as (K, E)
Joined(sources, sizes)  several along the last axis
Stacked(sources)        several along a new first axis
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

Index = tuple[slice, ...]
"""One slice with a start and a stop per axis, without a step."""


class File(Protocol):
    """A tensor in a file, of which parts are read."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def dtype(self) -> np.dtype: ...

    def __getitem__(self, index: Index) -> np.ndarray: ...


Files = Callable[[str], File]


class Source(Protocol):
    """Where a leaf comes from."""

    def names(self) -> Iterator[str]:
        """Yields the names of the tensors."""
        ...

    def shape(self, files: Files) -> tuple[int, ...]:
        """Returns the leaf's shape; `ValueError` where the parts do not fit together."""
        ...

    def read(self, files: Files, index: Index) -> np.ndarray:
        """Returns a slice of the leaf, and reads no more than that slice."""
        ...

    def write(self, leaf: np.ndarray) -> Iterator[tuple[str, np.ndarray]]:
        """Yields the tensors that the leaf is made of, by name."""
        ...


@dataclass(frozen=True)
class Tensor:
    """The tensor `name` as it is."""

    name: str

    def names(self) -> Iterator[str]:
        yield self.name

    def shape(self, files: Files) -> tuple[int, ...]:
        return tuple(files(self.name).shape)

    def read(self, files: Files, index: Index) -> np.ndarray:
        return files(self.name)[index]

    def write(self, leaf: np.ndarray) -> Iterator[tuple[str, np.ndarray]]:
        yield self.name, leaf


@dataclass(frozen=True)
class Transposed:
    """The last two axes of `source` exchanged."""

    source: Source

    def names(self) -> Iterator[str]:
        return self.source.names()

    def shape(self, files: Files) -> tuple[int, ...]:
        *rest, rows, columns = self.source.shape(files)
        return (*rest, columns, rows)

    def read(self, files: Files, index: Index) -> np.ndarray:
        *rest, rows, columns = index
        return np.swapaxes(self.source.read(files, (*rest, columns, rows)), -1, -2)

    def write(self, leaf: np.ndarray) -> Iterator[tuple[str, np.ndarray]]:
        return self.source.write(np.swapaxes(leaf, -1, -2))


@dataclass(frozen=True)
class Taps:
    """A depthwise convolution (E, 1, K), as (K, E)."""

    name: str

    def names(self) -> Iterator[str]:
        yield self.name

    def shape(self, files: Files) -> tuple[int, ...]:
        channels, _, taps = files(self.name).shape
        return taps, channels

    def read(self, files: Files, index: Index) -> np.ndarray:
        return files(self.name)[index[1], slice(0, 1), index[0]][:, 0].T

    def write(self, leaf: np.ndarray) -> Iterator[tuple[str, np.ndarray]]:
        yield self.name, leaf.T[:, None]


@dataclass(frozen=True)
class Joined:
    """Sources one after the other along the last axis, `sizes` wide."""

    sources: tuple[Source, ...]
    sizes: tuple[int, ...]

    def names(self) -> Iterator[str]:
        for source in self.sources:
            yield from source.names()

    def shape(self, files: Files) -> tuple[int, ...]:
        shapes = [source.shape(files) for source in self.sources]
        first = shapes[0]
        for source, shape, size in zip(self.sources, shapes, self.sizes, strict=True):
            if shape != (*first[:-1], size):
                raise ValueError(
                    f"{', '.join(source.names())} is {list(shape)}, where the configuration has "
                    f"{[*first[:-1], size]}"
                )
        return (*first[:-1], sum(self.sizes))

    def read(self, files: Files, index: Index) -> np.ndarray:
        *rest, last = index
        pieces, start = [], 0
        for source, size in zip(self.sources, self.sizes, strict=True):
            low, high = max(last.start, start), min(last.stop, start + size)
            if low < high:
                pieces.append(source.read(files, (*rest, slice(low - start, high - start))))
            start += size
        return pieces[0] if len(pieces) == 1 else np.concatenate(pieces, axis=-1)

    def write(self, leaf: np.ndarray) -> Iterator[tuple[str, np.ndarray]]:
        start = 0
        for source, size in zip(self.sources, self.sizes, strict=True):
            yield from source.write(leaf[..., start : start + size])
            start += size


@dataclass(frozen=True)
class Stacked:
    """Sources of one shape along a new first axis: experts."""

    sources: tuple[Source, ...]

    def names(self) -> Iterator[str]:
        for source in self.sources:
            yield from source.names()

    def shape(self, files: Files) -> tuple[int, ...]:
        shapes = {source.shape(files) for source in self.sources}
        if len(shapes) > 1:
            first, *_, last = (next(source.names()) for source in self.sources)
            raise ValueError(f"tensors {first} ... {last} have the shapes {sorted(shapes)}")
        return (len(self.sources), *shapes.pop())

    def read(self, files: Files, index: Index) -> np.ndarray:
        first, *rest = index
        return np.stack([s.read(files, tuple(rest)) for s in self.sources[first]])

    def write(self, leaf: np.ndarray) -> Iterator[tuple[str, np.ndarray]]:
        for source, part in zip(self.sources, leaf, strict=True):
            yield from source.write(part)


@dataclass(frozen=True)
class Leaf:
    """A leaf that is read when it is indexed, cast to `dtype`."""

    source: Source
    files: Files
    dtype: np.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        return self.source.shape(self.files)

    def __getitem__(self, index: Any) -> np.ndarray:
        entries = index if isinstance(index, tuple) else (index,)
        shape = self.shape
        if Ellipsis in entries:
            at = entries.index(Ellipsis)
            gap = (slice(None),) * (len(shape) - len(entries) + 1)
            entries = (*entries[:at], *gap, *entries[at + 1 :])
        entries = (*entries, *(slice(None),) * (len(shape) - len(entries)))
        slices, rows = [], []
        for axis, (part, size) in enumerate(zip(entries, shape, strict=True)):
            if isinstance(part, slice):
                start, stop, step = part.indices(size)
                if step != 1:
                    raise ValueError(f"axis {axis} is asked for with step {step}; use 1")
                slices.append(slice(start, stop))
            else:
                row = range(size)[part]
                slices.append(slice(row, row + 1))
                rows.append(axis)
        return np.squeeze(self.source.read(self.files, tuple(slices)), tuple(rows)).astype(
            self.dtype, copy=False
        )
