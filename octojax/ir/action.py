"""One unit of work on one rank, written as PyTorch's pipelining CSV writes it: `3F7`."""

import enum
import re
from dataclasses import dataclass

from octojax.errors import FormatError


class Kind(enum.StrEnum):
    """What an action does. The first five compute; the rest appear only in lowered tables."""

    FORWARD = "F"
    BACKWARD = "B"  # both gradients at once
    INPUT_GRAD = "I"  # what the previous stage waits for
    WEIGHT_GRAD = "W"  # what nobody waits for, so it may fill bubbles
    RECOMPUTE = "R"  # rebuild the residuals of F from its inputs, ahead of I or B
    SEND_FORWARD = "SEND_F"  # 3SEND_F2: stage 3 sends its output of microbatch 2 to stage 4
    RECV_FORWARD = "RECV_F"  # 4RECV_F2 is the matching receive
    SEND_BACKWARD = "SEND_B"
    RECV_BACKWARD = "RECV_B"
    UNSHARD = "UNSHARD"  # PyTorch's FSDP actions carry no microbatch
    RESHARD = "RESHARD"
    REDUCE_GRAD = "REDUCE_GRAD"

    @property
    def computes(self) -> bool:
        return self in _COMPUTE

    @property
    def transfers(self) -> bool:
        return self in _TRANSFER


_COMPUTE = frozenset(
    {Kind.FORWARD, Kind.BACKWARD, Kind.INPUT_GRAD, Kind.WEIGHT_GRAD, Kind.RECOMPUTE}
)
_TRANSFER = frozenset(
    {Kind.SEND_FORWARD, Kind.RECV_FORWARD, Kind.SEND_BACKWARD, Kind.RECV_BACKWARD}
)
_WITHOUT_MICROBATCH = frozenset({Kind.UNSHARD, Kind.RESHARD, Kind.REDUCE_GRAD})


@dataclass(frozen=True, slots=True, order=True)
class Action:
    """One unit of work. `3F7` is stage 3, forward, microbatch 7 (-1: has none, `3UNSHARD`)."""

    stage: int
    kind: Kind
    microbatch: int = -1

    def __str__(self) -> str:
        suffix = "" if self.kind in _WITHOUT_MICROBATCH else str(self.microbatch)
        return f"{self.stage}{self.kind.value}{suffix}"


@dataclass(frozen=True, slots=True, order=True)
class Overlap:
    """A forward and a full backward run as one unit: `(0F3;3B5)OVERLAP_F_B` (DualPipe).

    It starts when both are ready, costs the sum of both, and has no dependence inside.
    """

    forward: Action
    backward: Action

    def __str__(self) -> str:
        return f"({self.forward};{self.backward})OVERLAP_F_B"

    @property
    def actions(self) -> tuple[Action, Action]:
        return (self.forward, self.backward)


Item = Action | Overlap
"""What stands in one cell of a schedule table."""

# Longest names first, so that `SEND_F` is not read as `S` + rest.
_KINDS = "|".join(sorted((k.value for k in Kind), key=len, reverse=True))
_ACTION = re.compile(rf"([0-9]{{1,18}})({_KINDS})([0-9]{{0,18}})")
_OVERLAP = re.compile(r"\(([^;()]+);([^;()]+)\)OVERLAP_F_B")


def parse_action(text: str) -> Action:
    """Returns the action that `text` names. Raises `FormatError` on anything else."""
    match = _ACTION.fullmatch(text.strip())
    if match is None:
        raise FormatError(
            f"cannot read {text.strip()!r} as an action: expected <stage><kind><microbatch> "
            f"such as 3F7, 3B7, 3I7, 3W7 or 3SEND_F7"
        )
    stage, kind, microbatch = match.groups()
    if (Kind(kind) in _WITHOUT_MICROBATCH) != (microbatch == ""):
        expected = "no microbatch" if microbatch else "a microbatch number"
        raise FormatError(f"cannot read {text.strip()!r}: {kind} takes {expected}")
    return Action(int(stage), Kind(kind), int(microbatch) if microbatch else -1)


def parse_item(text: str) -> Item:
    """Returns the action or overlapped pair that one cell of a table holds."""
    match = _OVERLAP.fullmatch(text.strip())
    if match is None:
        return parse_action(text)
    forward, backward = (parse_action(part) for part in match.groups())
    if forward.kind is not Kind.FORWARD or backward.kind is not Kind.BACKWARD:
        raise FormatError(
            f"cannot read {text.strip()!r}: an overlapped pair is (forward;full backward), "
            f"such as (0F3;3B5)OVERLAP_F_B"
        )
    return Overlap(forward, backward)
