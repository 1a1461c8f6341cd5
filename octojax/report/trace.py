"""Timelines in Chrome's trace format, for ui.perfetto.dev and chrome://tracing.

Viewers bind an arrow's end to the slice of its thread that is open at its time, so an arrow
leaves inside the producer, passes inside the transfer, and arrives inside the consumer.

rank 0           [0F0 ......s]
links from 0                  [0SEND_F0 .t. ]
rank 1                                       [f......1F0]
"""

from collections import defaultdict
from collections.abc import Iterator
from typing import Any

from octojax.ir import Action, ActionSpan, Kind, Overlap, Timeline, TransferSpan
from octojax.report.panel import LIGHT, Panel

_CHROME = {
    "F": "thread_state_running",
    "B": "terrible",
    "I": "bad",
    "W": "good",
    "R": "generic_work",
}
assert _CHROME.keys() == LIGHT.keys()

Event = dict[str, Any]


def to_trace(panels: list[Panel]) -> dict[str, Any]:
    """Returns a Chrome trace (open it at ui.perfetto.dev): a process per panel, a thread per
    rank and per rank's links, an arrow per transfer and a counter of memory.

    Bubbles are slices that say what they wait for. Times are microseconds, as the format wants,
    in whole nanoseconds, so that neighbours never overlap; a unit cost becomes a second.
    """
    events: list[Event] = []
    for process, panel in enumerate(panels):
        events += _names(process, panel)
        events += _actions(process, panel)
        events += _bubbles(process, panel.timeline)
        events += _arrows(process, panel.timeline)
        for rank, points in enumerate(panel.timeline.memory):
            name = f"memory of rank {rank}"
            events += [
                {"ph": "C", "pid": process, "name": name, "ts": 1e6 * t, "args": {"bytes": b}}
                for t, b in points
            ]
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _names(process: int, panel: Panel) -> Iterator[Event]:
    ranks = len(panel.timeline.ranks)
    names = [("process_name", 0, panel.title)]
    names += [("thread_name", rank, f"rank {rank}") for rank in range(ranks)]
    lanes = sorted(set(_lanes(panel.timeline)))
    for thread in lanes:
        lane, source = divmod(thread - ranks, ranks)
        more = f" ({lane + 1})" if lane else ""
        names.append(("thread_name", thread, f"links from rank {source}{more}"))
    for what, thread, name in names:
        common = {"ph": "M", "pid": process, "tid": thread}
        yield {**common, "name": what, "args": {"name": name}}
        if what == "thread_name":
            yield {**common, "name": "thread_sort_index", "args": {"sort_index": thread}}


def _lanes(timeline: Timeline) -> list[int]:
    """Returns each transfer's thread: the first of its sender's that is free meanwhile, since
    slices of one thread must not overlap.
    """
    ranks = len(timeline.ranks)
    order = sorted(range(len(timeline.transfers)), key=lambda i: timeline.transfers[i].start_s)
    free_s: dict[int, float] = {}
    lanes = [0] * len(order)
    for i in order:
        t = timeline.transfers[i]
        lane = ranks + t.source
        while free_s.get(lane, 0.0) > t.start_s:
            lane += ranks
        lanes[i], free_s[lane] = lane, t.end_s
    return lanes


def _slice(process: int, thread: int, start_s: float, end_s: float, **more: Any) -> Event:
    start, end = round(1e9 * start_s), round(1e9 * end_s)
    common = {"ph": "X", "pid": process, "tid": thread}
    return {**common, "ts": start / 1e3, "dur": (end - start) / 1e3, **more}


def _parts(span: ActionSpan) -> tuple[Action, ...]:
    return span.item.actions if isinstance(span.item, Overlap) else (span.item,)


def _actions(process: int, panel: Panel) -> Iterator[Event]:
    bytes_of: dict[tuple[str, int, Action], float] = defaultdict(float)
    for t, maker, user in _ends(panel.timeline):
        for what, end in (("sent_bytes", maker), ("received_bytes", user)):
            if end is not None:
                bytes_of[what, end[0].rank, end[1]] += t.nbytes
    for span in panel.timeline.actions:
        parts = _parts(span)
        first = parts[-1]
        args: dict[str, Any] = {"stage": first.stage, "microbatch": first.microbatch}
        if panel.layers:
            args["layers"] = "; ".join(panel.layers[part.stage] for part in parts)
        for what in ("received_bytes", "sent_bytes"):
            if size := sum(bytes_of.get((what, span.rank, part), 0.0) for part in parts):
                args[what] = size
        yield _slice(
            process,
            span.rank,
            span.start_s,
            span.end_s,
            name=str(span.item),
            cat="overlap" if len(parts) > 1 else first.kind.name.lower(),
            cname=_CHROME[first.kind.value],
            args=args,
        )


def _bubbles(process: int, timeline: Timeline) -> Iterator[Event]:
    for gap in timeline.gaps:
        args = {
            "waits_for": gap.cause.value,
            "on": gap.on,
            "peer_rank": gap.peer,
            "before": gap.before or "the end of the step",
        }
        where = {"name": "bubble", "cat": "bubble", "cname": "grey", "args": args}
        bubble = _slice(process, gap.rank, gap.start_s, gap.end_s, **where)
        if bubble["dur"]:
            yield bubble


def _arrows(process: int, timeline: Timeline) -> Iterator[Event]:
    ends = zip(_lanes(timeline), _ends(timeline), strict=True)
    for number, (link, (t, maker, user)) in enumerate(ends):
        common = {"pid": process, "name": t.name, "cat": "transfer"}
        args = {"from": t.source, "to": t.target, "bytes": t.nbytes}
        yield _slice(process, link, t.start_s, t.end_s, name=t.name, cat="transfer", args=args)
        if maker is None or user is None:
            continue  # of a timeline that holds one side alone
        flow = {**common, "id": f"{process}.{number}", "args": {"bytes": t.nbytes}}
        yield {**flow, "ph": "s", "tid": t.source, "ts": _inside(maker[0], 0.9)}
        yield {**flow, "ph": "t", "tid": link, "ts": _inside(t, 0.5)}
        yield {**flow, "ph": "f", "bp": "e", "tid": t.target, "ts": _inside(user[0], 0.1)}


def _inside(span: ActionSpan | TransferSpan, share: float) -> float:
    """Microseconds at which `share` of a span is over, as late as its start is written."""
    start, end = round(1e9 * span.start_s), round(1e9 * span.end_s)
    return (start + int(share * (end - start))) / 1e3


End = tuple[ActionSpan, Action] | None


def _ends(timeline: Timeline) -> Iterator[tuple[TransferSpan, End, End]]:
    """Yields every transfer with the action that makes its value, and the first that needs it.

    An output is needed by the forward of the next stage, a gradient by that of the stage
    before; None where the timeline lacks that action.
    """
    where: dict[tuple[int, str, int, int], tuple[ActionSpan, Action]] = {}
    for span in timeline.actions:
        for action in _parts(span):
            kind = {Kind.FORWARD: "F", Kind.BACKWARD: "B", Kind.INPUT_GRAD: "B"}.get(action.kind)
            if kind is not None:
                where[span.rank, kind, action.stage, action.microbatch] = span, action
    for t in timeline.transfers:
        peer = t.stage + 1 if t.kind == "F" else t.stage - 1
        maker = where.get((t.source, t.kind, t.stage, t.microbatch))
        yield t, maker, where.get((t.target, t.kind, peer, t.microbatch))
