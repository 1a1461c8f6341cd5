"""What a loss does with each leaf of mutable module state."""

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from jax.extend.core import ClosedJaxpr, Var

from octojax import compat
from octojax.jaxprs.dataflow import eqns_for, free_vars
from octojax.layers.classify import is_read_only
from octojax.layers.normalize import NormalLoss
from octojax.stages.program import Ref, Role
from octojax.trace import TracedLoss


class StateKind(enum.StrEnum):
    READ_ONLY = "read-only"  # never changes; read as a PARAM unit without gradient
    COUNTER = "counter"  # new value from state alone; known for every microbatch beforehand
    CARRIED = "carried"  # written by one stage in microbatch order (running statistics)


@dataclass(frozen=True)
class StateLeaf:
    """A leaf of module state, or row `row` of one: what STATE `index` reads.

    `stage` is the stage that writes it, for CARRIED ones.
    """

    index: int
    name: str
    aval: Any
    kind: StateKind
    stage: int | None
    leaf: int
    row: int | None = None

    def value(self, leaves: Sequence[Any]) -> Any:
        """Its value, from the leaves of the state."""
        return leaves[self.leaf] if self.row is None else leaves[self.leaf][self.row]


@dataclass(frozen=True)
class Counters:
    """How counters advance by one microbatch: `jaxpr(reads) -> new values of leaves`.

    `reads` are STATE leaves of counters, and PARAM units of state or constants.
    """

    leaves: tuple[int, ...]
    reads: tuple[Ref, ...]
    jaxpr: ClosedJaxpr


def state_kinds(traced: TracedLoss, normal: NormalLoss) -> tuple[StateKind, ...]:
    """Returns the kind of every state unit of the loss.

    A leaf is a counter if its new value comes from read-only state, constants and counters.
    """
    sources = [_sources(traced, normal, leaf) for leaf in range(len(normal.state))]
    fixed = {leaf for leaf, refs in enumerate(sources) if refs is None}
    counters = set(range(len(sources))) - fixed
    while True:
        still = {leaf for leaf in counters if _advances(traced, normal, sources[leaf], counters)}
        if still == counters:
            break
        counters = still
    return tuple(
        StateKind.READ_ONLY
        if leaf in fixed
        else StateKind.COUNTER
        if leaf in counters
        else StateKind.CARRIED
        for leaf in range(len(sources))
    )


def counters(traced: TracedLoss, normal: NormalLoss, kinds: tuple[StateKind, ...]) -> Counters:
    """Returns the program that advances all counters by one microbatch."""
    leaves = tuple(leaf for leaf, kind in enumerate(kinds) if kind is StateKind.COUNTER)
    outvars = [new_value(traced, normal, leaf) for leaf in leaves]
    eqns = eqns_for(normal.flat.eqns, outvars)
    invars = free_vars(eqns, outvars)
    reads = tuple(normal.inputs[var] for var in invars)
    return Counters(leaves, reads, compat.new_jaxpr(invars, outvars, eqns))


def new_value(traced: TracedLoss, normal: NormalLoss, leaf: int) -> compat.Atom:
    """Returns the value of a state unit after the microbatch."""
    return normal.flat.outvars[traced.num_emits + leaf]


def _sources(traced: TracedLoss, normal: NormalLoss, leaf: int) -> list[Ref] | None:
    """Returns the inputs that a unit's new value comes from; None if it stays as it is."""
    if is_read_only(traced, normal.state[leaf].leaf):
        return None
    value = new_value(traced, normal, leaf)
    targets = [value] if isinstance(value, Var) else []
    return [normal.inputs[var] for var in normal.recomputed(targets, ())[1]]


def _advances(
    traced: TracedLoss, normal: NormalLoss, sources: list[Ref] | None, counters: set[int]
) -> bool:
    num_params = len(traced.params)
    return all(
        ref.index in counters
        if ref.role is Role.STATE
        else ref.role is Role.PARAM and normal.units[ref.index].leaf >= num_params
        for ref in sources or ()
    )
