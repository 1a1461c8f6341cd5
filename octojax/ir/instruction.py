"""What a rank does next: the kinds of instruction of a lowered plan."""

from dataclasses import dataclass
from typing import ClassVar

from octojax.ir.action import Action, Item, Kind, Overlap
from octojax.ir.transfer import Transfer


@dataclass(frozen=True, slots=True)
class Run:
    """Actions that run as one unit: one, an overlapped pair, or several joined in one program.

    Joined actions follow each other and wait for nothing in between. An action of PyTorch's
    FSDP (`0UNSHARD`) does nothing here.
    """

    actions: tuple[Action, ...]

    @property
    def pair(self) -> bool:
        """Whether this is a forward beside the backward of another microbatch or stage."""
        if len(self.actions) != 2:
            return False
        first, second = self.actions
        cells = [(a.stage, a.microbatch) for a in self.actions]
        kinds = (first.kind, second.kind)
        return kinds == (Kind.FORWARD, Kind.BACKWARD) and cells[0] != cells[1]

    @property
    def items(self) -> tuple[Item, ...]:
        """The actions as cells of a schedule: a pair is one."""
        return (Overlap(*self.actions),) if self.pair else self.actions

    @property
    def cell(self) -> Item | str:
        return self.items[0] if len(self.items) == 1 else str(self)

    def __str__(self) -> str:
        return "+".join(map(str, self.items))


@dataclass(frozen=True, slots=True)
class _Side:
    """One side of a transfer."""

    transfer: Transfer
    sends: ClassVar[bool]

    @property
    def cell(self) -> Item | str:
        """The action of a schedule that this is, or its text if schedules have none."""
        if not self.transfer.kind.crosses_stages:
            return str(self)
        return self.transfer.send if self.sends else self.transfer.receive

    def __str__(self) -> str:
        return self.transfer.cell(self.sends)


@dataclass(frozen=True, slots=True)
class Send(_Side):
    """The sending side of a transfer: the values leave from here on; the rank does not wait."""

    sends: ClassVar[bool] = True


@dataclass(frozen=True, slots=True)
class Receive(_Side):
    """The receiving side: the values may come from here on; who reads them waits for them."""

    sends: ClassVar[bool] = False


@dataclass(frozen=True, slots=True)
class Update:
    """A rank's part of one phase of the optimizer's update; phases exchange values (`U`)."""

    phase: int

    @property
    def cell(self) -> Item | str:
        return str(self)

    def __str__(self) -> str:
        return f"UPDATE{self.phase}"


Instruction = Run | Send | Receive | Update
Rows = tuple[tuple[Instruction, ...], ...]
