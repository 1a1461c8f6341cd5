"""What a model says about mesh axes, and the same computation on the devices of one rank.

A loss is traced once, for all ranks, and its equations remember the mesh of that trace. A rank's
program is therefore traced again, equation by equation, under the rank's own mesh:

    traced for the mesh             on a rank, data manual
    constrain P("data", "tensor")   constrain P(None, "tensor")
    constrain P("pipe", None)       nothing, without automatic axes; else P(None, None)
    shard_map over all axes         shard_map over those that the rank has left
"""

import math
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.extend.core import JaxprEqn, Literal
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from octojax import compat
from octojax.errors import MeshError
from octojax.jaxprs.count import sub_jaxprs
from octojax.jaxprs.inline import CALLS, body_of

_OUTPUTS = ("sharding", "out_sharding")
_CASTS = frozenset({"pvary"})
"""What says along which axes of a `shard_map` a value varies."""
_SUMS = frozenset({"psum", "psum_invariant"})
"""What a derivative sums over axes along which a value is the same."""

_BODIES = {"scan": ("jaxpr",), "while": ("cond_jaxpr", "body_jaxpr"), "cond": ("branches",)}


@dataclass(frozen=True)
class Axes:
    """The devices of a rank, and those axes of their mesh over which XLA spreads values."""

    mesh: Mesh
    names: frozenset[str]


def evaluate(closed: Any, values: Sequence[Any], axes: Axes | None) -> list[Any]:
    """Returns the outputs of a jaxpr, traced (or run) anew for a rank.

    What it says of shardings keeps the rank's `axes`; without any, all is dropped. Custom
    derivative rules are gone: this is for what is not differentiated again.
    """
    if not names_mesh(closed):
        return compat.eval_jaxpr(closed, values)
    return _evaluate(closed, values, axes)


def _evaluate(jaxpr: Any, values: Sequence[Any], axes: Axes | None) -> list[Any]:
    jaxpr, consts = compat.split_consts(jaxpr)
    env = dict(zip(jaxpr.constvars, consts, strict=True))
    env.update(zip(jaxpr.invars, values, strict=True))

    def read(atom: Any) -> Any:
        return _unplaced(atom.val) if isinstance(atom, Literal) else env[atom]

    for eqn in jaxpr.eqns:
        results = apply(eqn, [read(atom) for atom in eqn.invars], axes)
        env.update(zip(eqn.outvars, results, strict=True))
    return [read(atom) for atom in jaxpr.outvars]


def traced_anew(function: Callable[..., Any], axes: Axes | None = None) -> Callable[..., Any]:
    """Returns `function` as one whose operations are those of `evaluate`: for what takes a
    derivative of a jaxpr that names a mesh. It may not close over values of a trace."""

    def run(*args: Any) -> Any:
        closed, shapes = compat.trace(function, *jax.tree.map(_shape, args))
        values = evaluate(closed, jax.tree.leaves(args), axes)
        return jax.tree.unflatten(jax.tree.structure(shapes), values)

    return run


def apply(eqn: JaxprEqn, values: Sequence[Any], axes: Axes | None) -> Sequence[Any]:
    """Returns the results of one equation on a rank; see `evaluate`."""
    name, params = eqn.primitive.name, eqn.params
    if name in CALLS and body_of(eqn) is not None:
        return _call(eqn, values, axes)
    shardings = shardings_of(eqn)
    if shardings:
        pairs = zip(values, shardings, strict=True)
        return [value if at is None else _constrain(value, at, axes) for value, at in pairs]
    if name == "shard_map":
        return _shard_map(eqn, values, axes)
    if name in _CASTS | _SUMS:
        return _along(eqn, values, axes)
    if name in _BODIES:
        params = {**params, **{key: _again(params[key], axes) for key in _BODIES[name]}}
    # Rules of differentiation give a broadcast, say, the sharding of what it is the gradient of.
    automatic = {k: None for k in _OUTPUTS if isinstance(params.get(k), NamedSharding)}
    return compat.bind_here(eqn, values, {**params, **automatic})


