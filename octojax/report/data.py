"""Timelines as data: JSON that reads back, and CSV."""

import csv
import io
import json
import math
from dataclasses import astuple
from pathlib import Path
from typing import Any

from octojax.errors import FormatError
from octojax.ir import (
    ActionSpan,
    Cause,
    Gap,
    Overlap,
    RankSummary,
    Timeline,
    TransferSpan,
    parse_item,
)
from octojax.ir.files import other_version, read_json
from octojax.report.panel import Panel

VERSION = 1
_TRANSFER = ("source", "target", "stage", "kind", "microbatch", "start_s", "end_s", "nbytes")
_GAP = tuple(Gap.__dataclass_fields__)


def to_json(timeline: Timeline) -> dict[str, Any]:
    """Returns the whole timeline as JSON data: `Timeline.to_json()` and every span."""
    more = ("overlap_s", "sender_overlap_s", "latency_s")
    return {
        "version": VERSION,
        "unit": timeline.unit,
        **timeline.to_json(),
        "actions": [
            {"rank": s.rank, "action": str(s.item), "start_s": s.start_s, "end_s": s.end_s}
            for s in timeline.actions
        ],
        "transfer_spans": [
            {name: getattr(t, name) for name in _TRANSFER + more} for t in timeline.transfers
        ],
        "gaps": [{name: getattr(g, name) for name in _GAP} for g in timeline.gaps],
        "memory": [[list(point) for point in rank] for rank in timeline.memory],
    }


def from_json(data: Any, name: str = "timeline") -> Timeline:
    """Returns the timeline that `to_json` wrote. Raises `FormatError` naming what is wrong."""
    if not is_timeline(data):
        raise FormatError(
            f"{name}: not a timeline: expected a JSON object with makespan_s, ranks and actions"
        )
    if data.get("version") != VERSION:
        raise FormatError(other_version(name, "timeline", data.get("version"), VERSION))
    try:
        timeline = Timeline(
            makespan_s=_seconds(data["makespan_s"]),
            actions=tuple(
                ActionSpan(
                    x["rank"], parse_item(x["action"]), _seconds(x["start_s"]), _seconds(x["end_s"])
                )
                for x in data["actions"]
            ),
            transfers=tuple(TransferSpan(**x) for x in data.get("transfer_spans", ())),
            ranks=tuple(RankSummary(**x) for x in data["ranks"]),
            memory=tuple(
                tuple((_seconds(t), _seconds(b)) for t, b in rank)
                for rank in data.get("memory", ())
            ),
            gaps=tuple(Gap(**{**x, "cause": Cause(x["cause"])}) for x in data.get("gaps", ())),
            unit=data.get("unit", "s"),
        )
        _check(timeline)
    except KeyError as error:
        raise FormatError(f"{name}: broken timeline: something lacks its {error}") from None
    except (TypeError, ValueError, OverflowError) as error:
        raise FormatError(f"{name}: broken timeline: {error}") from None
    return timeline


def _seconds(value: Any) -> float:
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 <= value < math.inf:
        raise ValueError(f"expected a finite number >= 0, found {value!r}")
    return value


def _check(timeline: Timeline) -> None:
    """Raises `ValueError` if a span lies on no rank, ends before it starts, or is no work."""
    ranks = len(timeline.ranks)
    if timeline.unit not in ("s", "units"):
        raise ValueError(f"unit {timeline.unit!r}, expected 's' or 'units'")
    for account in timeline.ranks:
        for value in astuple(account):
            _seconds(value)
    for span in timeline.actions:
        where = f"{span.item} on rank {span.rank!r}"
        _expect_ranks(where, ranks, span.rank)
        if span.end_s < span.start_s:
            raise ValueError(f"{where} ends at {span.end_s} s, before its start, {span.start_s} s")
        if span.end_s > timeline.makespan_s * (1 + 1e-6):
            raise ValueError(f"{where} ends after the makespan, {timeline.makespan_s} s")
        if not isinstance(span.item, Overlap) and not span.item.kind.computes:
            raise ValueError(f"{where}: transfers belong into transfer_spans")
    for span in timeline.transfers:
        where = f"transfer {span.name} from rank {span.source!r} to rank {span.target!r}"
        _expect_ranks(where, ranks, span.source, span.target)
        times = (span.start_s, span.end_s, span.nbytes, span.overlap_s, span.latency_s)
        for value in (span.stage, span.microbatch, span.sender_overlap_s, *times):
            _seconds(value)
    for gap in timeline.gaps:
        _expect_ranks(f"gap before {gap.before or 'the end'}", ranks, gap.rank, gap.peer)
        if not _seconds(gap.start_s) <= _seconds(gap.end_s):
            raise ValueError(f"a gap of rank {gap.rank} ends at {gap.end_s} s, before its start")


def _expect_ranks(where: str, ranks: int, *named: int) -> None:
    if not all(type(rank) is int and 0 <= rank < ranks for rank in named):
        raise ValueError(f"{where}: there are {ranks} ranks (0 to {ranks - 1})")


def is_timeline(data: Any) -> bool:
    """Whether parsed JSON looks like a timeline, rather than a plan or a profile."""
    return isinstance(data, dict) and {"makespan_s", "ranks", "actions"} <= data.keys()


def load_timeline(path: str | Path) -> Timeline:
    """Returns the timeline in a JSON file."""
    return from_json(read_json(path), str(path))


def save_timeline(timeline: Timeline, path: str | Path) -> None:
    """Writes the timeline where `load_timeline` reads it."""
    Path(path).write_text(json.dumps(to_json(timeline), indent=1) + "\n", encoding="utf-8")


def to_csv(panels: list[Panel]) -> str:
    """Returns a row per action and per transfer: where, what, from when to when."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(["timeline", "rank", "action", "start_s", "end_s", "to_rank", "bytes"])
    for panel in panels:
        for s in panel.timeline.actions:
            writer.writerow([panel.title, s.rank, str(s.item), s.start_s, s.end_s, "", ""])
        for t in panel.timeline.transfers:
            row = [t.source, t.name, t.start_s, t.end_s, t.target, f"{t.nbytes:.0f}"]
            writer.writerow([panel.title, *row])
    return out.getvalue()
