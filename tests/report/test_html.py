"""The page as a file: well formed, complete, small, and what its arrays hold."""

import base64
import itertools
import json
import math
import re
import zlib
from dataclasses import replace
from html import unescape
from html.parser import HTMLParser
from typing import Any

import numpy as np
import pytest

from octojax.ir import Timeline
from octojax.report import Panel, render_html
from octojax.report.arrays import CAUSES, KINDS, panel_data
from octojax.report.html import DARK_PAGE, LIGHT_PAGE, is_large
from octojax.simulate.critical import chains_of
from tests.report.pages import uneven
from tests.report.test_panel import SIGHT, lab, xyz


def columns_of(data: dict[str, Any]) -> dict[str, np.ndarray]:
    """Reads a panel's arrays back, as the page does."""
    raw, at, columns = zlib.decompress(base64.b64decode(data["blob"])), 0, {}
    for name, length, differences in data["columns"]:
        planes = np.frombuffer(raw[at : at + 4 * length], np.uint8).reshape(4, length)
        values = np.ascontiguousarray(planes.T).view("<i4").reshape(-1)
        columns[name] = np.cumsum(values, dtype=np.int32) if differences else values
        at += 4 * length
    assert at == len(raw)
    return columns


def in_order(timeline: Timeline):
    return sorted(timeline.actions, key=lambda s: (s.rank, s.start_s))


def test_the_page_is_well_formed_and_needs_no_other_file():
    page = render_html([Panel("<plan>", uneven("1f1b", 2, 3))], "a <title>")
    opened: list[str] = []

    class Check(HTMLParser):
        def handle_starttag(self, tag, attrs):
            if tag not in ("meta", "input", "br"):
                opened.append(tag)
            assert not {"src", "href", "onclick"} & {name for name, _ in attrs}

        def handle_endtag(self, tag):
            assert opened.pop() == tag

    Check().feed(page)
    assert opened == []
    assert "<title>a &lt;title&gt;</title>" in page
    assert "default-src 'none'" in page
    assert not re.search(r"https?://", page)


@pytest.mark.parametrize("name", ["1f1b", "zb-v", "dualpipe"])
def test_arrays_hold_every_action_transfer_and_idle_time(name):
    timeline = uneven(name, 4, 8)
    data = panel_data(Panel("x", timeline))
    c, tick = columns_of(data), data["tick_s"]
    near = {"rel": 0, "abs": tick}
    spans = in_order(timeline)
    assert c["start"] * tick == pytest.approx([s.start_s for s in spans], **near)
    assert (c["start"] + c["length"]) * tick == pytest.approx([s.end_s for s in spans], **near)
    for i, span in enumerate(spans):
        parts = getattr(span.item, "actions", (span.item,))
        assert (c["stage0"][i], c["microbatch0"][i]) == (parts[0].stage, parts[0].microbatch)
        if len(parts) == 1:
            assert (*KINDS, "pair")[c["kind"][i]] == parts[0].kind.value
            assert c["stage1"][i] == c["microbatch1"][i] == -1
        else:
            assert c["kind"][i] == len(KINDS)
            assert (c["stage1"][i], c["microbatch1"][i]) == (parts[1].stage, parts[1].microbatch)
    assert np.diff(c["first"]).tolist() == [
        sum(s.rank == r for s in spans) for r in range(len(timeline.ranks))
    ]
    moved = timeline.transfers
    sizes = [data["sizes"][k] for k in c["transfer_size"]]
    assert sizes == [t.nbytes for t in moved]
    assert c["transfer_source"].tolist() == [t.source for t in moved]
    assert c["transfer_start"] * tick == pytest.approx([t.start_s for t in moved], **near)
    ends = (c["transfer_start"] + c["transfer_length"]) * tick
    assert ends == pytest.approx([t.end_s for t in moved], **near)
    for maker, taker, t in zip(c["transfer_maker"], c["transfer_taker"], moved, strict=True):
        assert (spans[maker].rank, spans[taker].rank) == (t.source, t.target)
        assert spans[maker].end_s <= t.start_s + tick
        assert t.end_s <= spans[taker].start_s + tick
    gaps = sorted(timeline.gaps, key=lambda g: (g.rank, g.start_s))
    names = [str(s.item) for s in spans] + [t.name for t in moved]
    assert [names[i] if i >= 0 else "" for i in c["gap_on"]] == [g.on for g in gaps]
    causes = {"computation": "dependency"}
    assert [CAUSES[i] for i in c["gap_wait"]] == [causes.get(g.cause, g.cause) for g in gaps]
    assert [i == 0 for i in c["gap_cause"]] == [g.boundary for g in gaps]
    levels = [level for row in timeline.memory for _, level in row]
    assert c["memory_level"] * data["memory_unit"] == pytest.approx(levels, rel=1e-8)