def names_mesh(jaxpr: Any) -> bool:
    """Whether a jaxpr was traced under a mesh, or names shardings, anywhere inside."""
    return any(not compat.mesh_of(eqn).empty or shardings_of(eqn) for eqn in equations(jaxpr))


def equations(jaxpr: Any) -> Iterator[JaxprEqn]:
    """Yields the equations of a jaxpr, and those of the jaxprs inside, in order."""
    inner, _ = compat.split_consts(jaxpr)
    for eqn in inner.eqns:
        yield eqn
        for body in sub_jaxprs(eqn):
            yield from equations(body)


def shardings_of(eqn: JaxprEqn) -> tuple[NamedSharding | None, ...]:
    """Returns the sharding that an equation gives each of its values, where it does only that;
    None for one that it leaves as it is. Empty for any other equation."""
    match eqn.primitive.name:
        case "sharding_constraint":
            shardings = [eqn.params["sharding"]]
        case "reshard":
            shardings = [eqn.params["dst_sharding"]]
        case "device_put":
            shardings = eqn.params["devices"]
        case _:
            return ()
    named = tuple(x if isinstance(x, NamedSharding) else None for x in shardings)
    return named if any(named) or eqn.primitive.name != "device_put" else ()


def check_shardings(jaxpr: Any, axis_names: Sequence[str], handled: Sequence[str]) -> None:
    """Raises `MeshError` naming all places of a loss that cannot be kept: shardings over axes
    that the mesh lacks, collectives over the axes in `handled`."""
    faults = []
    for eqn in equations(jaxpr):
        at = compat.source_line(eqn) or "a line that is not known"
        said = [s for s in (*shardings_of(eqn), *_of_call(eqn)) if s is not None]
        unknown = {name for s in said for name in _names(s.spec)} - set(axis_names)
        if unknown:
            faults.append(f"{at} names the mesh axis {_list(unknown)}")
        mixed = _collective_axes(eqn) & set(handled)
        if mixed:
            faults.append(f"{at} computes over the axis {_list(mixed)} ({eqn.primitive.name})")
    if faults:
        raise MeshError(
            f"the loss does not fit the mesh with axes {tuple(axis_names)}: "
            f"{'; '.join(dict.fromkeys(faults))}. Name axes of this mesh in the model, and none "
            f"of {_list(handled)} in its collectives: the pipeline spreads rows and stages itself"
        )


def _collective_axes(eqn: JaxprEqn) -> set[Any]:
    if eqn.primitive.name in _CASTS:
        return set()
    axes = eqn.params.get("axes", eqn.params.get("axis_name", ()))
    return {a for a in (axes if isinstance(axes, tuple | list) else (axes,)) if isinstance(a, str)}


def _of_call(eqn: JaxprEqn) -> tuple[NamedSharding | None, ...]:
    ends = (*eqn.params.get("in_shardings", ()), *eqn.params.get("out_shardings", ()))
    return tuple(s if isinstance(s, NamedSharding) else None for s in ends)


def _call(eqn: JaxprEqn, values: Sequence[Any], axes: Axes | None) -> list[Any]:
    """Returns the results of a call, written out: what it says of its ends is a constraint, and the
    barrier that keeps XLA from merging a recomputation stays."""
    params = eqn.params
    if params.get("differentiated") and params.get("prevent_cse") is True:
        values = jax.lax.optimization_barrier(list(values))
    before = _ends(values, params.get("in_shardings", ()), axes)
    return _ends(_evaluate(body_of(eqn), before, axes), params.get("out_shardings", ()), axes)


def _ends(values: Sequence[Any], shardings: Sequence[Any], axes: Axes | None) -> list[Any]:
    if not shardings:
        return list(values)
    return [
        _constrain(value, at, axes) if isinstance(at, NamedSharding) else value
        for value, at in zip(values, shardings, strict=True)
    ]


def _again(body: Any, axes: Axes | None, end: Callable[[list[Any]], list[Any]] = list) -> Any:
    """Returns the body of a loop, or all branches, traced under the mesh of the caller."""
    if isinstance(body, tuple | list):
        return tuple(_again(one, axes, _whole(axes)) for one in body)
    if not names_mesh(body):
        return body
    shapes = map(_shape, body.in_avals)
    return compat.trace(lambda *values: end(evaluate(body, values, axes)), *shapes)[0]


