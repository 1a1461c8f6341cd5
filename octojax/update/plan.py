"""What an optimizer update is once it is spread over ranks: plain data, one jaxpr per program.

    phase 0 on every rank --exchange of small values--> phase 1 on every rank --> ...

A program reads `End`s of its own rank and the vectors of bytes that an exchange brought.
"""

import enum
from dataclasses import dataclass
from typing import Any

from jax.extend.core import ClosedJaxpr


class Role(enum.StrEnum):
    """What a value at the end of an update program is; `index` counts within the role."""

    PARAM = "param"  # index: flat leaf of the parameters
    GRAD = "grad"  # index: the same leaf
    STATE = "state"  # index: flat leaf of the whole optimizer state
    EXTRA = "extra"  # index: flat leaf of the extra arguments, the same on every rank
    SAVED = "saved"  # index: number of a value that an earlier phase of this rank wrote
    GATHERED = "gathered"  # index: phase * num_ranks + source rank; bytes, see `Exchange`
    NEW_PARAM = "new_param"
    NEW_STATE = "new_state"
    PACKED = "packed"  # index: phase; bytes for the exchange after it
    SCALAR = "scalar"  # index into `UpdatePlan.scalars`


@dataclass(frozen=True, slots=True, order=True)
class End:
    role: Role
    index: int

    def __str__(self) -> str:
        return f"{self.role.value}{self.index}"


@dataclass(frozen=True)
class UpdateProgram:
    """One rank's work in one phase: a jaxpr whose inputs are `reads` and outputs `writes`."""

    rank: int
    phase: int
    jaxpr: ClosedJaxpr
    reads: tuple[End, ...]
    writes: tuple[End, ...]


@dataclass(frozen=True)
class Entry:
    """Where a value lies in the byte vector of its rank."""

    value: int
    rank: int
    offset: int
    nbytes: int


@dataclass(frozen=True)
class Exchange:
    """After a phase every rank offers `uint8[width]`; `needs[r]` are the ranks r reads from."""

    width: int
    entries: tuple[Entry, ...]
    needs: tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Phase:
    """`programs[r]` is None where rank r has nothing to do; `exchange` follows it, if any."""

    programs: tuple[UpdateProgram | None, ...]
    exchange: Exchange | None


@dataclass(frozen=True)
class Distributed:
    """A function of leaves on several ranks, as phases. Parameters and state may be given
    away (donated) in `final_phase`, which writes the new ones."""

    phases: tuple[Phase, ...]
    final_phase: int


@dataclass(frozen=True)
class UpdatePlan:
    """`optimizer.init` and `optimizer.update`, spread over the ranks that own the leaves.

    `state_owners[k]` is None for a state leaf that every rank keeps its own copy of. Ranks
    hold state leaf k where `k in state_leaves(rank)`.
    """

    num_ranks: int
    owners: tuple[int, ...]
    param_names: tuple[str, ...]
    param_avals: tuple[Any, ...]
    grad_avals: tuple[Any, ...]
    params_tree: Any
    state_names: tuple[str, ...]
    state_avals: tuple[Any, ...]
    state_owners: tuple[int | None, ...]
    state_tree: Any
    scalars: tuple[str, ...]
    extra_tree: Any
    init: Distributed
    update: Distributed

    def param_leaves(self, rank: int) -> tuple[int, ...]:
        """Returns the flat parameter leaves that `rank` owns."""
        return tuple(i for i, owner in enumerate(self.owners) if owner == rank)

    def state_leaves(self, rank: int) -> tuple[int, ...]:
        """Returns the flat state leaves that `rank` holds, its own and the replicated ones."""
        return tuple(k for k, owner in enumerate(self.state_owners) if owner in (None, rank))

    def __str__(self) -> str:
        rows = [
            f"update of {len(self.owners)} leaves on {self.num_ranks} ranks, "
            f"{len(self.state_owners)} state leaves "
            f"({sum(o is None for o in self.state_owners)} on every rank)"
        ]
        for k, phase in enumerate(self.update.phases):
            sizes = [0 if p is None else len(p.jaxpr.jaxpr.eqns) for p in phase.programs]
            sent = 0 if phase.exchange is None else len(phase.exchange.entries)
            rows.append(f"phase {k}: operations per rank {sizes}, then {sent} values exchanged")
        return "\n".join(rows)
