"""What layers cost on a described device, from their equations alone: no run, no device.

A roofline: an equation takes the longer of its operations at the device's rate and its bytes at
the device's bandwidth. Elementwise equations are taken as fused: only what contractions, loops
and layer borders read or write moves through memory.

Backward, in units of the forward (Qi et al., "Zero Bubble Pipeline Parallelism", section 2):

    contraction with weights      I 1   W 1
    contraction of activations    I 2   W 0      (attention scores)
    everything else               I 2   W 0
    inside jax.checkpoint         I + 1 forward

A table of which rows are looked up moves those rows alone; a layer that computes nothing, as an
embedding, has no input gradient. This takes milliseconds for hundreds of layers.
`octojax.profiling` measures the real programs of each layer: slower, and better.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from jax.extend.core import JaxprEqn, Var

from octojax import compat
from octojax.compat import REMAT_NAMES
from octojax.ir.profile import LayerCost, Machine, Profile
from octojax.jaxprs.count import is_heavy, operations, sub_jaxprs
from octojax.layers import classify
from octojax.layers.classify import Classes, Depends
from octojax.layers.find import LayeredLoss, units_read
from octojax.machines import Device


@dataclass(frozen=True)
class LayerOperations:
    """Operations of one layer's forward, and what must stay in memory, in bytes.

    `weighted` are contractions with weights, `other` contractions and loops without, `light`
    the rest; `repeated` is what jax.checkpoint computes again in the backward. `read_bytes` are
    the weights that a forward reads: all of them, or the rows that are looked up in a table.
    """

    weighted: float
    other: float
    light: float
    repeated: float
    moved_bytes: int
    read_bytes: int
    param_bytes: int
    residual_bytes: int
    weight_residual_bytes: int


def estimate(
    layered: LayeredLoss,
    device: Device,
    machine: Machine | None = None,
    *,
    name: str = "estimate",
    ranks: int | None = None,
    microbatches: int | None = None,
    kinds: Sequence[str] = (),
) -> Profile:
    """The profile of a model's layers for one microbatch, by the cost model of this module.

    `kinds` name the layers (`mamba2`, `attention+moe`), in place of the names of their modules;
    contractions of activations in `mamba` and `delta` are those of a recurrence.
    """
    names = kinds or [layer.kind for layer in layered.graph.layers]
    layers = tuple(
        _cost(device, work, kind, layer.output_bytes)
        for layer, work, kind in zip(
            layered.graph.layers, layer_operations(layered), names, strict=True
        )
    )
    return Profile(name, layers, machine or Machine(), ranks, microbatches)


RECURRENCES = ("mamba", "delta")


def _cost(device: Device, work: LayerOperations, kind: str, output_bytes: int) -> LayerCost:
    moved, read = work.moved_bytes, work.read_bytes
    recurrent = any(word in kind for word in RECURRENCES)

    def time_s(flops: float, inner: float, nbytes: float) -> float:
        return device.launch_s + device.time_s(flops, nbytes, inner, recurrent)

    forward = work.weighted + work.light
    input_grad = work.weighted + 2 * work.light + work.repeated
    computes = forward + work.other > 0
    grads_bytes = 2 * moved + read
    return LayerCost(
        kind=kind,
        forward_s=time_s(forward, work.other, moved + read),
        input_grad_s=time_s(input_grad, 2 * work.other, grads_bytes) if computes else 0.0,
        weight_grad_s=time_s(work.weighted, 0.0, work.weight_residual_bytes + 2 * read),
        backward_s=time_s(input_grad + work.weighted, 2 * work.other, grads_bytes + 2 * read),
        param_bytes=work.param_bytes,
        state_bytes=work.param_bytes * (2 + device.optimizer_slots),
        residual_bytes=work.residual_bytes,
        weight_residual_bytes=work.weight_residual_bytes,
        output_bytes=output_bytes,
    )


def layer_operations(layered: LayeredLoss) -> tuple[LayerOperations, ...]:
    """The work of every layer, counted from its equations."""
    bounds = layered.bounds
    return tuple(
        _operations_of(layered, layered.steps[start:stop]) for start, stop in pairwise(bounds)
    )


def _operations_of(layered: LayeredLoss, group: Sequence[int]) -> LayerOperations:
    normal, depends = layered.normal, layered.depends
    eqns = [normal.flat.eqns[at] for at in group]
    heavy = [eqn for eqn in eqns if is_heavy(eqn)]
    total = sum(map(operations, eqns))
    contractions = sum(map(operations, heavy))
    weighted = sum(_weighted(eqn, depends) for eqn in heavy)
    residuals = _residuals(eqns, depends)
    inputs = [eqn for eqn in heavy if _weighted(eqn, depends)]
    units = units_read(normal, depends, group)
    tables = {at for at in group if _looks_up(normal.flat.eqns[at], depends)}
    rows = [v for at in tables for v in normal.flat.eqns[at].outvars]
    whole = units_read(normal, depends, [at for at in group if at not in tables])
    unit_bytes = layered.unit_bytes
    return LayerOperations(
        weighted=weighted,
        other=contractions - weighted,
        light=total - contractions,
        repeated=sum(operations(eqn) for eqn in eqns if eqn.primitive.name in REMAT_NAMES),
        moved_bytes=_bytes(
            v for eqn in heavy for v in _activations((*eqn.invars, *eqn.outvars), depends)
        ),
        read_bytes=sum(map(unit_bytes, whole)) + 2 * _bytes(rows),  # read and written
        param_bytes=sum(map(unit_bytes, units)),
        residual_bytes=_bytes(residuals),
        weight_residual_bytes=_bytes(
            v for eqn in inputs for v in (*_activations(eqn.invars, depends), *eqn.outvars)
        ),
    )


def _looks_up(eqn: JaxprEqn, depends: Classes) -> bool:
    """Whether an equation takes rows out of a table of weights."""
    return eqn.primitive.name == "gather" and classify.of(depends, eqn.invars[0]) == Depends.PARAM


def _weighted(eqn: JaxprEqn, depends: Classes) -> float:
    """The operations of contractions with weights in an equation, at any depth."""
    if not any(classify.of(depends, x) == Depends.PARAM for x in eqn.invars):
        return 0.0
    bodies = list(sub_jaxprs(eqn))
    if not bodies:
        return operations(eqn)
    totals = [0.0]
    for body in bodies:  # the last operands are the body's (a cond's first is the branch)
        outer = eqn.invars[len(eqn.invars) - len(body.invars) :]
        classes = classify.classify(
            body.eqns, {v: classify.of(depends, x) for v, x in zip(body.invars, outer)}
        )
        totals.append(sum(_weighted(inner, classes) for inner in body.eqns if is_heavy(inner)))
    return max(totals) * eqn.params.get("length", 1)


def _residuals(eqns: Sequence[JaxprEqn], depends: Classes) -> list[Var]:
    """The activations that a backward reads: operands of products, results of functions.

    A checkpointed or looping equation keeps its operands.
    """
    variables: dict[Var, None] = {}
    for eqn in eqns:
        name = eqn.primitive.name
        if is_heavy(eqn) or name in _PRODUCTS:
            variables.update((v, None) for v in _activations(eqn.invars, depends))
        elif name in _FUNCTIONS:
            variables.update((v, None) for v in eqn.outvars)
    return list(variables)


_PRODUCTS = frozenset({"mul", "div", "custom_jvp_call", "custom_vjp_call", "integer_pow", "pow"})
_FUNCTIONS = frozenset({"tanh", "exp", "logistic", "sqrt", "rsqrt", "max", "min", "sin", "cos"})


def _activations(atoms: Sequence[compat.Atom], depends: Classes) -> list[Var]:
    return [v for v in atoms if isinstance(v, Var) and classify.of(depends, v).is_activation]


def _bytes(values: Iterable[Var]) -> int:
    return sum(compat.num_bytes(v.aval) for v in dict.fromkeys(values))
