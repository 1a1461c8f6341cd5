"""From the clock readings of a real run to the same Timeline record that the simulator makes."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from octojax.executor.instructions import Operation
from octojax.ir import ActionSpan, Run, Schedule, Timeline, Transfer
from octojax.simulate.timelines import Move, timeline_of

Span = tuple[float, float]


@dataclass
class TransferClock:
    """When each transfer of a step ran, as seen by the local ranks. `begin` clears it."""

    spans: dict[int, Span] = field(default_factory=dict)

    def note(self, number: int, start_s: float, end_s: float) -> None:
        """Two sides of one transfer: it runs once both have come, until both are done."""
        before = self.spans.get(number, (start_s, end_s))
        self.spans[number] = (max(before[0], start_s), max(before[1], end_s))


def action_spans(rank: int, body: Sequence[Operation], spans: Sequence[Span]) -> list[ActionSpan]:
    """Returns the spans of what rank `rank` ran, one action or pair at a time."""
    return [
        ActionSpan(rank, operation.of.items[0], start, end)
        for operation, (start, end) in zip(body, spans, strict=True)
        if isinstance(operation.of, Run)
    ]


def measured(
    schedule: Schedule,
    actions: Iterable[ActionSpan],
    transfers: Sequence[Transfer],
    moves: Mapping[int, Span],
    sizes: Sequence[float],
    memory: tuple[tuple[Span, ...], ...] = (),
) -> Timeline:
    """Returns the timeline of a recorded step; its clock starts with the first action.

    `moves[k]` is when transfer k ran, `sizes[k]` its bytes, and `memory[r]` the
    `(time_s, bytes)` of rank r after each change, where they are known. An action with nothing to
    compute (W of a stage without parameters) is there too, and takes no time.
    """
    in_order = sorted(
        _with_idle(schedule, list(actions)), key=lambda a: (a.rank, a.start_s, a.end_s)
    )
    zero = min((a.start_s for a in in_order), default=0.0)
    spans = [ActionSpan(a.rank, a.item, a.start_s - zero, a.end_s - zero) for a in in_order]
    transfer_moves = [
        Move(t, moves[k][0] - zero, moves[k][1] - zero, sizes[k])
        for k, t in enumerate(transfers)
        if k in moves and t.kind.crosses_stages
    ]
    return timeline_of(schedule, spans, transfer_moves, memory)


def _with_idle(schedule: Schedule, ran: Sequence[ActionSpan]) -> list[ActionSpan]:
    """Returns the spans with those of the schedule's actions that ran no program."""
    ends = {(a.rank, a.item): a.end_s for a in ran}
    spans = list(ran)
    now = dict.fromkeys(range(schedule.num_ranks), min((a.start_s for a in ran), default=0.0))
    for rank, _, action in schedule.actions():
        if not action.kind.computes:
            continue
        if (rank, action) not in ends:
            spans.append(ActionSpan(rank, action, now[rank], now[rank]))
        now[rank] = ends.get((rank, action), now[rank])
    return spans
