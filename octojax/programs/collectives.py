"""The collectives that XLA has put into compiled programs, and over which mesh axes they go.

    %all-reduce.3 = f32[8,512]{1,0} all-reduce(%dot.1), channel_id=1, replica_groups={{0,1},{2,3}}

On a rank's mesh ("data": 2, "tensor": 2) these groups lie along "tensor".
"""

import math
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jax.sharding import Mesh

KINDS = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")

_OPERATION = re.compile(rf"= (.*?) ({'|'.join(KINDS)})(?:-start)?\((.*)")
_LISTED = re.compile(r"(?:replica_groups|source_target_pairs)=\{(\{[\d, ]*\}(?:, ?\{[\d, ]*\})*)\}")
_IOTA = re.compile(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")
_MESH = re.compile(r"replica_groups=mesh\[([^\]]*)\][^{]*\{([^}]*)\}")
_PART = re.compile(r"'([^']*)'(?::\((\d+)\)(\d+))?")
_ARRAY = re.compile(r"\b([a-z]\w*)\[([\d,]*)\]")


@dataclass(frozen=True, order=True)
class Collective:
    """`count` operations of one kind in one program, over the same axes; `nbytes` of results on a
    device. One in the body of a loop counts once."""

    kind: str
    axes: tuple[str, ...]
    count: int
    nbytes: int

    def __str__(self) -> str:
        return f"{self.count} {self.kind} over {'+'.join(self.axes) or 'nothing'}"


def collectives_of(program: Any, mesh: Mesh) -> tuple[Collective, ...]:
    """Returns the collectives of a program that was compiled for the devices of `mesh`."""
    return read_collectives(program.as_text().splitlines(), mesh)


def read_collectives(lines: Iterable[str], mesh: Mesh) -> tuple[Collective, ...]:
    """Returns the collectives in the lines of a compiled program's text."""
    counts: Counter[tuple[str, tuple[str, ...]]] = Counter()
    sizes: Counter[tuple[str, tuple[str, ...]]] = Counter()
    for line in lines:
        match = _OPERATION.search(line)
        if match is None:
            continue
        result, kind, rest = match.groups()
        key = kind, _axes(_groups(rest, mesh.devices.size), mesh)
        counts[key] += 1
        sizes[key] += sum(_nbytes(*array) for array in _ARRAY.findall(result))
    return tuple(sorted(Collective(*key, counts[key], sizes[key]) for key in counts))


def _groups(text: str, size: int) -> Sequence[Sequence[int]]:
    """Returns the devices that speak to each other, by their places in the mesh."""
    listed = _LISTED.search(text)
    if listed:
        groups = re.findall(r"\{([\d, ]*)\}", listed[1])
        return [[int(x) for x in group.split(",") if x.strip()] for group in groups]
    mesh = _MESH.search(text)
    if mesh:
        return _groups_of_mesh(*mesh.groups())
    iota = _IOTA.search(text)
    if iota is None:
        return [range(size)]
    shape, dims, order = (
        [int(x) for x in part.split(",")] if part else None for part in iota.groups()
    )
    assert shape is not None
    assert dims is not None
    return np.arange(math.prod(dims)).reshape(dims).transpose(order).reshape(shape).tolist()


def _groups_of_mesh(sizes: str, parts: str) -> Sequence[Sequence[int]]:
    """Returns the groups of `mesh['a'=2,'b'=4] {'a'}`, or of `{'b':(2)2}`: of the axis b, whose
    index is counted in twos, the further two."""
    shape = {name: int(size) for name, size in re.findall(r"'([^']*)'=(\d+)", sizes)}
    places = np.indices(tuple(shape.values())).reshape(len(shape), -1)
    own = np.zeros(places.shape[1], np.int64)  # of each device, the number of its group
    moving = {
        name: (int(before or 1), int(size or 0)) for name, before, size in _PART.findall(parts)
    }
    for place, (name, size) in zip(places, shape.items(), strict=True):
        before, part = moving.get(name, (1, 1))
        after = size // (before * (part or size // before))
        number = place // (size // before) * after + place % after
        own = own * before * after + number
    return [np.flatnonzero(own == group).tolist() for group in np.unique(own)]


def _axes(groups: Sequence[Sequence[int]], mesh: Mesh) -> tuple[str, ...]:
    """Returns the axes along which the places of a group differ."""
    places = np.indices(mesh.devices.shape).reshape(mesh.devices.ndim, -1)
    differs = np.zeros(mesh.devices.ndim, bool)
    for group in groups:
        mine = places[:, list(group)]
        differs |= (mine != mine[:, :1]).any(axis=1)
    return tuple(name for name, moves in zip(mesh.axis_names, differs, strict=True) if moves)


def _nbytes(dtype: str, shape: str) -> int:
    count = math.prod(int(x) for x in shape.split(",") if x)
    return count * _ITEMSIZES.get(dtype, 0)


_ITEMSIZES = {
    "pred": 1,
    **{f"{kind}{bits}": bits // 8 for kind in "su" for bits in (8, 16, 32, 64)},
    "bf16": 2,
    "f16": 2,
    "f32": 4,
    "f64": 8,
}
