"""Names of layers, from the key paths of the parameters that they multiply by."""

import re
from collections.abc import Mapping, Sequence

from jax.extend.core import Var

from octojax.jaxprs.count import is_heavy
from octojax.layers import classify
from octojax.layers.classify import Depends
from octojax.layers.normalize import NormalLoss
from octojax.layers.paths import common_path


def name_layers(
    normal: NormalLoss, depends: Mapping[Var, Depends], groups: Sequence[Sequence[int]]
) -> list[tuple[str, str]]:
    """Returns `(name, kind)` per group of equations: unique names; kinds without numbers.

    The common path of the weights of the group's heavy equations, or of all its weights:
    `layers.3.mlp`. Layers without weights are called after their last equation. Layers of one
    kind have the same equations; where paths alike hide different ones, kinds get a letter.
    """
    names = [_name(normal, depends, group) for group in groups]
    prints = [_fingerprint(normal, group) for group in groups]
    return list(zip(_unique(names), _kinds(names, prints)))


def _name(normal: NormalLoss, depends: Mapping[Var, Depends], group: Sequence[int]) -> str:
    eqns = [normal.flat.eqns[at] for at in group]
    heavy = [eqn for eqn in eqns if is_heavy(eqn) or eqn.primitive.name == "gather"]
    for some in (heavy, eqns):
        units = normal.units_behind(classify.side_inputs(some, depends))
        paths = [normal.units[u].name for u in units]
        if paths:
            return common_path(paths) or _common_words(sorted({p.split(".")[0] for p in paths}))
    return eqns[-1].primitive.name


def _common_words(heads: Sequence[str]) -> str:
    """Returns the words that modules begin with (`block_1_norm block_1_mlp -> block_1`) or all."""
    common = common_path([head.replace("_", ".") for head in heads]).replace(".", "_")
    return common or "+".join(heads)


def _unique(names: Sequence[str]) -> list[str]:
    """Returns the names, those that occur more than once with `/0`, `/1`, ... behind."""
    counts: dict[str, int] = {}
    unique = []
    for name in names:
        number = counts.get(name, 0)
        counts[name] = number + 1
        unique.append(f"{name}/{number}" if names.count(name) > 1 else name)
    return unique


def _kinds(names: Sequence[str], prints: Sequence[str]) -> list[str]:
    stems = [_stem(name) for name in names]
    kinds: list[str] = []
    shapes_of: dict[str, list[str]] = {}
    for stem, shape in zip(stems, prints):
        shapes = shapes_of.setdefault(stem, [])
        if shape not in shapes:
            shapes.append(shape)
        at = shapes.index(shape)
        kinds.append(stem if at == 0 else f"{stem}-{at + 1}")
    return kinds


def _stem(name: str) -> str:
    words = [w for w in re.split(r"[.]", re.sub(r"\d+", "", name)) if w.strip("_")]
    return ".".join(w.strip("_") for w in words) or name


def _fingerprint(normal: NormalLoss, group: Sequence[int]) -> str:
    """Primitives and shapes of the equations, without names."""
    rows = []
    for at in group:
        eqn = normal.flat.eqns[at]
        shapes = ",".join(str(v.aval) for v in (*eqn.invars, *eqn.outvars))
        rows.append(f"{eqn.primitive.name}:{shapes}")
    return ";".join(rows)