def _shape(value: Any) -> jax.ShapeDtypeStruct:
    """Returns the type of a value, on no mesh."""
    weak = bool(getattr(value, "weak_type", False))
    return jax.ShapeDtypeStruct(value.shape, value.dtype, weak_type=weak)


def _unplaced(value: Any) -> Any:
    """Returns a literal as NumPy has it: JAX's own remember the mesh they were written under."""
    if isinstance(value, jax.Array) or not hasattr(value, "dtype"):
        return value
    return value.item() if getattr(value, "weak_type", False) else np.asarray(value)


def _whole(axes: Axes | None) -> Callable[[list[Any]], list[Any]]:
    """Gives the ends of all branches of a `cond` one sharding, without which XLA refuses them."""
    if axes is None:
        return list
    whole = NamedSharding(axes.mesh, PartitionSpec())
    return lambda values: [_constrain(value, whole, axes) for value in values]


def _constrain(value: Any, sharding: NamedSharding, axes: Axes | None) -> Any:
    if axes is None:
        return value
    here = jax.sharding.get_abstract_mesh()
    names = axes.names - _manual(here)
    if all(axes.mesh.shape[name] == 1 for name in names):
        return value
    where = NamedSharding(axes.mesh if here.empty else here, _only(sharding.spec, names))
    return jax.lax.with_sharding_constraint(value, where)


def _shard_map(eqn: JaxprEqn, values: Sequence[Any], axes: Axes | None) -> Sequence[Any]:
    params = eqn.params
    if axes is None:
        raise MeshError(
            f"{compat.source_line(eqn)}: a shard_map cannot be run on one device alone, as what is "
            f"measured (give a plan or a profile) and what the batch alone decides (put it into "
            f"the batch) are"
        )
    here = jax.sharding.get_abstract_mesh()
    names = (axes.names & set(params["newly_manual_axes"])) - _manual(here)

    def body(*parts: Any) -> list[Any]:
        return _evaluate(params["jaxpr"], parts, axes)

    if not names:
        return body(*values)
    mapped = jax.shard_map(
        body,
        mesh=axes.mesh if here.empty else None,
        in_specs=tuple(_only(spec, names) for spec in params["in_specs"]),
        out_specs=[_only(spec, names) for spec in params["out_specs"]],
        axis_names=set(names),
        check_vma=params["check_vma"],
    )
    return mapped(*values)


def _along(eqn: JaxprEqn, values: Sequence[Any], axes: Axes | None) -> Sequence[Any]:
    """Returns the results of a cast or a sum along axes, some of which the rank may lack: values
    are the same along those, as a model computes over none of them."""
    along = eqn.params["axes"]
    names = frozenset() if axes is None else axes.names
    lacking = [a for a in along if isinstance(a, str) and a not in names]
    times = math.prod(compat.mesh_of(eqn).shape[a] for a in lacking)
    if eqn.primitive.name in _SUMS and times != 1:
        values = [value * times for value in values]
    present_axes = tuple(a for a in along if a not in lacking)
    return (
        compat.bind_here(eqn, values, {**eqn.params, "axes": present_axes})
        if present_axes
        else values
    )


def _manual(mesh: Any) -> frozenset[str]:
    """Returns the axes that a `shard_map` around has taken."""
    types = zip(mesh.axis_names, mesh.axis_types, strict=True)
    return frozenset(name for name, kind in types if kind == AxisType.Manual)


def _only(spec: PartitionSpec, names: Collection[str]) -> PartitionSpec:
    """Returns the spec without other axes."""

    def entry(part: Any) -> Any:
        if isinstance(part, tuple):
            return tuple(name for name in part if name in names) or None
        return part if not isinstance(part, str) or part in names else None

    return PartitionSpec(*map(entry, spec))


def _names(spec: Any) -> set[str]:
    parts = [x for part in spec for x in (part if isinstance(part, tuple) else (part,))]
    return {name for name in parts if isinstance(name, str)}


def _list(names: Any) -> str:
    return ", ".join(repr(name) for name in sorted(names))
