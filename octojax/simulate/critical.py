"""Why a step takes as long as it does: what every event started after, and what had time to spare.

rank 1         . . . [1F0]=[1B0]          =  the critical path
rank 0   [0F0]=>0SEND_F0  1SEND_B0=>[0B0]
              [0F1]                          0F1 may end as late as 0B0 starts: its slack
"""

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from graphlib import CycleError, TopologicalSorter
from itertools import pairwise

from octojax.ir import ActionSpan, Timeline, TransferSpan
from octojax.ir.lowering import actions_of, makes
from octojax.simulate.waits import input_of

Event = ActionSpan | TransferSpan
_TOLERANCE = 1e-9
"""Of the makespan: times that differ by less are one instant, written down with rounding."""


@dataclass(frozen=True)
class Chains:
    """The events of a timeline (its actions, then its transfers) and how they hang together.

    `before[e]` is the number of the event without which event e would have started earlier: the
    last one that it had to follow; -1 for those that follow none. `slack_s[e]` is how much later
    it could end, with every order and every length as they are, without the step's taking longer.
    """

    timeline: Timeline
    before: tuple[int, ...]
    slack_s: tuple[float, ...]

    @cached_property
    def events(self) -> tuple[Event, ...]:
        return (*self.timeline.actions, *self.timeline.transfers)

    def back_from(self, event: int) -> tuple[int, ...]:
        """Returns the chain of events from the start of the step to this one, in that order."""
        chain = []
        while event >= 0:
            chain.append(event)
            event = self.before[event]
        return tuple(reversed(chain))

    @cached_property
    def critical(self) -> tuple[int, ...]:
        """The chain to the action that ends last, with what its rank does after it: a step is as
        long as this."""
        actions, ranks = self.timeline.actions, self.timeline.ranks
        last = max(
            range(len(actions)),
            key=lambda i: actions[i].end_s + ranks[actions[i].rank].after_s,
            default=-1,
        )
        return self.back_from(last)


def chains_of(timeline: Timeline) -> Chains:
    """Returns what every action and transfer followed, and its slack.

    An event follows the one before it on its rank or link and those that make its inputs; one
    that started later still follows what ended on its ranks just then (a receive that was posted,
    a blocking transfer). Time that nothing explains, as a host takes in a measured step, counts as
    part of the event. With blocking transfers, and where receives are posted late, slack is an
    upper bound.

    Raises `ValueError` if the actions wait for each other in a circle, as no step's do.
    """
    events: tuple[Event, ...] = (*timeline.actions, *timeline.transfers)
    tolerance = _TOLERANCE * timeline.makespan_s
    follows = _follows(timeline, tolerance)
    before, delay = [], []
    seen = set[int]()
    for event, earlier in zip(events, follows, strict=True):
        latest = max(earlier, key=lambda p: p[1], default=(-1, 0.0))
        # of those that ended together the first: its own rank's, which was busy until then
        ready = next((p for p in earlier if p[1] >= latest[1] - tolerance), latest)
        begins = 0.0
        if isinstance(event, ActionSpan) and event.rank not in seen:  # its rank may gather first
            seen.add(event.rank)
            begins = timeline.ranks[event.rank].before_s
        before.append(-1 if begins > latest[1] + tolerance else ready[0])
        delay.append(event.start_s - max(latest[1], begins))
    follow: dict[int, list[int]] = {i: [p for p, _ in earlier] for i, earlier in enumerate(follows)}
    try:
        order = tuple(TopologicalSorter(follow).static_order())
    except CycleError as error:
        names = " -> ".join(_name(events[i]) for i in reversed(error.args[1]))
        raise ValueError(
            f"no step ran like this timeline: its actions wait for each other, {names}"
        ) from None
    latest_s = [
        timeline.makespan_s
        - (timeline.ranks[event.rank].after_s if isinstance(event, ActionSpan) else 0.0)
        - (event.end_s - event.start_s)
        for event in events
    ]
    for number in reversed(order):
        event, start = events[number], latest_s[number] - max(0.0, delay[number])
        for earlier, ready_s in follows[number]:
            # from that event's start until this one may start; less where clocks disagree
            lag = min(ready_s, event.start_s) - events[earlier].start_s
            latest_s[earlier] = min(latest_s[earlier], start - lag)
    slack = (late - event.start_s for late, event in zip(latest_s, events, strict=True))
    return Chains(timeline, tuple(before), tuple(s if s > tolerance else 0.0 for s in slack))


