"""Where a step's time goes: an account that adds up, of the whole step and of every rank.

    makespan = work, evenly spread   + imbalance              (the busiest rank's work)
             + fill and drain        + waiting for computation
             + waiting for transfers (+ waiting for the host, in measured steps)

All of it is as the busiest rank has it: what the others idle beyond that is their lighter load.
"""

from dataclasses import dataclass

from octojax.ir import Cause, Gap, Timeline


@dataclass(frozen=True)
class RankAccount:
    """One rank's time: all fields but the last two add up to the makespan.

    `fill_s` lies before the rank's first action, `drain_s` after its last; the waits lie between.
    `imbalance_s` is how much less the rank works than the busiest (within the idle times).
    """

    rank: int
    busy_s: float
    fill_s: float
    drain_s: float
    computation_wait_s: float
    transfer_wait_s: float
    host_wait_s: float
    imbalance_s: float
    peak_bytes: float


@dataclass(frozen=True)
class StepPart:
    """One part of the makespan: its name, its length, and in words where it arises."""

    name: str
    seconds: float
    where: str


@dataclass(frozen=True)
class Wait:
    """How long a rank waited, between its actions, for one other rank or link.

    `on` is the action or transfer that it waited for longest, `peer` the rank that makes it.
    """

    rank: int
    peer: int
    cause: Cause
    seconds: float
    on: str


def rank_accounts(timeline: Timeline) -> tuple[RankAccount, ...]:
    """Returns the account of every rank of a timeline, simulated or measured."""
    most = max((r.busy_s for r in timeline.ranks), default=0.0)
    first = dict.fromkeys(range(len(timeline.ranks)), timeline.makespan_s)
    for span in timeline.actions:
        first[span.rank] = min(first[span.rank], span.start_s)
    accounts = []
    for rank, r in enumerate(timeline.ranks):
        fill = min(first[rank], r.boundary_bubble_s)
        waits = r.computation_wait_s, r.transfer_wait_s
        accounts.append(
            RankAccount(
                rank=rank,
                busy_s=r.busy_s,
                fill_s=fill,
                drain_s=r.boundary_bubble_s - fill,
                computation_wait_s=waits[0],
                transfer_wait_s=waits[1],
                host_wait_s=max(0.0, r.residual_bubble_s - sum(waits)),
                imbalance_s=most - r.busy_s,
                peak_bytes=r.peak_bytes,
            )
        )
    return tuple(accounts)


def busiest(accounts: tuple[RankAccount, ...]) -> RankAccount:
    """Returns the account of the rank that works longest, the first of several."""
    return max(accounts, key=lambda a: (a.busy_s, -a.rank))


def waits_of(timeline: Timeline, rank: int | None = None) -> tuple[Wait, ...]:
    """Returns the waits between actions by rank, peer and cause, the longest first."""
    by: dict[tuple[int, int, Cause], list[Gap]] = {}
    for gap in timeline.gaps:
        if not gap.boundary and rank in (None, gap.rank):
            by.setdefault((gap.rank, gap.peer, gap.cause), []).append(gap)
    waits = []
    for (waiting, peer, cause), gaps in by.items():
        longest = max(gaps, key=lambda g: g.end_s - g.start_s)
        total = sum(g.end_s - g.start_s for g in gaps)
        waits.append(Wait(waiting, peer, cause, total, longest.on))
    return tuple(sorted(waits, key=lambda w: (-w.seconds, w.rank, w.peer)))


def parts_of(timeline: Timeline) -> tuple[StepPart, ...]:
    """Returns the parts of the makespan; they add up to it, to rounding."""
    accounts = rank_accounts(timeline)
    ranks = len(accounts)
    mean = sum(a.busy_s for a in accounts) / ranks
    most = busiest(accounts)
    least = min(accounts, key=lambda a: (a.busy_s, a.rank))
    of = f"rank {most.rank}"
    idle = waits_of(timeline, most.rank)

    def longest(cause: Cause) -> str:
        wait = next((w for w in idle if w.cause is cause), None)
        if wait is None:
            return f"none between the actions of {of}"
        return f"mostly for rank {wait.peer}, the longest for {wait.on}"

    spread = f"rank {most.rank} works longest, rank {least.rank} least"
    parts = [
        StepPart("work, evenly spread", mean, f"all ranks' work over {ranks}"),
        StepPart(
            "imbalance",
            most.busy_s - mean,
            spread if most.busy_s > least.busy_s else "all ranks work equally long",
        ),
        StepPart(
            "fill and drain",
            most.fill_s + most.drain_s,
            f"around the actions of {of}",
        ),
        StepPart("waiting for computation", most.computation_wait_s, longest(Cause.COMPUTATION)),
        StepPart("waiting for transfers", most.transfer_wait_s, longest(Cause.TRANSFER)),
    ]
    if any(a.host_wait_s > 1e-9 * timeline.makespan_s for a in accounts):
        parts.append(
            StepPart("waiting for the host", most.host_wait_s, f"actions of {of} not launched")
        )
    return tuple(parts)
