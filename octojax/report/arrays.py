"""A timeline as arrays of whole numbers that a page holds in little room.

Every column is int32. Columns are laid one after the other, each as differences where that is
noted, byte 0 of all its numbers first, then byte 1, and so on, so that what repeats stands
together; then deflated and written in base 64. `octojax/report/viewer/data.js` reads it back.
"""

import base64
import math
import zlib
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from octojax.ir import Overlap, Timeline
from octojax.ir.lowering import actions_of, makes
from octojax.report.panel import LEGEND, Panel, kinds
from octojax.simulate.critical import Chains, chains_of, losses_of
from octojax.simulate.waits import input_of

Ints = NDArray[np.int32]

KINDS = tuple(LEGEND)
"""Column `kind` holds places in this; one more than the last is an overlapped pair."""
CAUSES = ("fill and drain", "dependency", "transfer", "host", "imbalance")
"""Column `gap_cause` holds places in this. The page itself divides dependency and imbalance."""
_CAUSE = {"computation": 1, "transfer": 2, "host": 3}
_STEPS = 2**31 - 2
"""Into which the makespan is divided; a day then has steps of 40 microseconds."""


@dataclass
class _Blob:
    """Columns on their way into a page."""

    columns: list[tuple[str, int, bool]] = field(default_factory=list)
    parts: list[bytes] = field(default_factory=list)

    def add(self, name: str, values: Any, differences: bool = False) -> None:
        numbers = np.asarray(values, dtype=np.int32)
        self.columns.append((name, len(numbers), differences))
        if differences and len(numbers):
            numbers = np.concatenate((numbers[:1], np.diff(numbers)))  # wraps around, and back
        self.parts.append(numbers.astype("<i4").view(np.uint8).reshape(-1, 4).T.tobytes())

    def text(self) -> str:
        return base64.b64encode(zlib.compress(b"".join(self.parts), 9)).decode("ascii")


def panel_data(panel: Panel) -> dict[str, Any]:
    """Returns what the viewer needs of a panel, ready for `json.dumps`.

    Next to titles and the layers of each stage: `columns` (name, length, differences) and `blob`.
    Times are in steps of `tick_s` from the step's start, memory in steps of `memory_unit` bytes.
    """
    timeline = panel.timeline
    ticks = _Ticks(timeline.makespan_s)
    blob = _Blob()
    chains, trouble = _chains(timeline)
    order = sorted(
        range(len(timeline.actions)),
        key=lambda i: (timeline.actions[i].rank, timeline.actions[i].start_s),
    )
    place = np.empty(len(order) + len(timeline.transfers) + 1, dtype=np.int64)
    place[order] = np.arange(len(order))
    place[len(order) :] = np.arange(len(order), len(place))
    place[-1] = -1  # what follows nothing
    _add_actions(blob, timeline, ticks, order)
    sizes = _add_transfers(blob, timeline, ticks, place)
    for name, events, offset in (
        ("", order, 0),
        ("transfer_", range(len(order), len(order) + len(timeline.transfers)), len(order)),
    ):
        before = place[[chains.before[e] for e in events]] if chains else [-1] * len(events)
        slack = ticks([chains.slack_s[e] for e in events] if chains else [0.0] * len(events))
        blob.add(f"{name}before", np.arange(offset, offset + len(events)) - before)
        blob.add(f"{name}slack", slack)
    _add_gaps(blob, timeline, ticks, place)
    unit = _add_memory(blob, timeline, ticks)
    return {
        "title": panel.title,
        "heading": panel.heading,
        "note": panel.note,
        "unit": timeline.unit,
        "makespan_s": timeline.makespan_s,
        "bound_s": panel.bound_s,
        "layers": list(panel.layers),
        "ranks": len(timeline.ranks),
        "kinds": kinds([panel]),
        "busy_s": [r.busy_s for r in timeline.ranks],
        "imbalance": _imbalance(timeline),
        "peak_microbatches": [r.peak_microbatches for r in timeline.ranks],
        "capacities_bytes": [c if math.isfinite(c) else None for c in panel.capacities_bytes],
        "trouble": trouble,
        "tick_s": ticks.tick_s,
        "memory_unit": unit,
        "sizes": sizes,
        "columns": blob.columns,
        "blob": blob.text(),
    }


class _Ticks:
    def __init__(self, makespan_s: float) -> None:
        self.tick_s = makespan_s / _STEPS or 1.0

    def __call__(self, times_s: Any) -> NDArray[np.int64]:
        steps = np.rint(np.asarray(times_s, dtype=np.float64) / self.tick_s)
        return np.clip(steps, 0, _STEPS + 1).astype(np.int64)


def _chains(timeline: Timeline) -> tuple[Chains | None, str]:
    try:
        return chains_of(timeline), ""
    except ValueError as error:  # the picture is worth having even so
        return None, str(error)


