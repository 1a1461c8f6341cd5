"""Equations that hide layers, opened: scans over stacked layers, maps, `jax.checkpoint` of many.

A `lax.map` over chunks of the batch, or a scan that only adds up what its chunks give, is opened
too if its body holds several layers: all chunks run at once, and the layers are those of the body.

What stays whole, because it has a derivative rule or a control flow of its own: `custom_vjp`,
`custom_jvp`, `cond`, `while`, scans over time. A `jax.checkpoint` around one layer (or a block
of at most `MOST_LAYERS`) stays, and with it the user's recomputation; around more it is written
out, because what is recomputed is then the plan's choice, stage by stage.
"""

import enum
from collections.abc import Callable, Sequence
from itertools import pairwise

from jax.extend.core import JaxprEqn, Literal, Var

from octojax import compat
from octojax.compat import JIT_NAMES, REMAT_NAMES, Atom, aval_of
from octojax.jaxprs.count import is_heavy, operations
from octojax.jaxprs.dataflow import needed_for
from octojax.jaxprs.flat import Builder, FlatJaxpr, flatten, read, rewrite
from octojax.jaxprs.inline import body_of, inline_call, inline_jits
from octojax.jaxprs.parallel import is_map, open_map
from octojax.jaxprs.unroll import unroll_scan
from octojax.layers import classify
from octojax.layers.borders import find_borders
from octojax.layers.classify import Classes, Depends
from octojax.layers.steps import walk

MOST_LAYERS = 4  # inside one kept checkpoint, and ...
LARGE_SHARE = 0.5  # ... of the model's operations in one kept checkpoint of several layers
LONGEST_STACK = 1024  # iterations written out


class Remat(enum.Enum):
    """Which `jax.checkpoint` equations are written out."""

    LARGE = "large"
    ALL = "all"


def open_layers(flat: FlatJaxpr, sources: Classes, remat: Remat) -> FlatJaxpr:
    """Returns the jaxpr with nested jits, stacks of layers and large checkpoints written out."""
    flat = inline_jits(flat)
    while True:
        depends = classify.classify(flat.eqns, sources)
        total = sum(map(operations, flat.eqns))
        openers = {id(eqn): _opener(eqn, depends, total, remat) for eqn in flat.eqns}
        if not any(openers.values()):
            return _free_counters(flat, depends)
        flat = inline_jits(rewrite(flat, lambda b, e, args: _open(b, e, args, openers[id(e)])))  # noqa: B023


_Opener = Callable[[Builder, JaxprEqn, Sequence[Atom]], list[Atom]]


def _open(
    builder: Builder, eqn: JaxprEqn, args: Sequence[Atom], opener: _Opener | None
) -> Sequence[Atom] | None:
    return opener and opener(builder, eqn, args)


def _free_counters(flat: FlatJaxpr, depends: Classes) -> FlatJaxpr:
    """Returns the jaxpr with checkpoints' results that are no activations made outside of them.

    A dropout count that passes through `nnx.remat` depends on itself alone, not on the block.
    """

    def rule(builder: Builder, eqn: JaxprEqn, args: list[Atom]) -> Sequence[Atom] | None:
        if eqn.primitive.name not in REMAT_NAMES:
            return None
        body = inline_jits(flatten(body_of(eqn)))
        inside = {v: classify.of(depends, x) for v, x in zip(body.invars, eqn.invars)}
        inside = classify.classify(body.eqns, inside)
        free = {k for k, x in enumerate(body.outvars) if not classify.of(inside, x).is_activation}
        if not free or all(not classify.of(depends, v).is_activation for v in eqn.outvars):
            return None
        env: dict[Var, Atom] = {}
        builder.emit(eqn.replace(invars=list(args)), env)
        outputs = [env[v] for v in eqn.outvars]
        needed = needed_for(body.eqns, [body.outvars[k] for k in free])
        inner: dict[Var, Atom] = dict(zip(body.invars, args))
        inner.update(
            (v, builder.constant(value, v)) for v, value in zip(body.constvars, body.constants)
        )
        for at in sorted(needed):
            builder.emit(body.eqns[at], inner)
        return [read(inner, body.outvars[k]) if k in free else x for k, x in enumerate(outputs)]

    return rewrite(flat, rule)


def _opener(eqn: JaxprEqn, depends: Classes, total: float, remat: Remat) -> _Opener | None:
    """How an equation is written out; None for one that stays."""
    if eqn.primitive.name == "scan" and is_layer_stack(eqn, depends):
        return unroll_scan
    if eqn.primitive.name == "scan" and _is_map_of_layers(eqn, depends):
        return open_map
    if eqn.primitive.name in REMAT_NAMES and (
        remat is Remat.ALL or _holds_many(eqn, depends, total)
    ):
        return inline_call
    return None


