"""What layers cost on a described device, from their equations alone: no run, no device.

A roofline: an equation takes the longer of its operations at the device's rate and its bytes at
the device's bandwidth. Elementwise equations are taken as fused: only what contractions, loops
and layer borders read or write moves through memory.

Backward, in units of the forward (Qi et al., "Zero Bubble Pipeline Parallelism", section 2):

    contraction with weights      I 1   W 1
    contraction of activations    I 2   W 0      (attention scores)
    everything else               I 2   W 0
    inside jax.checkpoint         I + 1 forward

This takes milliseconds for hundreds of layers. `octojax.profiling` differentiates each layer and
prices its real programs, or measures them: slower, and better.
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


@dataclass(frozen=True)
class Device:
    """One rank's device. `efficiency` is the share of the peak rate that contractions reach.

    `launch_s` is paid once per program, `optimizer_slots` arrays per weight are kept besides
    the weight and its gradient.
    """

    flops_per_s: float
    bandwidth_bytes_per_s: float
    efficiency: float = 0.5
    launch_s: float = 0.0
    optimizer_slots: int = 2

    def __post_init__(self) -> None:
        for name in ("flops_per_s", "bandwidth_bytes_per_s", "efficiency"):
            if not getattr(self, name) > 0:
                raise ValueError(f"device: {name} = {getattr(self, name)}, expected > 0")
        if self.launch_s < 0 or self.optimizer_slots < 0:
            raise ValueError(
                f"device: launch_s = {self.launch_s}, optimizer_slots = {self.optimizer_slots}, "
                f"expected >= 0"
            )

    def time_s(self, flops: float, nbytes: float) -> float:
        return max(
            flops / (self.flops_per_s * self.efficiency), nbytes / self.bandwidth_bytes_per_s
        )


@dataclass(frozen=True)
class LayerOperations:
    """Operations of one layer's forward, and what must stay in memory, in bytes.

    `weighted` are contractions with weights, `other` contractions and loops without, `light`
    the rest; `repeated` is what jax.checkpoint computes again in the backward.
    """

    weighted: float
    other: float
    light: float
    repeated: float
    moved_bytes: int
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
) -> Profile:
    """The profile of a model's layers for one microbatch, by the cost model of this module."""
    layers = tuple(
        _cost(device, work, layer.kind, layer.output_bytes)
        for layer, work in zip(layered.graph.layers, layer_operations(layered))
    )
    return Profile(name, layers, machine or Machine(), ranks, microbatches)


def _cost(device: Device, work: LayerOperations, kind: str, output_bytes: int) -> LayerCost:
    moved, params = work.moved_bytes, work.param_bytes
    forward = work.weighted + work.other + work.light
    input_grad = work.weighted + 2 * (work.other + work.light) + work.repeated
    return LayerCost(
        kind=kind,
        forward_s=device.launch_s + device.time_s(forward, moved + params),
        input_grad_s=device.launch_s + device.time_s(input_grad, 2 * moved + params),
        weight_grad_s=device.launch_s
        + device.time_s(work.weighted, work.weight_residual_bytes + 2 * params),
        backward_s=device.launch_s
        + device.time_s(input_grad + work.weighted, 2 * moved + 3 * params),
        param_bytes=params,
        state_bytes=params * (2 + device.optimizer_slots),
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
    return LayerOperations(
        weighted=weighted,
        other=contractions - weighted,
        light=total - contractions,
        repeated=sum(operations(eqn) for eqn in eqns if eqn.primitive.name in REMAT_NAMES),
        moved_bytes=_bytes(
            v for eqn in heavy for v in _activations((*eqn.invars, *eqn.outvars), depends)
        ),
        param_bytes=sum(compat.num_bytes(normal.unit_avals[u]) for u in units),
        residual_bytes=_bytes(residuals),
        weight_residual_bytes=_bytes(
            v for eqn in inputs for v in (*_activations(eqn.invars, depends), *eqn.outvars)
        ),
    )


def _weighted(eqn: JaxprEqn, depends: Classes) -> float:
    """The operations of contractions with weights in an equation, at any depth."""
    if not any(classify.of(depends, x) == Depends.PARAM for x in eqn.invars):
        return 0.0
    bodies = list(sub_jaxprs(eqn))
    if not bodies:
        return operations(eqn)
    found = [0.0]
    for body in bodies:  # the last operands are the body's (a cond's first is the branch)
        outer = eqn.invars[len(eqn.invars) - len(body.invars) :]
        classes = classify.classify(
            body.eqns, {v: classify.of(depends, x) for v, x in zip(body.invars, outer)}
        )
        found.append(sum(_weighted(inner, classes) for inner in body.eqns if is_heavy(inner)))
    return max(found) * eqn.params.get("length", 1)


def _residuals(eqns: Sequence[JaxprEqn], depends: Classes) -> list[Var]:
    """The activations that a backward reads: operands of products, results of functions.

    A checkpointed or looping equation keeps its operands.
    """
    found: dict[Var, None] = {}
    for eqn in eqns:
        name = eqn.primitive.name
        if is_heavy(eqn) or name in _PRODUCTS:
            found.update((v, None) for v in _activations(eqn.invars, depends))
        elif name in _FUNCTIONS:
            found.update((v, None) for v in eqn.outvars)
    return list(found)


_PRODUCTS = frozenset({"mul", "div", "custom_jvp_call", "custom_vjp_call", "integer_pow", "pow"})
_FUNCTIONS = frozenset({"tanh", "exp", "logistic", "sqrt", "rsqrt", "max", "min", "sin", "cos"})


def _activations(atoms: Sequence[compat.Atom], depends: Classes) -> list[Var]:
    return [v for v in atoms if isinstance(v, Var) and classify.of(depends, v).is_activation]


def _bytes(values: Iterable[Var]) -> int:
    return sum(compat.num_bytes(v.aval) for v in dict.fromkeys(values))
