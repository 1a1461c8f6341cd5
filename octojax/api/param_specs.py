"""How the parameters of a pipelined loss lie on the devices of their rank.

    P(None, "tensor")     float32[512, 2048] on tensor=4: float32[512, 512] on each device

What the model says (`octojax.frontends.specs`) holds, unless `param_specs` says other.
"""

import difflib
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax.tree_util as tree
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from octojax.api.structure import without_value, words, words_of
from octojax.compat import is_key
from octojax.errors import MeshError
from octojax.frontends.pure import Path
from octojax.frontends.specs import partition_specs
from octojax.mesh import DATA_AXIS, PipelineMesh, axes_of
from octojax.stages.program import ParamUnit
from octojax.trace import Leaves, path_name

WHOLE = PartitionSpec()


def unit_specs(
    params: Any,
    state: Any,
    leaves: Sequence[Leaves],
    units: Sequence[ParamUnit],
    mesh: PipelineMesh,
    rules: Any = None,
    aliases: Mapping[Path, Sequence[Path]] | None = None,
) -> tuple[PartitionSpec, ...]:
    """Returns the spec of every parameter unit, over the axes of a rank.

    `leaves` are those of `params` and of `state`. `rules` is None, a tree of specs whose paths
    begin those of `params`, or a function of path and shape, which is asked for frozen state, too.
    None in it, and leaves without an entry, go by what the model says. A unit that is a row of a
    stacked leaf has the spec of the leaf without its first entry. `aliases` are the other paths of
    tied weights (`PureLoss.aliases`): what `rules` say of one of them holds for the weight.

    Raises `MeshError` listing every tied weight of which `rules` say two things, or every leaf
    whose spec names the pipeline's or the data axis or one that the mesh lacks, is longer than the
    shape, or does not divide it.
    """
    said = [*partition_specs(params, mesh.mesh), *partition_specs(state, mesh.mesh)]
    names = [name for part in leaves for name in part.names]
    avals = [aval for part in leaves for aval in part.avals]
    shared = [
        (aliases or {}).get(without_value(path), ())
        for part in leaves
        for path in words_of(part.treedef)
    ]
    overrides = _user_specs(leaves[0], names, avals, shared, rules)
    specs = [a if a is not None else s for a, s in zip(overrides, said, strict=True)]
    rows = {unit.leaf for unit in units if unit.index is not None}
    read = {unit.leaf for unit in units}
    faults = [
        f"{names[k] or 'the parameters'} of shape {list(avals[k].shape)} has {spec}, {fault}"
        for k, spec in enumerate(specs)
        if spec is not None and k in read and not is_key(avals[k])
        for fault in _faults(spec, avals[k].shape, mesh, stacked=k in rows)
    ]
    if faults:
        raise MeshError(
            f"{len(faults)} partition specs do not fit the mesh with axes "
            f"{dict(mesh.mesh.shape)}: {'; '.join(faults)}. Change the model's metadata or its "
            f"rules, or say param_specs= (a tree of specs, or a function of path and shape; P() "
            f"is whole)"
        )
    return tuple(
        _of_unit(specs[unit.leaf] if unit.leaf < len(specs) else None, unit) for unit in units
    )


def bytes_per_device(spec: PartitionSpec, nbytes: int, mesh: Mesh) -> int:
    """Returns what each device of a rank keeps of a value of so many bytes."""
    parts = math.prod(mesh.shape[name] for entry in spec for name in axes_of(entry))
    return nbytes // parts


def _of_unit(spec: PartitionSpec | None, unit: ParamUnit) -> PartitionSpec:
    if spec is None:
        return WHOLE
    entries = [entry if axes_of(entry) else None for entry in spec]  # UNCONSTRAINED is whole
    return PartitionSpec(*entries[unit.index is not None :])


def _user_specs(
    expected: Leaves,
    names: Sequence[str],
    avals: Sequence[Any],
    shared: Sequence[Sequence[Path]],
    rules: Any,
) -> list[PartitionSpec | None]:
    """Returns what `param_specs` says of every leaf of parameters and state."""
    if rules is None:
        return [None] * len(names)
    paths = [
        [name, *(".".join(path) for path in others)]
        for name, others in zip(names, shared, strict=True)
    ]
    if callable(rules):
        rule: Callable[[str, tuple[int, ...]], Any] = rules
        answers = [
            [_spec_of(rule(path, tuple(aval.shape)), path) for path in every]
            for every, aval in zip(paths, avals, strict=True)
        ]
    else:
        of_params = _by_prefix(rules, expected, shared)
        answers = [*of_params, *[[None]] * (len(names) - len(expected))]
    return _agreed(paths, answers)