def _holds_many(eqn: JaxprEqn, depends: Classes, total: float) -> bool:
    count = count_layers(eqn, depends)
    return count > MOST_LAYERS or (count > 1 and operations(eqn) > LARGE_SHARE * total)


def _is_map_of_layers(eqn: JaxprEqn, depends: Classes) -> bool:
    """Whether a scan does the same to each of its rows, in several layers with weights.

    A loss over chunks of a vocabulary, or attention over chunks of its queries, has one, and
    keeps the memory that the chunks save.
    """
    return is_map(eqn) and count_layers(eqn, depends, weighty=True) > 1


def count_layers(eqn: JaxprEqn, depends: Classes, weighty: bool = False) -> int:
    """Returns how many layers the body of a call or scan would come apart into.

    `weighty`: of these, how many have an equation that is heavy and reads weights.
    """
    body = inline_jits(flatten(body_of(eqn)))
    inside = {v: classify.of(depends, x) for v, x in zip(body.invars, eqn.invars)}
    body = open_layers(body, inside, Remat.LARGE) if _has_stack(body) else body
    inside = classify.classify(body.eqns, inside)
    activations = [v for v in body.invars if classify.of(inside, v).is_activation]
    before = sum(compat.num_bytes(aval_of(v)) for v in activations)
    walked = walk(body.eqns, inside, body.outvars, activations)
    borders = find_borders(walked.steps, before=before)
    if not weighty:
        return 1 + len(borders)
    ends = [0, *(p + 1 for p in borders), len(walked.steps)]
    parts = (walked.steps[start:stop] for start, stop in pairwise(ends))
    return sum(any(step.heavy and step.reads_params for step in part) for part in parts)


def _has_stack(body: FlatJaxpr) -> bool:
    return any(eqn.primitive.name in REMAT_NAMES | {"scan"} for eqn in body.eqns)


def is_layer_stack(eqn: JaxprEqn, depends: Classes) -> bool:
    """Whether a scan runs over layers and not over time.

    It does if a contraction in its body reads weights that come from the scanned rows alone,
    or if the body indexes a stack of weights, one row per iteration, that it closes over.
    """
    if eqn.params["length"] > LONGEST_STACK:
        return False
    body = inline_jits(flatten(eqn.params["jaxpr"]), JIT_NAMES | REMAT_NAMES)
    num_consts, num_carry = compat.scan_counts(eqn.params)
    inside = _scan_classes(
        body, [classify.of(depends, x) for x in eqn.invars], num_carry, num_consts
    )
    rows = {v for v in body.invars[num_consts + num_carry :] if inside[v] == Depends.PARAM}
    consts = {v for v in body.invars[:num_consts] if inside[v] == Depends.PARAM}
    return _reads_rows(body, inside, rows) or _indexes(body, inside, consts, eqn.params["length"])


def _scan_classes(
    body: FlatJaxpr, outside: Sequence[Depends], num_carry: int, num_consts: int
) -> dict[Var, Depends]:
    """Returns what the values of a scan body depend on, over all iterations."""
    classes = list(outside)
    while True:
        inside = classify.classify(body.eqns, dict(zip(body.invars, classes)))
        carried = [classify.of(inside, x) for x in body.outvars[:num_carry]]
        merged = list(classes)
        for k, depends in enumerate(carried):
            merged[num_consts + k] |= depends
        if merged == classes:
            return inside
        classes = merged


def _reads_rows(body: FlatJaxpr, inside: Classes, rows: set[Var]) -> bool:
    """Whether a heavy equation has an operand made of scanned parameter rows alone."""
    from_rows = set(rows)
    for eqn in body.eqns:
        mine = [x for x in eqn.invars if isinstance(x, Var) and x in from_rows]
        if mine and (is_heavy(eqn) or eqn.primitive.name == "gather"):
            return True
        if mine and classify.union(inside, eqn.invars) == Depends.PARAM:
            from_rows.update(eqn.outvars)
    return False


def _indexes(body: FlatJaxpr, inside: Classes, consts: set[Var], length: int) -> bool:
    """Whether the body takes one row per iteration of weights that it closes over."""
    for eqn in body.eqns:
        if eqn.primitive.name != "dynamic_slice":
            continue
        stack, *starts = eqn.invars
        static = all(isinstance(x, Literal) or inside[x] == Depends.NOTHING for x in starts)
        rows = getattr(aval_of(stack), "shape", (0,))[0]
        if stack in consts and static and rows >= length and eqn.params["slice_sizes"][0] == 1:
            return True
    return False
