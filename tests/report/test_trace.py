"""What a trace viewer makes of a trace: slices that nest, arrows that begin and end in theirs."""

import itertools
from bisect import bisect_right
from collections import defaultdict
from dataclasses import replace

import pytest

from octojax.ir import Machine, Schedule, Timeline
from octojax.report import Panel, to_trace
from octojax.schedules import generate
from octojax.simulate import StageCosts, simulate


@pytest.fixture(scope="module")
def timeline() -> Timeline:
    table = Schedule.parse("0F0 0F1 0I0 0W0 0B1\n1F0 1I0 1W0 1F1 1B1")
    costs = StageCosts.unit(2, 1.0, 1.5, 0.5, 2.0)
    return simulate(table, costs, Machine(latency_s=0.25))


class Viewer:
    """Binds flows to slices as Perfetto does: to the slice of the thread open at their time."""

    def __init__(self, trace: dict) -> None:
        self.rows: dict[tuple, list[dict]] = defaultdict(list)
        self.flows: dict[str, list[dict]] = defaultdict(list)
        for event in trace["traceEvents"]:
            if event["ph"] == "X":
                self.rows[event["pid"], event["tid"]].append(event)
            elif event["ph"] in "stf":
                self.flows[event["id"]].append(event)
        for thread, row in self.rows.items():
            row.sort(key=lambda e: e["ts"])
            for one, other in itertools.pairwise(row):
                assert round(1e3 * (one["ts"] + one["dur"])) <= round(1e3 * other["ts"]), thread

    def at(self, event: dict) -> dict:
        row = self.rows[event["pid"], event["tid"]]
        slice_ = row[bisect_right(row, event["ts"], key=lambda e: e["ts"]) - 1]
        assert slice_["ts"] <= event["ts"] < slice_["ts"] + slice_["dur"], event
        return slice_

    def arrows(self) -> dict[str, tuple[str, ...]]:
        """The names of the slices that each flow goes through, in order of time."""
        found = {}
        for name, events in self.flows.items():
            assert [e["ph"] for e in events] == ["s", "t", "f"]
            assert [e["ts"] for e in events] == sorted(e["ts"] for e in events)
            assert events[-1]["bp"] == "e"
            found[name] = tuple(self.at(e)["name"] for e in events)
        return found


def test_slices_arrows_and_names(timeline):
    trace = to_trace([Panel("plan", timeline), Panel("again", timeline)])
    viewer = Viewer(trace)
    slices = [e for e in viewer.rows[1, 1] if e["cat"] not in ("transfer", "bubble")]
    assert len(slices) == sum(s.rank == 1 for s in timeline.actions)
    one = next(e for e in slices if e["name"] == "1F0")
    assert (one["ts"], one["dur"]) == (1.25e6, 1e6)
    assert set(viewer.arrows().values()) == {
        ("0F0", "0SEND_F0", "1F0"),
        ("0F1", "0SEND_F1", "1F1"),
        ("1I0", "1SEND_B0", "0I0"),
        ("1B1", "1SEND_B1", "0B1"),
    }
    names = {e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "process_name"}
    assert names == {"plan", "again"}


@pytest.mark.parametrize("name", ["zb-v", "dualpipe", "interleaved", "gpipe"])
def test_arrows_of_published_schedules_bind_to_maker_and_user(name):
    table = generate(name, 4, 8)
    costs = StageCosts.unit(table.num_stages, 0.37e-3, 0.41e-3, 0.11e-3)
    line = simulate(table, costs, Machine(latency_s=0.013e-3))
    arrows = Viewer(to_trace([Panel(name, line)])).arrows()
    assert len(arrows) == len(line.transfers) > 0
    for maker, moved, user in arrows.values():
        stage, kind_microbatch = moved.split("SEND_")
        step = 1 if kind_microbatch[0] == "F" else -1
        kinds = "F" if kind_microbatch[0] == "F" else "IB"
        assert any(f"{stage}{k}{kind_microbatch[1:]}" in maker for k in kinds)
        assert any(f"{int(stage) + step}{k}{kind_microbatch[1:]}" in user for k in kinds)


def test_bubbles_say_what_they_wait_for(timeline):
    rows = Viewer(to_trace([Panel("plan", timeline)])).rows
    for rank, account in enumerate(timeline.ranks):
        bubbles = [e for e in rows[0, rank] if e["cat"] == "bubble"]
        assert sum(e["dur"] for e in bubbles) == pytest.approx(1e6 * account.bubble_s)
    assert rows[0, 1][0]["args"] == {
        "waits_for": "computation", "on": "0F0", "peer_rank": 0, "before": "1F0",
    }  # fmt: skip


def test_slices_name_their_layers_and_bytes(timeline):
    moved = replace(timeline, transfers=tuple(replace(t, nbytes=8.0) for t in timeline.transfers))
    panel = Panel("plan", moved, layers=("layer 0: embed", "layers 1-2: x, y"))
    rows = Viewer(to_trace([panel])).rows
    args = {e["name"]: e["args"] for e in rows[0, 0] + rows[0, 1]}
    assert args["1F0"] == {
        "stage": 1, "microbatch": 0, "layers": "layers 1-2: x, y", "received_bytes": 8.0,
    }  # fmt: skip
    assert args["1I0"]["sent_bytes"] == 8.0
    assert "sent_bytes" not in args["0W0"]


def test_transfers_without_their_actions_have_no_arrow(timeline):
    alone = replace(timeline, actions=tuple(s for s in timeline.actions if s.rank == 0))
    viewer = Viewer(to_trace([Panel("half", alone)]))
    assert viewer.arrows() == {}
    assert len(viewer.rows[0, 2]) == 2
