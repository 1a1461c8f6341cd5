"""What a rank does in one step, precomputed: plain data over integer slots.

    rank 0   run 0F0   send 0SEND_F0   run 0F1 ...   receive 1SEND_B0   run 0B0 ...

The inner loop (`octojax.executor.run`) reads slots, calls, writes slots, clears slots. It
plans nothing. Before the first instruction the slots hold, in this order, what `RankProgram`
lists: parameters, constants, module state, batch rows, zeroed gradient sums.
"""

import enum
from dataclasses import dataclass

from octojax.executor.values import Value
from octojax.programs.recipe import Recipe


class Do(enum.StrEnum):
    RUN = "run"  # target: number of the recipe
    SEND = "send"  # target: number of the transfer
    RECEIVE = "receive"


@dataclass(frozen=True, slots=True)
class Instruction:
    """One call. `frees` are slots that nobody reads afterwards.

    `name` is the item of the schedule, or the transfer, as errors and timelines show it.
    """

    do: Do
    target: int
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    frees: tuple[int, ...]
    name: str

    def __str__(self) -> str:
        return f"{self.do.value} {self.name}"


@dataclass(frozen=True, slots=True)
class Transfer:
    """Values that go from one rank to another together, in one message.

    `kind` is `F` (outputs of `stage`), `B` (gradients of the outputs of `stage - 1`),
    `G` (gradient sums, on their way to the parameter's owner), `E` (results of the loss, to
    the rank that joins them) or `P` (new parameters, to all who hold a copy).
    The first two are named as PyTorch's tables name them: stage s sends its result.
    """

    source: int
    target: int
    kind: str
    stage: int
    microbatch: int
    values: tuple[Value, ...]

    @property
    def name(self) -> str:
        if self.kind in "FB":
            return f"{self.stage}SEND_{self.kind}{self.microbatch}"
        return f"SEND_{self.kind}({self.source}->{self.target})"


@dataclass(frozen=True)
class RankProgram:
    """One rank's whole step. Slots are numbered in the order of the first five fields."""

    rank: int
    params: tuple[int, ...]  # parameter units held
    constants: tuple[Value, ...]  # SEED values, and gradients that nobody makes: zero
    state: tuple[Value, ...]  # module state as microbatch 0 finds it
    batch: tuple[Value, ...]
    totals: tuple[int, ...]  # parameter units whose gradients are summed here
    body: tuple[Instruction, ...]
    num_slots: int
    results: tuple[tuple[Value, int], ...]  # EMIT and final STATE values, and their slots
    extra_totals: tuple[tuple[int, int], ...]  # (unit, slot): sums that came from other holders

    @property
    def first_total(self) -> int:
        return len(self.params) + len(self.constants) + len(self.state) + len(self.batch)


@dataclass(frozen=True)
class StepProgram:
    """A whole step: every rank's instructions, the recipes and transfers they name.

    `order` lists the transfers in an order that every process keeps: each transfer comes
    after everything that its source must do, or receive, before it.
    """

    ranks: tuple[RankProgram, ...]
    recipes: tuple[tuple[int, Recipe], ...]  # (rank, recipe)
    names: tuple[str, ...]  # one per recipe: the first item that runs it
    transfers: tuple[Transfer, ...]
    order: tuple[int, ...]
    owners: tuple[int, ...]  # per parameter unit: the rank that updates it, -1: unused
    holders: tuple[tuple[int, ...], ...]  # per parameter unit: every rank that reads it

    def order_of(self, kinds: str) -> tuple[int, ...]:
        """Returns the transfers of these kinds in the common order."""
        return tuple(k for k in self.order if self.transfers[k].kind in kinds)

    def __str__(self) -> str:
        return "\n".join(f"rank {r.rank}: " + ", ".join(str(i) for i in r.body) for r in self.ranks)
