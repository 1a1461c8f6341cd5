"""What the pictures' files hold: valid, complete, true to scale, read back."""

import csv
import io
import json
import math
import xml.etree.ElementTree as ET
from dataclasses import replace

import pytest

from octojax.errors import FormatError
from octojax.ir import Machine, Schedule, Timeline
from octojax.report import Panel, from_json, render_svg, to_csv, to_json, to_trace
from octojax.report.data import load_timeline, save_timeline
from octojax.simulate import StageCosts, simulate

SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture(scope="module")
def timeline() -> Timeline:
    table = Schedule.parse("0F0 0F1 0I0 0W0 0B1\n1F0 1I0 1W0 1F1 1B1")
    costs = StageCosts.unit(2, 1.0, 1.5, 0.5, 2.0)
    return simulate(table, costs, Machine(latency_s=0.25))


def bars(root: ET.Element) -> list[ET.Element]:
    return [g for g in root.iter(f"{SVG}g") if "data-a" in g.attrib]


def test_svg_has_a_bar_per_action_true_to_scale(timeline):
    root = ET.fromstring(render_svg([Panel("a & b", timeline, bound_s=5.0)]))
    drawn = bars(root)
    assert sorted(g.get("data-a") for g in drawn) == sorted(str(s.item) for s in timeline.actions)
    lengths, widths = [], []
    for g in drawn:
        lengths.append(float(g.get("data-e")) - float(g.get("data-s")))
        widths.append(float(g.find(f"{SVG}rect").get("width")))
    scale = 1100 / timeline.makespan_s
    assert widths == pytest.approx([x * scale for x in lengths], abs=0.01)


def test_svg_scales_panels_alike(timeline):
    double = simulate(
        Schedule.parse("0F0 0F1 0I0 0W0 0B1\n1F0 1I0 1W0 1F1 1B1"),
        StageCosts.unit(2, 2.0, 3.0, 1.0, 4.0),
        Machine(latency_s=0.5),
    )
    root = ET.fromstring(render_svg([Panel("one", timeline), Panel("two", double)]))
    first = {p: next(g for g in bars(root) if g.get("data-p") == p) for p in "01"}
    one, two = (float(first[p].find(f"{SVG}rect").get("width")) for p in "01")
    assert two == pytest.approx(2 * one, abs=0.02)


def test_json_reads_back_exactly(timeline, tmp_path):
    assert from_json(json.loads(json.dumps(to_json(timeline)))) == timeline
    save_timeline(timeline, tmp_path / "t.json")
    assert load_timeline(tmp_path / "t.json") == timeline


SPAN = {"rank": 0, "action": "0F0", "start_s": 0, "end_s": 1}
SENT = {
    "source": 0,
    "target": 1,
    "stage": 0,
    "kind": "F",
    "microbatch": 0,
    "start_s": 0,
    "end_s": 1,
}
BROKEN = (
    ({"makespan_s": "x"}, "expected a finite number >= 0, found 'x'"),
    ({"makespan_s": math.nan}, "expected a finite number >= 0, found nan"),
    ({"makespan_s": 0}, "0F0 on rank 0 ends after the makespan, 0 s"),
    ({"actions": 5}, "'int' object is not iterable"),
    ({"actions": [{**SPAN, "rank": 9}]}, r"0F0 on rank 9: there are 2 ranks \(0 to 1\)"),
    ({"actions": [{**SPAN, "rank": "x"}]}, "0F0 on rank 'x': there are 2 ranks"),
    ({"actions": [{**SPAN, "start_s": "x"}]}, "expected a finite number >= 0, found 'x'"),
    ({"actions": [{**SPAN, "start_s": 2}]}, "0F0 on rank 0 ends at 1 s, before its start, 2 s"),
    (
        {"actions": [{**SPAN, "action": "0SEND_F0"}]},
        "0SEND_F0 .* transfers belong",
    ),
    ({"ranks": {}}, "0F0 on rank 0: there are 0 ranks"),
    ({"ranks": [{"x": 1}]}, ".*unexpected keyword argument 'x'"),
    (
        {"transfer_spans": [{**SENT, "target": 9}]},
        ".* to rank 9: there are 2 ranks",
    ),
    ({"transfer_spans": [{**SENT, "stage": "x"}]}, "expected a finite number >= 0, found 'x'"),
    ({"memory": [[1, 2]]}, "cannot unpack"),
    ({"memory": [[["x", 2]]]}, "expected a finite number >= 0, found 'x'"),
)


def test_json_errors_name_file_and_field(timeline, tmp_path):
    with pytest.raises(FormatError, match=r"x\.json: not a timeline: expected .*makespan_s"):
        from_json({"layers": []}, "x.json")
    data = to_json(timeline)
    with pytest.raises(FormatError, match="timeline of version 9, written by a newer octojax"):
        from_json({**data, "version": 9})
    with pytest.raises(FormatError, match="broken timeline: something lacks its 'rank'"):
        from_json({**data, "actions": [{"action": "0F0"}]})
    for change, message in BROKEN:
        with pytest.raises(FormatError, match=r"x\.json: broken timeline: " + message):
            from_json({**data, **change}, "x.json")
    (tmp_path / "t.json").write_text("{")
    with pytest.raises(FormatError, match=r"t\.json ends in the middle \(line 1\)"):
        load_timeline(tmp_path / "t.json")


def test_csv_has_every_action_and_transfer(timeline):
    rows = list(csv.DictReader(io.StringIO(to_csv([Panel("a, b", timeline)]))))
    assert len(rows) == len(timeline.actions) + len(timeline.transfers)
    assert {row["timeline"] for row in rows} == {"a, b"}
    first = next(row for row in rows if row["action"] == "1F0")
    assert (first["rank"], float(first["start_s"]), float(first["end_s"])) == ("1", 1.25, 2.25)
    sent = next(row for row in rows if row["action"] == "0SEND_F0")
    assert (sent["to_rank"], float(sent["start_s"])) == ("1", 1.0)


def test_memory_is_drawn_and_counted(timeline):
    traced = replace(timeline, memory=(((0.0, 0.0), (1.0, 2048.0)), ((0.0, 0.0), (2.0, 1024.0))))
    root = ET.fromstring(render_svg([Panel("m", traced)]))
    lines = list(root.iter(f"{SVG}polyline"))
    assert len(lines) == 2
    assert "at most 2 KiB" in lines[0].find(f"{SVG}title").text
    counters = [e for e in to_trace([Panel("m", traced)])["traceEvents"] if e["ph"] == "C"]
    assert [e["args"]["bytes"] for e in counters] == [0.0, 2048.0, 0.0, 1024.0]
