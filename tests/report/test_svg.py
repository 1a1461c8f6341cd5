"""The picture that other programs draw: literal colours, and busy time that is never idle."""

import itertools
import re
import shutil
import subprocess
import xml.etree.ElementTree as ET
import zlib
from collections import defaultdict

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octojax.ir import ActionSpan, Machine, RankSummary, Schedule, Timeline, parse_item
from octojax.report import Panel, render_svg
from octojax.report.columns import Column, condensed, thinned
from octojax.report.panel import LEGEND, LIGHT, bars
from octojax.report.svg import Layout
from octojax.simulate import StageCosts, simulate

SVG = "{http://www.w3.org/2000/svg}"
ROW = Layout().row


def crowded(microbatches: int, latency_s: float = 0.0) -> Timeline:
    """A pipeline of two ranks with many short actions of three kinds."""
    order = range(microbatches)
    first = " ".join(f"0F{m} 0I{m} 0W{m}" for m in order)
    last = " ".join(f"1F{m} 1I{m} 1W{m}" for m in order)
    costs = StageCosts.unit(2, 1.0, 1.3, 0.2)
    return simulate(Schedule.parse(f"{first}\n{last}"), costs, Machine(latency_s=latency_s))


def area_by_rank(picture: str) -> dict[int, dict[str, float]]:
    """Pixels of each kind of action in each rank's row, divided by the row's height."""
    found: dict[int, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for group in ET.fromstring(picture).iter(f"{SVG}g"):
        name = group.get("class", "")
        if "span" not in name:
            continue
        for rect in group.iter(f"{SVG}rect"):
            kind = rect.get("class") or name.split()[2]
            area = float(rect.get("width")) * float(rect.get("height")) / ROW
            found[int(group.get("data-r"))][kind] += area
    return found


def busy_pixels(timeline: Timeline) -> dict[int, dict[str, float]]:
    found: dict[int, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for bar in bars(timeline):
        length = (bar.end_s - bar.start_s) / timeline.makespan_s * Layout().plot
        found[bar.rank][bar.action.kind.value] += length
    return found


def test_nothing_needs_a_style_sheet():
    picture = render_svg([Panel("a", crowded(4), bound_s=8.0, note="a <note>")])
    assert "var(" not in picture
    assert "<style" not in picture
    root = ET.fromstring(picture)
    for shape in ("rect", "text", "polyline"):
        for each in root.iter(SVG + shape):
            assert re.fullmatch("none|#[0-9a-f]{6}", each.get("fill", "")), each.attrib
    assert all("stroke" not in rect.attrib for rect in root.iter(f"{SVG}rect"))
    assert "a &lt;note&gt;" in picture


@pytest.mark.parametrize("microbatches", [3, 300, 1500])
@pytest.mark.parametrize("latency_s", [0.0, 2.5])
def test_busy_pixels_are_busy_time(microbatches, latency_s):
    timeline = crowded(microbatches, latency_s)
    drawn = area_by_rank(render_svg([Panel("crowded", timeline)]))
    for rank, kinds in busy_pixels(timeline).items():
        assert drawn[rank] == pytest.approx(kinds, rel=0.01)


@settings(deadline=None, max_examples=60)
@given(
    times=st.lists(
        st.tuples(st.floats(0.0, 3.0), st.floats(0.0, 0.4) | st.floats(0.5, 5.0)), max_size=30
    ),
    least=st.floats(0.1, 2.0),
)
def test_columns_keep_every_kinds_time_and_do_not_overlap(times, least):
    row, at = [], 0.0
    for number, (gap, length) in enumerate(times):
        item = parse_item(f"0{'FBW'[number % 3]}{number}")
        row.append(ActionSpan(0, item, at + gap, at + gap + length))
        at += gap + length
    timeline = Timeline(at, tuple(row), (), (RankSummary(at, 0.0, 0.0, 0.0, 0, 0.0),))
    pieces = list(condensed(bars(timeline), least))
    sums = dict.fromkeys(LEGEND, 0.0)
    for piece in pieces:
        if isinstance(piece, Column):
            assert sum(piece.busy_s.values()) <= (piece.end_s - piece.start_s) * (1 + 1e-6) + 1e-9
            for kind, busy in piece.busy_s.items():
                sums[kind] += busy
        else:
            sums[piece.action.kind.value] += piece.end_s - piece.start_s
    for kind in "FBW":
        whole = [s.end_s - s.start_s for s in row if s.item.kind.value == kind]
        assert sums[kind] == pytest.approx(sum(whole), abs=1e-9)
    for one, next_ in itertools.pairwise(pieces):
        assert one.end_s <= next_.start_s + 1e-9


@given(sizes=st.lists(st.floats(0.0, 10.0), min_size=1, max_size=50), least=st.floats(0.5, 20.0))
def test_thinned_lines_keep_the_peak_and_the_end(sizes, least):
    points = [(float(at), size) for at, size in enumerate(sizes)]
    kept = list(thinned(points, least))
    assert max(size for _, size in kept) == max(sizes)
    assert kept[-1] == points[-1]
    assert set(kept) <= set(points)
    assert [t for t, _ in kept] == sorted(t for t, _ in kept)


def test_labels_of_several_digits_are_written():
    names, ends = ("F12345", "B12345", "F1678", "F9"), (2.2, 8.2, 9.0, 9.4)
    spans = [
        ActionSpan(0, parse_item(f"0{name}"), start, end)
        for name, start, end in zip(names, (0.0, *ends[:-1]), ends, strict=True)
    ]
    timeline = Timeline(9.4, tuple(spans), (), (RankSummary(9.4, 0.0, 0.0, 0.0, 1, 0.0),))
    root = ET.fromstring(render_svg([Panel("wide", timeline)], Layout(plot=103.4)))
    bars_ = [g for g in root.iter(f"{SVG}g") if g.get("data-a")]
    texts = [(t.text, "transform" in t.attrib) for g in bars_ for t in g.iter(f"{SVG}text")]
    assert texts == [("12345", False), ("0B12345", False), ("1678", True)]


@pytest.mark.skipif(not shutil.which("rsvg-convert"), reason="needs rsvg-convert")
def test_rsvg_draws_what_was_meant(tmp_path):
    """Pixels in the colour of a kind in each row, against the time that it took."""
    timeline = crowded(1500, 2.5)
    done = subprocess.run(
        ["rsvg-convert", "-f", "png"],
        input=render_svg([Panel("crowded", timeline)]).encode(),
        capture_output=True,
        timeout=60,
        check=True,
    )
    rows = pixels(done.stdout)
    assert rows[2][5] == b"\xff\xff\xff"
    assert bytes.fromhex("1f2328") in [cell for row in rows[10:30] for cell in row]
    for rank, kinds in busy_pixels(timeline).items():
        top = 8 + 30 + 22 + rank * 32
        cells = [cell for row in rows[top : top + 26] for cell in row[64 : 64 + 1100]]
        idle = sum(cell == bytes.fromhex("eff1f3") for cell in cells) / 26
        assert idle <= 1100 - 0.99 * sum(kinds.values())  # edges are blends of idle and busy
        for kind, expected in kinds.items():
            share = sum(cell == bytes.fromhex(LIGHT[kind][1:]) for cell in cells) / 26
            assert share == pytest.approx(expected, rel=0.2, abs=40)


def pixels(png: bytes) -> list[list[bytes]]:
    """Returns the red, green and blue of every pixel of a picture, row by row."""
    at, data, header = 8, b"", b""
    while at < len(png):
        size, name = int.from_bytes(png[at : at + 4], "big"), png[at + 4 : at + 8]
        body = png[at + 8 : at + 8 + size]
        header = body if name == b"IHDR" else header
        data += body if name == b"IDAT" else b""
        at += size + 12
    width, height = (int.from_bytes(header[i : i + 4], "big") for i in (0, 4))
    each = {2: 3, 6: 4}[header[9]]  # RGB or RGBA
    raw, line = zlib.decompress(data), each * width
    rows, last = [], bytes(line)
    for y in range(height):
        how, *values = raw[y * (line + 1) : (y + 1) * (line + 1)]
        row = bytearray(values)
        for i in range(line):
            left, above = row[i - each] if i >= each else 0, last[i]
            corner = last[i - each] if i >= each else 0
            row[i] = (row[i] + _predicted(how, left, above, corner)) % 256
        last = bytes(row)
        rows.append([last[i : i + 3] for i in range(0, line, each)])
    return rows


def _predicted(how: int, left: int, above: int, corner: int) -> int:
    if how == 4:
        near = {left: abs(above - corner), above: abs(left - corner)}
        nearest = min((left, above), key=lambda v: near[v])
        return nearest if near[nearest] <= abs(left + above - 2 * corner) else corner
    return (0, left, above, (left + above) // 2)[how]