def test_chains_and_slack_are_those_of_the_simulator():
    timeline = uneven("zb-h1", 4, 8)
    data = panel_data(Panel("x", timeline))
    c, chains = columns_of(data), chains_of(timeline)
    names = [str(s.item) for s in in_order(timeline)] + [t.name for t in timeline.transfers]
    own = [str(getattr(e, "item", getattr(e, "name", ""))) for e in chains.events]
    count = len(timeline.actions)
    before = np.concatenate((c["before"], c["transfer_before"]))
    slack = np.concatenate((c["slack"], c["transfer_slack"])) * data["tick_s"]
    followed = {names[i]: names[i - step] if i - step >= 0 else "" for i, step in enumerate(before)}
    assert followed == {own[i]: own[b] if b >= 0 else "" for i, b in enumerate(chains.before)}
    assert dict(zip(names, slack, strict=True)) == pytest.approx(
        dict(zip(own, chains.slack_s, strict=True)), abs=data["tick_s"]
    )
    assert len(own) == count + len(timeline.transfers)


def test_markup_in_names_stays_text():
    evil = "</script><img src=x onerror=alert(1)>"
    timeline = uneven("1f1b", 2, 2)
    page = render_html([Panel(evil, timeline, note=evil, layers=(evil, evil))], evil)
    assert "<img" not in page
    assert page.count("</script>") == 2
    text = re.search(r'id="data">(.*?)</script>', page, re.S).group(1)
    (panel,) = json.loads(text)
    assert (panel["title"], panel["layers"], panel["note"]) == (evil, [evil, evil], evil)


def test_dollars_in_names_are_no_places_of_the_template():
    page = render_html([Panel("$script", uneven("1f1b", 2, 2))], "$data")
    assert "<h1>$data</h1>" in page


def test_tables_tell_the_difference_to_the_first():
    first, second = uneven("1f1b", 4, 8), uneven("zb-h1", 4, 8)
    page = render_html([Panel("a", first), Panel("b", second)])
    more = second.makespan_s / first.makespan_s - 1
    assert f"{more:+.1%} of the first timeline's step" in unescape(page)
    assert page.count("busy, against the first") == 1
    assert page.count("<table>") == 2


def test_a_page_of_very_many_actions_stays_small():
    timeline = uneven("zb-h1", 64, 112)
    assert len(timeline.actions) == 21_504
    assert len(render_html([Panel("crowded", timeline)])) < 500_000
    assert not is_large([Panel("crowded", timeline)])
    assert is_large([Panel("crowded", timeline)] * 50)


def test_what_a_page_does_without():
    """No actions, no idle times, no memory, huge memory, and a timeline that no step can have."""
    whole = uneven("1f1b", 2, 2)
    bare = replace(whole, gaps=(), memory=(), transfers=())
    assert columns_of(panel_data(Panel("bare", bare)))["gap_rank"].size == 0
    empty = Timeline(0.0, (), (), ())
    assert "Reading" in render_html([Panel("empty", empty), Panel("bare", whole)])
    assert "Reading" in render_html([])
    huge = tuple(tuple((t, 1e12 * b) for t, b in row) for row in whole.memory)
    data = panel_data(Panel("huge", replace(whole, memory=huge)))
    levels = columns_of(data)["memory_level"] * data["memory_unit"]
    assert levels == pytest.approx([b for row in huge for _, b in row], rel=1e-8)
    instant = tuple(replace(s, start_s=0.0, end_s=0.0) for s in whole.actions)
    mixed = replace(whole, actions=instant[::-1])
    data = panel_data(Panel("circle", mixed))
    assert "wait for each other" in data["trouble"]
    assert columns_of(data)["slack"].tolist() == [0] * len(instant)
    units = replace(whole, unit="units")
    with pytest.raises(ValueError, match="no common time axis"):
        render_html([Panel("a", whole), Panel("b", units)])


@pytest.mark.parametrize("palette", [LIGHT_PAGE, DARK_PAGE], ids=["light", "dark"])
def test_text_is_readable(palette):
    for name in ("ink", "soft", "bound", "accent"):
        low, high = sorted((xyz(palette[name])[1], xyz(palette["paper"])[1]))
        assert (high + 0.05) / (low + 0.05) > 4.5, name


@pytest.mark.parametrize("sight", SIGHT)
@pytest.mark.parametrize("palette", [LIGHT_PAGE, DARK_PAGE], ids=["light", "dark"])
def test_busy_looks_different_from_idle_to_everyone(palette, sight):
    for kind, cause in itertools.product(KINDS, range(len(CAUSES))):
        busy, idle = (lab(palette[n], sight) for n in (f"kind-{kind}", f"cause-{cause}"))
        assert math.dist(busy, idle) > 15