def _add_actions(blob: _Blob, timeline: Timeline, ticks: _Ticks, order: list[int]) -> None:
    spans = [timeline.actions[i] for i in order]
    firsts = np.searchsorted([s.rank for s in spans], np.arange(len(timeline.ranks) + 1))
    starts, ends = (ticks([getattr(s, name) for s in spans]) for name in ("start_s", "end_s"))
    blob.add("first", firsts)
    blob.add("start", starts, differences=True)
    blob.add("length", ends - starts)
    pairs = [actions_of(s.item) for s in spans]
    kinds_ = [
        len(KINDS) if isinstance(s.item, Overlap) else KINDS.index(s.item.kind.value) for s in spans
    ]
    blob.add("kind", kinds_)
    for half in (0, 1):
        parts = [p[half] if half < len(p) else None for p in pairs]
        blob.add(f"stage{half}", [-1 if p is None else p.stage for p in parts])
        blob.add(
            f"microbatch{half}",
            [-1 if p is None else p.microbatch for p in parts],
            differences=True,
        )


def _add_transfers(
    blob: _Blob, timeline: Timeline, ticks: _Ticks, place: NDArray[np.int64]
) -> list[float]:
    """Adds when each transfer ran, and which actions make and take its value; returns sizes."""
    maker: dict[tuple[str, int, int], int] = {}
    taker: dict[tuple[int, str, int, int], int] = {}
    for i, span in enumerate(timeline.actions):
        for action in actions_of(span.item):
            if (value := makes(action)) is not None:
                maker[value] = i
            taker.setdefault(input_of(span.rank, action), i)
    transfers = timeline.transfers
    starts, ends = (ticks([getattr(t, name) for t in transfers]) for name in ("start_s", "end_s"))
    making = [maker.get((t.kind, t.stage, t.microbatch), -1) for t in transfers]
    taking = [taker.get((t.target, t.kind, t.stage, t.microbatch), -1) for t in transfers]
    blob.add("transfer_start", starts, differences=True)
    blob.add("transfer_length", ends - starts)
    blob.add("transfer_source", [t.source for t in transfers])
    blob.add("transfer_target", [t.target for t in transfers])
    blob.add("transfer_stage", [t.stage for t in transfers])
    blob.add("transfer_kind", [ord(t.kind) for t in transfers])
    blob.add("transfer_microbatch", [t.microbatch for t in transfers], differences=True)
    blob.add("transfer_maker", place[making], differences=True)
    blob.add("transfer_taker", place[taking], differences=True)
    sizes = sorted({float(t.nbytes) for t in transfers})
    blob.add("transfer_size", np.searchsorted(sizes, [t.nbytes for t in transfers]))
    return sizes


def _add_gaps(blob: _Blob, timeline: Timeline, ticks: _Ticks, place: NDArray[np.int64]) -> None:
    """Adds the idle times, each with its cause and the number of the event that it waited for."""
    number = {str(s.item): int(place[i]) for i, s in enumerate(timeline.actions)}
    count = len(timeline.actions)
    number |= {t.name: count + i for i, t in enumerate(timeline.transfers)}
    gaps = sorted(timeline.gaps, key=lambda g: (g.rank, g.start_s))
    starts, ends = (ticks([getattr(g, name) for g in gaps]) for name in ("start_s", "end_s"))
    blob.add("gap_rank", [g.rank for g in gaps])
    blob.add("gap_start", starts, differences=True)
    blob.add("gap_length", ends - starts)
    blob.add("gap_cause", [0 if g.boundary else _CAUSE[g.cause] for g in gaps])
    blob.add("gap_wait", [_CAUSE[g.cause] for g in gaps])
    blob.add("gap_on", [number.get(g.on, -1) for g in gaps], differences=True)


def _add_memory(blob: _Blob, timeline: Timeline, ticks: _Ticks) -> float:
    most = max((level for row in timeline.memory for _, level in row), default=0.0)
    unit = 1.0 if most < _STEPS else most / _STEPS
    rows = timeline.memory or ((),) * len(timeline.ranks)
    points = [point for row in rows for point in row]
    blob.add("memory_first", np.cumsum([0, *map(len, rows)]))
    blob.add("memory_time", ticks([t for t, _ in points]), differences=True)
    levels = np.rint(np.array([b for _, b in points], dtype=np.float64) / unit)
    blob.add("memory_level", levels, differences=True)
    return unit


def _imbalance(timeline: Timeline) -> list[float]:
    """Returns which share of each rank's waiting for computation is its lack of work."""
    shares = []
    for loss in losses_of(timeline):
        whole = loss.imbalance_s + loss.dependency_s
        shares.append(loss.imbalance_s / whole if whole else 0.0)
    return shares
