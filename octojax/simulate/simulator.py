"""From a schedule or plan and its costs to a timeline."""

from typing import Literal

import numpy as np

from octojax.errors import PlanError
from octojax.ir import (
    ActionSpan,
    Machine,
    Plan,
    Profile,
    RankSummary,
    Schedule,
    Timeline,
    TransferSpan,
)
from octojax.ir.lowering import without_transfers
from octojax.ir.verify import verify
from octojax.simulate.costs import StageCosts, uniform_partition
from octojax.simulate.evaluate import Trace, trace
from octojax.simulate.links import Links
from octojax.simulate.memory import live_peaks, memory_over_time
from octojax.simulate.overlap import both_busy
from octojax.simulate.table import Table

Mode = Literal["async", "blocking"]
Free = Literal["backward", "weight"]


def simulate(
    schedule: Schedule | Plan,
    costs: StageCosts | Profile,
    machine: Machine | None = None,
    mode: Mode = "async",
    free: Free = "backward",
) -> Timeline:
    """Returns the timeline of one step.

    `costs` of a plan come from a profile by the plan's partition and recompute flags; a bare
    schedule cuts the profile uniformly. `machine` defaults to the profile's, else to ideal
    links. In mode "async" transfers run beside computation; in "blocking" a send and its
    receive occupy both ranks, just around the computation or where a lowered table has them.
    `free` chooses whether `peak_microbatches` counts until I or B ("backward") or until W or B.
    Raises `ScheduleError` for a table that is wrong or deadlocks, `PlanError` for costs of
    another number of stages.
    """
    verify_form(mode, free)
    if isinstance(costs, Profile) and machine is None:
        machine = costs.machine
    stage_costs = costs_of(schedule, costs)
    rows = schedule.schedule if isinstance(schedule, Plan) else schedule
    if mode == "blocking" or rows.has_transfers:
        from octojax.simulate.blocking import simulate_rows

        return simulate_rows(schedule, stage_costs, machine, mode, free)
    verify(schedule, num_stages=stage_costs.num_stages)
    table = Table.of(schedule)
    links = Links.of(machine, table.num_ranks)
    return timeline_of(table, stage_costs, trace(table, stage_costs, links), rows, free)


def verify_form(mode: str, free: str) -> None:
    """Raises `ValueError` for an unknown mode or way of counting."""
    for name, value, known in (
        ("mode", mode, ("async", "blocking")),
        ("free", free, ("backward", "weight")),
    ):
        if value not in known:
            raise ValueError(f"{name}={value!r} is unknown; choose one of {', '.join(known)}")


def costs_of(schedule: Schedule | Plan, costs: StageCosts | Profile) -> StageCosts:
    """Returns the costs per stage of a schedule or plan. See `simulate`."""
    if isinstance(costs, StageCosts):
        if costs.num_stages != schedule.num_stages:
            raise PlanError(
                f"costs are given for {costs.num_stages} stages, "
                f"but the schedule runs {schedule.num_stages}"
            )
        return costs
    if isinstance(schedule, Plan):
        return StageCosts.of(costs, schedule.partition, schedule.recompute)
    return StageCosts.of(costs, uniform_partition(costs.num_layers, schedule.num_stages))


def timeline_of(
    table: Table, costs: StageCosts, times: Trace, rows: Schedule, free: Free = "backward"
) -> Timeline:
    """Returns the record of a traced table whose items are those of `rows`."""
    *where, _ = times
    peaks, when, levels, bounds = memory_over_time(
        table.items,
        table.rank_start,
        table.num_stages,
        table.num_microbatches,
        costs.nbytes,
        costs.recompute,
        table.holds,
        *where,
        True,
    )
    overlap = both_busy(table.rank_start, *where)
    start, end = times.start_s.tolist(), times.end_s.tolist()
    items = [item for rank in rows.ranks for item in rank]
    spans = tuple(
        ActionSpan(rank, item, a, b)
        for rank, item, a, b in zip(times.rank_of.tolist(), items, start, end, strict=True)
    )
    makespan = max(end, default=0.0)
    return Timeline(
        makespan,
        spans,
        transfer_spans(table, costs, times, overlap),
        summaries(spans, makespan, live_peaks(table.items, table.rank_start), peaks, free),
        tuple(
            tuple(zip(when[a:b].tolist(), levels[a:b].tolist(), strict=True))
            for a, b in zip(bounds[:-1], bounds[1:], strict=True)
        ),
    )


def transfer_spans(
    table: Table, costs: StageCosts, times: Trace, overlap: np.ndarray
) -> tuple[TransferSpan, ...]:
    """Returns the transfers of a traced table, rank by rank in the sender's program order."""
    spans = []
    for i, slot in np.argwhere(times.target >= 0).tolist():
        _, stage, microbatch, stage2, microbatch2 = table.items[i].tolist()
        if slot == 1 and stage2 >= 0:
            stage, microbatch = stage2, microbatch2
        size = costs.input_bytes[stage] if slot else costs.output_bytes[stage]
        spans.append(
            TransferSpan(
                int(times.rank_of[i]),
                int(times.rank_of[times.target[i, slot]]),
                stage,
                "B" if slot else "F",
                microbatch,
                float(times.sent_s[i, slot]),
                float(times.arrived_s[i, slot]),
                float(size),
                float(overlap[i, slot]),
            )
        )
    return tuple(spans)


def summaries(
    spans: tuple[ActionSpan, ...],
    makespan_s: float,
    live: np.ndarray,
    peaks: np.ndarray,
    free: Free = "backward",
) -> tuple[RankSummary, ...]:
    """Returns each rank's account. `live` is (ranks, 2), `peaks` (ranks,) bytes."""
    by_rank: list[list[ActionSpan]] = [[] for _ in range(len(peaks))]
    for span in spans:
        by_rank[span.rank].append(span)
    result = []
    for rank, own in enumerate(by_rank):
        busy = sum(x.end_s - x.start_s for x in own)
        first, last = (own[0].start_s, own[-1].end_s) if own else (makespan_s, makespan_s)
        boundary = first + (makespan_s - last)
        bubble = makespan_s - busy
        until_input, until_weight = map(int, live[rank])
        result.append(
            RankSummary(
                busy,
                bubble,
                boundary,
                max(0.0, bubble - boundary),
                until_weight if free == "weight" else until_input,
                float(peaks[rank]),
                until_weight,
            )
        )
    return tuple(result)


def bare(schedule: Schedule | Plan) -> Schedule | Plan:
    """Returns the same without transfer actions."""
    if isinstance(schedule, Plan):
        return schedule.with_schedule(without_transfers(schedule.schedule))
    return without_transfers(schedule)