def _follows(timeline: Timeline, tolerance: float) -> list[list[tuple[int, float]]]:
    """Returns per event those that it follows, and when each let it start."""
    actions, transfers = timeline.actions, timeline.transfers
    count = len(actions)
    follows: list[list[tuple[int, float]]] = [[] for _ in range(count + len(transfers))]
    rows, links = defaultdict(list), defaultdict(list)
    maker: dict[tuple[str, int, int], int] = {}
    for i, span in enumerate(actions):
        rows[span.rank].append(i)
        for action in actions_of(span.item):
            if (value := makes(action)) is not None:
                maker[value] = i
    arrivals = {(t.target, t.kind, t.stage, t.microbatch): i for i, t in enumerate(transfers)}
    for row in rows.values():
        row.sort(key=lambda i: (actions[i].start_s, actions[i].end_s))
        for one, following in pairwise(row):
            follows[following].append((one, actions[one].end_s))
    for i, span in enumerate(actions):
        for action in actions_of(span.item):
            arrival = arrivals.get(input_of(span.rank, action))
            if arrival is not None:
                follows[i].append((count + arrival, transfers[arrival].end_s))
    for i, t in sorted(enumerate(transfers), key=lambda pair: (pair[1].start_s, pair[0])):
        making = maker.get((t.kind, t.stage, t.microbatch))
        if making is not None:
            follows[count + i].append((making, actions[making].end_s))
        link = links[t.source, t.target]
        if link:
            last = transfers[link[-1]]
            follows[count + i].append(
                (count + link[-1], max(last.start_s, last.end_s - t.latency_s))
            )
        link.append(i)
    _add_posts(timeline, follows, rows, tolerance)
    return follows


def _add_posts(
    timeline: Timeline,
    follows: list[list[tuple[int, float]]],
    rows: dict[int, list[int]],
    tolerance: float,
) -> None:
    """Adds what ended on an event's ranks as it started, where nothing else explains its start."""
    actions, transfers = timeline.actions, timeline.transfers
    count = len(actions)
    ends = {rank: sorted((actions[i].end_s, i) for i in row) for rank, row in rows.items()}
    moves = defaultdict(list)
    for i, t in enumerate(transfers):
        for rank in (t.source, t.target):
            moves[rank].append((t.end_s, count + i))
    for events in moves.values():
        events.sort()
    at = (*actions, *transfers)
    for number, earlier in enumerate(follows):
        event = at[number]
        if event.start_s - max((ready for _, ready in earlier), default=0.0) <= tolerance:
            continue
        ranks = (event.rank,) if isinstance(event, ActionSpan) else (event.target, event.source)
        ended = [
            (other, end)
            for rank in ranks
            for lane in ((moves,) if isinstance(event, ActionSpan) else (ends, moves))
            for end, other in _about(lane.get(rank, []), event.start_s, tolerance)
            if at[other].start_s < event.start_s - tolerance
        ]
        earlier += ended[:1]


def _about(
    ends: list[tuple[float, int]], time_s: float, tolerance: float
) -> Iterator[tuple[float, int]]:
    first = bisect_left(ends, (time_s - tolerance, -1))
    yield from ends[first : bisect_right(ends, (time_s + tolerance, 1 << 62))]


def _name(event: Event) -> str:
    return event.name if isinstance(event, TransferSpan) else str(event.item)


@dataclass(frozen=True, slots=True)
class Losses:
    """Where the idle time of one rank went, in the timeline's unit; the sum is its bubble.

    `fill_drain_s` is before its first and after its last action. Of the waiting for computation
    between them, as much as the rank has less work than the busiest one is `imbalance_s`, the
    rest `dependency_s`. `transfer_s`: the value was made and had not arrived. `host_s`: it was
    there, and the action had not been launched (in measured steps).
    """

    fill_drain_s: float
    imbalance_s: float
    dependency_s: float
    transfer_s: float
    host_s: float


def losses_of(timeline: Timeline) -> tuple[Losses, ...]:
    """Returns every rank's idle time by its cause."""
    busiest_s = max((r.busy_s for r in timeline.ranks), default=0.0)
    losses = []
    for rank in timeline.ranks:
        computation, transfer = rank.computation_wait_s, rank.transfer_wait_s
        imbalance = min(computation, busiest_s - rank.busy_s)
        host = rank.bubble_s - rank.boundary_bubble_s - computation - transfer
        losses.append(
            Losses(
                rank.boundary_bubble_s,
                imbalance,
                computation - imbalance,
                transfer,
                max(0.0, host),
            )
        )
    return tuple(losses)
