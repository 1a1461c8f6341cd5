"""What a rank does in one step, precomputed: a lowered plan's rows over integer slots.

    rank 0   run 0F0   send 0SEND_F0   run 0F1 ...   post 0RECV_B0 ...   receive 0RECV_B0   run 0B0

The inner loop (`octojax.executor.run`) reads slots, calls, writes slots, clears slots. It
plans nothing. Before the first operation the slots hold, in this order, what `RankProgram`
lists: parameters, constants, module state, batch rows, zeroed gradient sums.
"""

import enum
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from octojax.executor.values import Value
from octojax.ir import Instruction, Receive, Transfer
from octojax.programs.recipe import Recipe


class Do(enum.StrEnum):
    RUN = "run"  # target: number of the recipe
    SEND = "send"  # target: number of the transfer
    POST = "post"  # the values may come from here on; nobody waits for them yet
    RECEIVE = "receive"  # waits for them


@dataclass(frozen=True, slots=True)
class Operation:
    """One call. `frees` are slots that nobody reads afterwards.

    `of` is the instruction of the lowered plan that it carries out. `tail`: an operation before it
    has begun that instruction: it waits for what was posted, or runs a further program.
    """

    do: Do
    target: int
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    frees: tuple[int, ...]
    of: Instruction
    tail: bool = False

    @property
    def name(self) -> str:
        """As errors show it: the unit, or the transfer by its sender."""
        return self.of.transfer.name if isinstance(self.of, Receive) else str(self.of)

    def __str__(self) -> str:
        return f"{self.do.value} {self.of}"


@dataclass(frozen=True)
class RankProgram:
    """One rank's whole step. Slots are numbered in the order of the first five fields."""

    rank: int
    params: tuple[int, ...]  # parameter units held
    constants: tuple[Value, ...]  # SEED values, and gradients that nobody makes: zero
    state: tuple[Value, ...]  # module state as microbatch 0 finds it
    batch: tuple[Value, ...]
    totals: tuple[int, ...]  # parameter units whose gradients are summed here
    body: tuple[Operation, ...]
    num_slots: int
    results: tuple[tuple[Value, int], ...]  # EMIT and final STATE values, and their slots
    extra_totals: tuple[tuple[int, int], ...]  # (unit, slot): sums that came from other holders

    before: ClassVar[str] = "the preparation of its batch"
    after: ClassVar[str] = "its last program, which sums up"

    @property
    def row(self) -> tuple[Instruction, ...]:
        """The instructions of the lowered plan that the body carries out, in their order."""
        return tuple(operation.of for operation in self.body if not operation.tail)

    @property
    def first_total(self) -> int:
        return len(self.params) + len(self.constants) + len(self.state) + len(self.batch)


@dataclass(frozen=True)
class StepProgram:
    """A whole step: every rank's operations, the recipes and transfers they name.

    `values[k]` are what transfer k carries. `order` lists the transfers in an order that every
    process keeps, of which the order on every rank is a part.
    """

    ranks: tuple[RankProgram, ...]
    recipes: tuple[tuple[int, Recipe], ...]  # (rank, recipe)
    names: tuple[str, ...]  # one per recipe: the first item that runs it
    transfers: tuple[Transfer, ...]
    values: tuple[tuple[Value, ...], ...]
    order: tuple[int, ...]
    owners: tuple[int, ...]  # per parameter unit: the rank that updates it, -1: unused
    holders: tuple[tuple[int, ...], ...]  # per parameter unit: every rank that reads it

    def order_of(self, kinds: str) -> tuple[int, ...]:
        """Returns the transfers of these kinds in the common order."""
        return tuple(k for k in self.order if self.transfers[k].kind in kinds)

    def __str__(self) -> str:
        return "\n".join(f"rank {r.rank}: " + ", ".join(str(i) for i in r.body) for r in self.ranks)


def with_frees(
    body: Sequence[Operation], outputs: set[int], num_permanent: int
) -> tuple[Operation, ...]:
    """Returns `body` with each slot freed by the last operation that touches it.

    Parameters and constants stay referenced elsewhere, so clearing them would free nothing.
    """
    settled = set(outputs) | set(range(num_permanent))
    result = []
    for operation in reversed(body):
        touched = dict.fromkeys((*operation.reads, *operation.writes))
        frees = tuple(s for s in touched if s not in settled)
        settled |= set(frees)
        result.append(replace(operation, frees=frees))
    return tuple(reversed(result))
