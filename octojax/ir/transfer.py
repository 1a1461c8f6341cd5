"""One message between two ranks, and how tables write its two sides."""

import enum
import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from octojax.errors import FormatError
from octojax.ir.action import Action, Kind


class Cargo(enum.StrEnum):
    """What a transfer carries."""

    OUTPUT = "F"  # the output of a stage, for the stage after it
    GRADIENT = "B"  # the gradient of a stage's input, for the stage before it
    SUMS = "G"  # sums of gradients, for the rank that owns the parameters
    RESULTS = "E"  # results of the loss, for the rank that joins them
    UPDATE = "U"  # what a phase of the optimizer's update hands to the next, on another rank
    PARAMETERS = "P"  # updated parameters, for a rank that keeps a copy

    @property
    def crosses_stages(self) -> bool:
        """Whether PyTorch's tables have it: it belongs to a stage and a microbatch."""
        return self in (Cargo.OUTPUT, Cargo.GRADIENT)


_SENDS = (Kind.SEND_FORWARD, Kind.SEND_BACKWARD)


@dataclass(frozen=True, slots=True, order=True)
class Transfer:
    """Values that go from one rank to another together, in one message.

    `stage` is the sending stage of an output or gradient; the other cargoes have neither stage
    nor microbatch (-1), but `parts`: the numbers of the parameters or results they carry, or that
    of the phase of an update.
    """

    source: int
    target: int
    kind: Cargo
    stage: int = -1
    microbatch: int = -1
    parts: tuple[int, ...] = ()

    @property
    def send(self) -> Action:
        """`3SEND_F2` for the output of stage 3."""
        return Action(self.stage, Kind(f"SEND_{self.kind}"), self.microbatch)

    @property
    def receive(self) -> Action:
        """`4RECV_F2` for the output of stage 3: it names the receiving stage."""
        step = 1 if self.kind is Cargo.OUTPUT else -1
        return Action(self.stage + step, Kind(f"RECV_{self.kind}"), self.microbatch)

    @property
    def value(self) -> tuple[str, int, int]:
        """The value that an output or gradient is; see `octojax.ir.lowering.Value`."""
        return (self.kind, self.stage, self.microbatch)

    @property
    def name(self) -> str:
        """What errors and timelines call it: its sending side, without numbers of parameters."""
        if self.kind.crosses_stages:
            return str(self.send)
        if self.kind is Cargo.UPDATE:
            return str(self)
        return f"SEND_{self.kind}({self.source}->{self.target})"

    def __str__(self) -> str:
        return self.cell(sends=True)

    def cell(self, sends: bool) -> str:
        """Returns the text of one side: `3SEND_F2`, `4RECV_F2`, `SEND_G(3->0;0-4;7)`."""
        if self.kind.crosses_stages:
            return str(self.send if sends else self.receive)
        side = "SEND" if sends else "RECV"
        parts = "".join(f";{text}" for text in _ranges(self.parts))
        return f"{side}_{self.kind}({self.source}->{self.target}{parts})"


def counterpart(action: Action) -> Action:
    """Returns the receive of a send, or the send of a receive."""
    forward = action.kind in (Kind.SEND_FORWARD, Kind.RECV_FORWARD)
    sends = action.kind in _SENDS
    step = 1 if forward == sends else -1
    kind = Kind(("RECV_" if sends else "SEND_") + ("F" if forward else "B"))
    return Action(action.stage + step, kind, action.microbatch)


def sends(action: Action) -> bool:
    """Whether a transferring action is the sending side."""
    return action.kind in _SENDS


_BETWEEN = re.compile(r"(SEND|RECV)_([GEUP])\(([0-9]{1,9})->([0-9]{1,9})((?:;[0-9-]+)*)\)")


def parse_exchange(text: str) -> tuple[bool, Transfer] | None:
    """Returns whether `text` is the sending side, and its transfer; None if it is no transfer
    of sums, results, parameters or an update. Raises `FormatError` for ranges that are none."""
    match = _BETWEEN.fullmatch(text)
    if match is None:
        return None
    side, kind, source, target, parts = match.groups()
    numbers: list[int] = []
    for word in parts.split(";")[1:]:
        first, dash, last = word.partition("-")
        if not first.isdigit() or (dash and not last.isdigit()) or len(word) > 19:
            raise FormatError(f"cannot read {text!r}: {word!r} is no number or range such as 0-4")
        numbers += range(int(first), int(last or first) + 1)
    return side == "SEND", Transfer(int(source), int(target), Cargo(kind), parts=tuple(numbers))


def _ranges(numbers: Sequence[int]) -> list[str]:
    """Returns ascending numbers as text, runs of them as `first-last`."""
    starts = [*numbers[:1], *(b for a, b in pairwise(numbers) if b != a + 1)]
    ends = [*(a for a, b in pairwise(numbers) if b != a + 1), *numbers[-1:]]
    return [f"{a}" if a == b else f"{a}-{b}" for a, b in zip(starts, ends, strict=True)]