def _agreed(
    paths: Sequence[Sequence[str]], answers: Sequence[Sequence[PartitionSpec | None]]
) -> list[PartitionSpec | None]:
    """Returns the one spec of every leaf, of what is said at each of its paths."""
    specs: list[PartitionSpec | None] = []
    faults = []
    for every, said in zip(paths, answers, strict=True):
        specs.append(next((spec for spec in said if spec is not None), None))
        different = [
            f"{path} {spec}" for path, spec in zip(every, said, strict=False) if spec is not None
        ]
        if any(spec is not None and _trimmed(spec) != _trimmed(specs[-1]) for spec in said):
            faults.append(" and ".join(different))
    if faults:
        raise MeshError(
            f"param_specs has several specs for one tied weight: {'; '.join(faults)}. A weight "
            f"lies on its devices in one way: give each path of it the same spec, or all but one "
            f"None"
        )
    return specs


def _trimmed(spec: PartitionSpec | None) -> tuple[tuple[str, ...], ...]:
    """The axes of every dimension, without those at the end that are whole."""
    axes = [tuple(axes_of(entry)) for entry in spec or ()]
    while axes and not axes[-1]:
        axes.pop()
    return tuple(axes)


def _by_prefix(
    rules: Any, expected: Leaves, shared: Sequence[Sequence[Path]]
) -> list[list[PartitionSpec | None]]:
    """Returns the spec of the entry whose path begins each path of every leaf, or None."""
    entries = {
        words(path): _spec_of(value, path_name(path))
        for path, value in tree.tree_leaves_with_path(rules, is_leaf=_is_entry)
    }
    every = [
        [path, *others] for path, others in zip(words_of(expected.treedef), shared, strict=False)
    ]
    keys = [
        [
            next((path[:k] for k in range(len(path), -1, -1) if path[:k] in entries), None)
            for path in paths
        ]
        for paths in every
    ]
    unused = set(entries) - {key for own in keys for key in own}
    if unused:
        names = [".".join(path) for paths in every for path in paths]
        listed = ", ".join(_suggested(".".join(path), names) for path in sorted(unused))
        raise MeshError(
            f"param_specs has entries that begin the path of no parameter: {listed}. Give a tree "
            f"like that of the parameters (the containers do not matter), or a function of path "
            f"and shape"
        )
    return [[None if key is None else entries[key] for key in own] for own in keys]


def _is_entry(value: Any) -> bool:
    return value is None or isinstance(value, PartitionSpec | NamedSharding)


def _suggested(name: str, names: Sequence[str]) -> str:
    near = difflib.get_close_matches(name, names, n=1)
    return f"{name!r}" + (f" (did you mean {near[0]!r}?)" if near else "")


def _spec_of(value: Any, name: str) -> PartitionSpec | None:
    if isinstance(value, NamedSharding):
        return value.spec
    if value is None or isinstance(value, PartitionSpec):
        return value
    raise MeshError(
        f"param_specs gives {name or 'the parameters'} a value of type {type(value).__name__}, "
        f"expected a jax.sharding.PartitionSpec such as P(None, 'tensor'), or None for what the "
        f"model says"
    )


def _faults(
    spec: PartitionSpec, shape: tuple[int, ...], mesh: PipelineMesh, *, stacked: bool
) -> list[str]:
    """What is wrong with a spec, if anything."""
    sizes = mesh.mesh.shape
    every = [name for entry in spec for name in axes_of(entry)]
    faults = [_unknown(name, mesh) for name in dict.fromkeys(every) if name not in sizes]
    if mesh.axis in every:
        faults.append(
            f"which names the pipeline's axis {mesh.axis!r}: its ranks keep different stages"
        )
    if DATA_AXIS in every:
        faults.append(f"which names the axis {DATA_AXIS!r}, over which the rows of the batch lie")
    if len(set(every)) < len(every):
        faults.append("which names an axis twice")
    if len(spec) > len(shape):
        faults.append(f"which has {len(spec)} entries for {len(shape)} dimensions")
    if stacked and len(spec) and axes_of(spec[0]):
        faults.append("whose dimension 0 is that of the layers, which the stages cut")
    if faults:
        return faults
    for at, (entry, size) in enumerate(zip(spec, shape, strict=False)):
        parts = math.prod(sizes[name] for name in axes_of(entry))
        if size % parts:
            faults.append(f"but dimension {at} of {size} is not divided by the {parts} of {entry}")
    return faults


def _unknown(name: str, mesh: PipelineMesh) -> str:
    return f"but the mesh has no axis {_suggested(name, mesh.mesh.axis_names)}"
