"""What happened, or would happen, when: the one record for simulated and measured runs."""

import enum
from collections import defaultdict
from dataclasses import dataclass
from typing import Any

from octojax.ir.action import Item
from octojax.ir.shown import count, duration, line, picture


@dataclass(frozen=True, slots=True)
class ActionSpan:
    """One item of one rank's row, with its start and end in seconds from the step's start."""

    rank: int
    item: Item
    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True)
class TransferSpan:
    """One value sent from rank to rank: the output `F` of a stage, or the gradient `B` for it.

    `stage` is the sending stage. `overlap_s` is how long both ranks computed meanwhile,
    `sender_overlap_s` how long the sender did, whatever the receiver was doing. The link is free
    for the next value `latency_s` before this one arrives.
    """

    source: int
    target: int
    stage: int
    kind: str
    microbatch: int
    start_s: float
    end_s: float
    nbytes: float = 0.0
    overlap_s: float = 0.0
    sender_overlap_s: float = 0.0
    latency_s: float = 0.0

    @property
    def name(self) -> str:
        return f"{self.stage}SEND_{self.kind}{self.microbatch}"


class Cause(enum.StrEnum):
    """What an idle rank waits for."""

    COMPUTATION = "computation"  # of another rank, which has not made the value yet
    TRANSFER = "transfer"  # the value is made and has not arrived, or the other side has not come
    HOST = "host"  # nothing: the value is there, and the host has not launched the action yet


@dataclass(frozen=True, slots=True)
class Gap:
    """An idle time of a rank, and what it waited for.

    `on` names the action (`2F3`) or transfer (`2SEND_F3`) that it waited for, and `peer` the
    rank that computes or sends it; `before` is the item that ran afterwards ("": the rank had no
    more to do). `boundary`: before the rank's first item, or after its last.
    """

    rank: int
    start_s: float
    end_s: float
    cause: Cause
    on: str
    peer: int
    before: str
    boundary: bool


@dataclass(frozen=True, slots=True)
class RankSummary:
    """One rank's account. `busy_s + bubble_s` is the makespan. `before_s` and `after_s` of the
    busy time are what the data axis and the update take before its first action and after its last.

    Boundary bubbles lie before the first and after the last action, residual ones between:
    `residual_bubble_s` is `computation_wait_s`, for another rank to compute, and
    `transfer_wait_s`, for a transfer (and in a measured step some time of the host).
    `peak_microbatches` counts live (stage, microbatch) activations from F's start, freed when
    the input gradient (I or B) is done, `peak_microbatches_until_weight` when W or B is.
    """

    busy_s: float
    bubble_s: float
    boundary_bubble_s: float
    residual_bubble_s: float
    peak_microbatches: int
    peak_bytes: float
    peak_microbatches_until_weight: int = 0
    computation_wait_s: float = 0.0
    transfer_wait_s: float = 0.0
    before_s: float = 0.0
    after_s: float = 0.0


@dataclass(frozen=True)
class Timeline:
    """A step as it was simulated or measured, on one clock that starts at zero."""

    makespan_s: float
    actions: tuple[ActionSpan, ...]
    transfers: tuple[TransferSpan, ...]
    ranks: tuple[RankSummary, ...]
    memory: tuple[tuple[tuple[float, float], ...], ...] = ()
    """Per rank, `(time_s, bytes)` after each change; empty where it was not traced."""
    gaps: tuple[Gap, ...] = ()
    """Every idle time of every rank, by what it waited for."""
    unit: str = "s"
    """What the times are in: seconds, or "units" where costs are only relative (F = I = W = 1)."""

    def __repr__(self) -> str:
        whole = self.makespan_s
        return line("Timeline", "", (
            count(len(self.ranks), "rank"),
            duration(whole) if self.unit == "s" else f"{whole:.4g} {self.unit}",
            f"bubbles {self.bubble_ratio:.1%}",
            count(len(self.actions), "action"),
            count(len(self.transfers), "transfer"),
        ))  # fmt: skip

    def _repr_html_(self) -> str | None:
        return picture(self)

    @property
    def overlapped(self) -> int:
        """Transfers hidden behind computation of both their ranks, at least in part."""
        return sum(t.overlap_s > 0 for t in self.transfers)

    @property
    def sender_overlapped(self) -> int:
        """Transfers whose sender goes on computing: "can overlap with subsequent computation"
        (the paper's section V), and so the nearest to the #Overlap of its TABLE III.
        """
        return sum(t.sender_overlap_s > 0 for t in self.transfers)

    @property
    def bubble_ratio(self) -> float:
        """Idle share of all ranks' time."""
        total = self.makespan_s * len(self.ranks)
        return sum(r.bubble_s for r in self.ranks) / total if total else 0.0

    @property
    def stalls_s(self) -> dict[tuple[int, str], float]:
        """How long each rank waited for each transfer between its actions, the longest first."""
        seconds: dict[tuple[int, str], float] = defaultdict(float)
        for gap in self.gaps:
            if gap.cause is Cause.TRANSFER and not gap.boundary:
                seconds[gap.rank, gap.on] += gap.end_s - gap.start_s
        return dict(sorted(seconds.items(), key=lambda stall: -stall[1]))

    def to_json(self) -> dict[str, Any]:
        """The shape `octopipe simulate --json` prints."""
        fields = RankSummary.__dataclass_fields__
        return {
            "makespan_s": self.makespan_s,
            "ranks": [{k: getattr(r, k) for k in fields} for r in self.ranks],
            "transfers": {
                "count": len(self.transfers),
                "overlapped": self.overlapped,
                "overlap_s": sum(t.overlap_s for t in self.transfers),
                "sender_overlapped": self.sender_overlapped,
                "stalls": [
                    {"rank": rank, "transfer": name, "stall_s": seconds}
                    for (rank, name), seconds in self.stalls_s.items()
                ],
            },
        }
