"""From the clock readings of a real run to the same Timeline record that the simulator makes."""

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from octojax.executor.instructions import Do, Instruction, Transfer
from octojax.ir import ActionSpan, Kind, Schedule, Timeline, TransferSpan, parse_item
from octojax.simulate.oracle import peak_live
from octojax.simulate.timelines import summaries

Span = tuple[float, float]


@dataclass
class TransferClock:
    """When each transfer of a step ran, as seen by the local ranks. `begin` clears it."""

    spans: dict[int, Span] = field(default_factory=dict)

    def note(self, number: int, start_s: float, end_s: float) -> None:
        """Two sides of one transfer: it runs once both have come, until both are done."""
        before = self.spans.get(number, (start_s, end_s))
        self.spans[number] = (max(before[0], start_s), max(before[1], end_s))


def action_spans(rank: int, body: Sequence[Instruction], spans: Sequence[Span]) -> list[ActionSpan]:
    """Returns the spans of what rank `rank` ran, transfers left out."""
    return [
        ActionSpan(rank, parse_item(instruction.name), start, end)
        for instruction, (start, end) in zip(body, spans, strict=True)
        if instruction.do is Do.RUN
    ]


def measured(
    schedule: Schedule,
    actions: Iterable[ActionSpan],
    transfers: Sequence[Transfer],
    moves: Mapping[int, Span],
    sizes: Sequence[float],
    peaks: Sequence[float] = (),
    memory: tuple[tuple[Span, ...], ...] = (),
) -> Timeline:
    """Returns the timeline of a recorded step; its clock starts with the first action.

    `moves[k]` is when transfer k ran, `sizes[k]` its bytes, `peaks[r]` the most bytes that rank
    r held, where known, and `memory[r]` the `(time_s, bytes)` after each change.
    """
    found = sorted(actions, key=lambda a: (a.rank, a.start_s))
    zero = min((a.start_s for a in found), default=0.0)
    spans = tuple(ActionSpan(a.rank, a.item, a.start_s - zero, a.end_s - zero) for a in found)
    busy: list[list[Span]] = [[] for _ in schedule.ranks]
    for span in spans:
        busy[span.rank].append((span.start_s, span.end_s))
    moved = tuple(
        _transfer(t, moves[k][0] - zero, moves[k][1] - zero, sizes[k], busy)
        for k, t in enumerate(transfers)
        if k in moves and t.kind in "FB"
    )
    makespan = max((a.end_s for a in spans), default=0.0)
    live = [
        (peak_live(schedule, r, Kind.INPUT_GRAD), peak_live(schedule, r, Kind.WEIGHT_GRAD))
        for r in range(schedule.num_ranks)
    ]
    known = list(peaks) or [0.0] * schedule.num_ranks
    return Timeline(
        makespan, spans, moved, summaries(spans, makespan, live, known, "backward"), memory
    )


def _transfer(
    t: Transfer, start: float, end: float, size: float, busy: Sequence[Sequence[Span]]
) -> TransferSpan:
    both = sum(
        max(0.0, min(a[1], b[1], end) - max(a[0], b[0], start))
        for a in _near(busy[t.source], start, end)
        for b in _near(busy[t.target], start, end)
    )
    sender = sum(
        max(0.0, min(b, end) - max(a, start)) for a, b in _near(busy[t.source], start, end)
    )
    return TransferSpan(
        t.source, t.target, t.stage, t.kind, t.microbatch, start, end, size, both, sender
    )


def _near(spans: Sequence[Span], start: float, end: float) -> Sequence[Span]:
    first = bisect_left(spans, start, key=lambda s: s[1])
    last = first
    while last < len(spans) and spans[last][0] < end:
        last += 1
    return spans[first:last]
