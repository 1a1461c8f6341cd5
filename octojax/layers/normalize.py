"""A traced loss in the form that is cut: calls opened, stacks of layers apart, inputs named."""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from jax.extend.core import Var

from octojax import compat
from octojax.jaxprs.flat import FlatJaxpr, without_dead
from octojax.jaxprs.fold import fold_integers
from octojax.jaxprs.rows import push_rows
from octojax.jaxprs.stacks import split_carried, split_stacks
from octojax.layers import classify
from octojax.layers.classify import Depends
from octojax.layers.open import Remat, open_layers
from octojax.layers.paths import common_path
from octojax.stages.program import ParamUnit, Ref, Role
from octojax.trace import TracedLoss


@dataclass(frozen=True)
class StateUnit:
    """A leaf of state, or one slice of a leaf stacked over layers that each write their own."""

    leaf: int
    index: int | None
    name: str
    aval: Any


@dataclass(frozen=True)
class NormalLoss:
    """Equations whose free variables are `inputs`: parameter units, state, batch leaves.

    `units` cover every leaf of params, then of state, then the constants of the trace
    (`ParamUnit.leaf` counts through all three), each leaf whole or in slices. Mutable state
    leaves are no units; they are read as STATE, whole or in slices too: `state` covers every
    leaf of state. Outputs are the emits, then the new value of each of `state`.
    """

    flat: FlatJaxpr
    inputs: Mapping[Var, Ref]
    depends: Mapping[Var, Depends]  # of the inputs
    units: tuple[ParamUnit, ...]
    unit_avals: tuple[Any, ...]
    state: tuple[StateUnit, ...]

    @cached_property
    def makers(self) -> Mapping[Var, int]:
        """The equation that makes each value."""
        return {v: at for at, eqn in enumerate(self.flat.eqns) for v in eqn.outvars}

    def recomputed(
        self, targets: Iterable[Var], available: Collection[Var]
    ) -> tuple[set[int], list[Var]]:
        """Returns the equations and inputs that `targets` take, where `available` are at hand."""
        eqns: set[int] = set()
        sources: dict[Var, None] = {}
        stack = list(targets)
        while stack:
            var = stack.pop()
            if var in available:
                continue
            if var in self.inputs:
                sources[var] = None
                continue
            at = self.makers[var]
            if at not in eqns:
                eqns.add(at)
                stack += [x for x in self.flat.eqns[at].invars if isinstance(x, Var)]
        return eqns, list(sources)

    def units_behind(self, targets: Iterable[Var]) -> tuple[int, ...]:
        """Returns the parameter units that the targets are made of, ascending."""
        refs = (self.inputs[var] for var in self.recomputed(targets, ())[1])
        return tuple(sorted(ref.index for ref in refs if ref.role is Role.PARAM))


def normalize(traced: TracedLoss, remat: Remat = Remat.LARGE) -> NormalLoss:
    """Returns the loss with calls and stacks of layers open, dead equations gone, inputs named."""
    sources = classify.sources(traced, traced.flat)
    flat = open_layers(traced.flat, sources, remat)
    flat = without_dead(push_rows(fold_integers(without_dead(flat))))
    return _name_inputs(traced, flat, sources)


def _name_inputs(traced: TracedLoss, flat: FlatJaxpr, depends: Mapping[Var, Depends]) -> NormalLoss:
    """Returns the loss with a role for each of its inputs; constants become units of their own.

    A leaf of which each row is read on its own, and nothing else, becomes one unit per row.
    """
    flat, state, inputs = _name_state(traced, flat, depends)
    classes = dict.fromkeys(inputs, Depends.STATE) | dict(depends)
    num_params, num_state = len(traced.params), len(traced.state)
    state_end = num_params + num_state
    leaves: list[tuple[Var, int, str, bool]] = []
    for at, var in enumerate(flat.invars):
        if at < num_params:
            leaves.append((var, at, traced.params.names[at], compat.is_float(var.aval)))
        elif at >= state_end:
            inputs[var] = Ref(Role.BATCH, at - state_end)
        elif classify.is_read_only(traced, at - num_params):
            leaves.append((var, at, traced.state.names[at - num_params], False))
    for k, var in enumerate(flat.constvars):
        leaves.append((var, state_end + k, f"constant.{k}", False))
    flat, rows = split_stacks(flat, [var for var, *_ in leaves])
    prefixes = _stack_prefixes({name: len(rows[var]) for var, _, name, _ in leaves if var in rows})
    units: list[ParamUnit] = []
    avals: list[Any] = []
    for whole, leaf, name, trainable in leaves:
        for index, var in rows.get(whole, ((None, whole),)):
            inputs[var] = Ref(Role.PARAM, len(units))
            title = name if index is None else _row_name(name, prefixes[name], index)
            units.append(ParamUnit(leaf, index, title, trainable))
            avals.append(var.aval)
            classes[var] = depends.get(whole, Depends.NOTHING)
    return NormalLoss(flat, inputs, classes, tuple(units), tuple(avals), state)


def _name_state(
    traced: TracedLoss, flat: FlatJaxpr, depends: Mapping[Var, Depends]
) -> tuple[FlatJaxpr, tuple[StateUnit, ...], dict[Var, Ref]]:
    """Returns the loss with stacked state in slices, its state, and what reads the mutable part.

    Counters stay whole: every rank has them.
    """
    classes = classify.classify(flat.eqns, depends)
    variables = flat.invars[len(traced.params) :][: len(traced.state)]
    mutable = [leaf for leaf in range(len(traced.state)) if not classify.is_read_only(traced, leaf)]
    ends = {k: traced.num_emits + k for k in mutable}
    carried = [k for k in mutable if classify.of(classes, flat.outvars[ends[k]]) & ~Depends.STATE]
    flat, rows = split_carried(flat, [(variables[k], ends[k]) for k in carried])
    names = traced.state.names
    prefixes = _stack_prefixes(
        {names[k]: len(rows[variables[k]]) for k in mutable if variables[k] in rows}
    )
    units: list[StateUnit] = []
    inputs: dict[Var, Ref] = {}
    for leaf, whole in enumerate(variables):
        name = names[leaf]
        for index, var in rows.get(whole, ((None, whole),)):
            if leaf in mutable:
                inputs[var] = Ref(Role.STATE, len(units))
            title = name if index is None else _row_name(name, prefixes[name], index)
            units.append(StateUnit(leaf, index, title, var.aval))
    return flat, tuple(units), inputs


def _stack_prefixes(rows: Mapping[str, int]) -> dict[str, str]:
    """Returns, per stacked leaf, the path that it shares with the other stacks of as many rows."""
    return {
        name: common_path([x for x, n in rows.items() if n == count], whole=True)
        for name, count in rows.items()
    }


def _row_name(name: str, prefix: str, index: int) -> str:
    """Returns the path of one layer's slice: `layers.mlp.up` row 2 -> `layers.2.mlp.up`."""
    if not prefix:
        return f"{name}.{index}"
    return f"{prefix}.{index}{name[len(prefix) :]}"
