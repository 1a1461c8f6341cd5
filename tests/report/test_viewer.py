"""The viewer in a real browser: what it shows is what the timeline holds."""

import json
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from octojax.ir import Action, ActionSpan, Kind, RankSummary, Timeline
from octojax.report import Panel, render_html
from octojax.report.panel import nbytes, seconds
from octojax.simulate.critical import chains_of
from tests.report.browser import Page, opened
from tests.report.pages import layers, uneven
from tests.report.test_panel import xyz

GIB = float(1 << 30)


@pytest.fixture(scope="module")
def page() -> Iterator[Page]:
    with opened() as browser:
        yield browser


@pytest.fixture(scope="module")
def timeline() -> Timeline:
    return uneven("1f1b", 4, 8)


@pytest.fixture(scope="module")
def one(timeline, tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("pages") / "one.html"
    panel = Panel(
        "simulated",
        timeline,
        timeline.makespan_s * 0.8,
        layers=layers(4),
        capacities_bytes=(8 * GIB,) * 4,
    )
    path.write_text(render_html([panel], "one"), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def several(timeline, tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("pages") / "several.html"
    panels = [
        Panel("simulated", timeline, layers=layers(4)),
        Panel("other plan", uneven("zb-v", 4, 8), 0.02, layers=layers(8)),
        Panel("paired", uneven("dualpipe", 4, 8)),
    ]
    path.write_text(render_html(panels, "several"), encoding="utf-8")
    return path


def place_of(page: Page, name: str, panel: int = 0) -> tuple[float, float]:
    """The middle of an action in the picture."""
    return tuple(
        page.js(
            """
            const { panels, rows, view } = octopipe.state;
            const p = panels[arguments[1]];
            let i = 0;
            while (nameIs(p, i) !== arguments[0]) i++;
            function nameIs(p, i) {
              return p.stages[0][i] + "FBIWR"[p.kind[i]] + p.microbatches[0][i];
            }
            const row = rows.find((r) => r.panel === p && r.rank === p.rank[i]);
            const y = 24 + row.top - view.scroll + row.height / 2;
            return [view.xOf((p.start[i] + p.end[i]) / 2), y];
            """,
            name,
            panel,
        )
    )


def test_it_loads_without_errors_and_without_network(page, one, several):
    page.console()
    for path in (one, several):
        page.open(path)
        asked = page.requests(path)
        assert asked
        assert asked <= {path.as_uri(), path.as_uri() + "#"}
    assert page.console() == []
    assert page.js("return document.getElementById('loading')") is None


@pytest.mark.parametrize("x", [150, 640, 1100])
def test_the_wheel_zooms_and_the_time_under_the_cursor_stays(page, one, x):
    page.open(one)
    for delta in (-240, -120, -300, 90):
        before = page.js(
            "const v = octopipe.state.view; return [v.timeAt(arguments[0]), v.to - v.from]", x
        )
        page.mouse("mouseWheel", x, 80, deltaX=0, deltaY=delta)
        page.wait(f"return octopipe.state.view.to - octopipe.state.view.from !== {before[1]!r}")
        after = page.js(
            "const v = octopipe.state.view; return [v.timeAt(arguments[0]), v.to - v.from]", x
        )
        assert after[0] == pytest.approx(before[0], rel=1e-9)
        assert (after[1] < before[1]) == (delta < 0)


def test_dragging_moves_the_picture_with_the_cursor(page, one):
    page.open(one, "t=0.01,0.02")
    time = page.js("return octopipe.state.view.timeAt(700)")
    page.drag((700, 100), (560, 100))
    assert page.js("return octopipe.state.view.timeAt(560)") == pytest.approx(time, rel=1e-9)
    assert page.js("return octopipe.state.pin") is None


def test_the_small_picture_shows_and_chooses_what_is_seen(page, one):
    page.open(one, "t=0.01,0.02")
    box = "const b = octopipe.minimap.%s.getBoundingClientRect(); return [b.left, b.right, b.top]"
    left, right, top = page.js(box % "canvas")
    whole = page.js("return octopipe.state.view.whole")
    frame = [(x - left) / (right - left) * whole for x in page.js(box % "frame")[:2]]
    assert frame == pytest.approx([0.01, 0.02], rel=0.02)
    at = {"x": left + 0.75 * (right - left), "y": top + 3}
    button = {"button": "left", "clickCount": 1}
    page.send("Input.dispatchMouseEvent", type="mousePressed", **at, **button)
    page.send("Input.dispatchMouseEvent", type="mouseReleased", **at, **button)
    page.frame()
    middle = page.js("const v = octopipe.state.view; return (v.from + v.to) / 2")
    assert middle == pytest.approx(0.75 * whole, rel=1e-3)


def test_keys_move_zoom_and_come_back(page, one):
    page.open(one)
    view = "const v = octopipe.state.view; return [v.from, v.to]"
    whole = page.js(view)
    page.key("w")
    page.key("w")
    near = page.js(view)
    assert near[1] - near[0] == pytest.approx(0.64 * (whole[1] - whole[0]))
    page.key("d")
    later = page.js(view)
    assert later[0] > near[0]
    page.key("ArrowLeft")
    assert page.js(view) == pytest.approx(near)
    page.key("a")
    assert page.js(view)[0] < near[0]
    page.key("s")
    page.key("0")
    assert page.js(view) == whole
    page.key("?")
    assert page.js("return document.getElementById('helping').open")
    page.key("Escape")
    page.js("document.getElementById('helping').close()")


def test_the_axis_is_divided_anew_at_every_zoom(page, one):
    page.open(one)
    for from_, to in ((0.0, 0.04), (0.01, 0.012), (0.0123, 0.01231)):
        page.js("octopipe.state.view.show(...arguments); octopipe.moved()", from_, to)
        page.frame()
        marks = page.js("return octopipe.ticks()")
        assert 4 <= len(marks) <= 24
        assert len({label for _, label in marks}) == len(marks)
        assert all(from_ <= time <= to * (1 + 1e-9) for time, _ in marks)


def test_pointing_at_an_action_tells_of_it(page, one, timeline):
    page.open(one)
    page.mouse("mouseMoved", *place_of(page, "1B3"))
    page.wait("return !octopipe.tip.hidden")
    lines = page.js("return [...octopipe.tip.children].map((c) => c.textContent)")
    span = next(s for s in timeline.actions if str(s.item) == "1B3")
    gap = next(g for g in timeline.gaps if g.before == "1B3" and g.cause == "transfer")
    moved = next(t for t in timeline.transfers if t.name == "2SEND_B3")
    assert lines[0] == "1B3: backward on rank 1"
    assert "layers 3-5: mamba, mlp, attention" in lines[1]
    took = seconds(span.end_s - span.start_s)
    assert lines[2] == f"{seconds(span.start_s)} to {seconds(span.end_s)}, takes {took}"
    assert f"received {nbytes(moved.nbytes)} from rank 2" in lines
    assert f"sent {nbytes(moved.nbytes)} to rank 0" in lines
    waited = seconds(gap.end_s - gap.start_s)
    assert f"waited {waited} for 2SEND_B3, the transfer from rank 2" in lines
    page.mouse("mouseMoved", 20, place_of(page, "1B3")[1])
    page.wait("return octopipe.tip.textContent.startsWith('rank 1busy')")
    page.mouse("mouseMoved", 20, 1)
    page.wait("return octopipe.tip.hidden")


def test_pointing_at_a_bubble_tells_its_cause(page, one, timeline):
    page.open(one)
    gap = max(
        (g for g in timeline.gaps if g.cause == "transfer" and not g.boundary),
        key=lambda g: g.end_s - g.start_s,
    )
    x = page.js("return octopipe.state.view.xOf(arguments[0])", (gap.start_s + gap.end_s) / 2)
    y = place_of(page, f"{gap.rank}F0")[1]
    page.mouse("mouseMoved", x, y)
    page.wait("return !octopipe.tip.hidden")
    text = page.js("return octopipe.tip.innerText")
    assert text.startswith(f"bubble of {seconds(gap.end_s - gap.start_s)}")
    assert "transfer: the value is made and has not arrived" in text
    assert f"for {gap.on}, the transfer from rank {gap.peer}" in text


def test_a_click_pins_an_action_with_its_slack_and_its_chain(page, one, timeline):
    page.open(one)
    chains = chains_of(timeline)
    names = [str(s.item) for s in timeline.actions] + [t.name for t in timeline.transfers]
    for name in ("2B1", "0B7", "3F5"):
        page.click(*place_of(page, name))
        number = names.index(name)
        text = page.js("return document.getElementById('details').innerText")
        assert text.startswith(name)
        slack = chains.slack_s[number]
        assert (f"{seconds(slack)}: so much later" if slack else "on a critical path") in text
        chain = [names[e] for e in reversed(chains.back_from(number))]
        shown = page.js(
            "return [...document.querySelectorAll('#chain button')].map(b => b.innerText)"
        )
        assert shown == chain
        assert chain[-1] == "0F0"
    page.js("document.querySelectorAll('#chain button')[2].click()")
    page.frame()
    assert page.js("return document.querySelector('#details h2').innerText") == chain[2]
    page.key("b")
    assert page.js("return document.querySelector('#details h2').innerText") == chain[3]
    page.key("Escape")
    assert page.js("return document.getElementById('details').hidden")


def test_actions_can_be_walked_without_a_mouse(page, one, timeline):
    page.open(one)
    row = [str(s.item) for s in timeline.actions if s.rank == 0]
    for name in row[:3]:
        page.key("]")
        assert page.js("return document.querySelector('#details h2').innerText") == name
        assert page.js("return octopipe.said.textContent").startswith(f"{name}: ")
    page.key("[")
    assert page.js("return document.querySelector('#details h2').innerText") == row[1]
    page.key("ArrowDown", modifiers=8)
    assert page.js("return octopipe.state.pin.panel.rank[octopipe.state.pin.event]") == 1
    page.key("f")
    assert page.js("const v = octopipe.state.view; return v.to - v.from") < timeline.makespan_s / 2


def test_the_critical_path_is_the_simulators(page, one, timeline):
    page.open(one)
    page.key("c")
    chains = chains_of(timeline)
    names = [str(s.item) for s in timeline.actions]
    wanted = {names[e] for e in chains.critical if e < len(names)}
    bright = page.js(
        """
        const p = octopipe.state.panels[0];
        return [...p.mask.keys()].filter((i) => p.mask[i]).map(
          (i) => p.stages[0][i] + "FBIWR"[p.kind[i]] + p.microbatches[0][i]);
        """
    )
    assert set(bright) == wanted


@pytest.mark.parametrize(
    ("text", "test"),
    [
        ("2F3", lambda s: str(s.item) == "2F3"),
        ("attention", lambda s: s.item.stage in (1, 3)),
        ("m7", lambda s: s.item.microbatch == 7),
        ("microbatch 7 stage 2", lambda s: (s.item.stage, s.item.microbatch) == (2, 7)),
        ("moe backward", lambda s: s.item.stage in (0, 2) and s.item.kind == "B"),
        ("rank 9", lambda s: False),
        ("nosuchlayer", lambda s: False),
    ],
)
def test_search_finds_actions_layers_and_microbatches(page, one, timeline, text, test):
    page.open(one)
    page.key("/")
    page.type(text)
    wanted = sorted((s for s in timeline.actions if test(s)), key=lambda s: s.start_s)
    assert page.js("return octopipe.count.textContent") == str(len(wanted))
    page.key("Enter")
    if wanted:
        assert page.js("return document.querySelector('#details h2').innerText") == str(
            wanted[0].item
        )
        assert page.js("return octopipe.count.textContent") == f"1 of {len(wanted)}"
    else:
        assert page.js("return document.getElementById('details').hidden")


@pytest.mark.parametrize("how", ["axis", "shift"])
def test_a_selection_sums_up_kinds_and_causes(page, several, how):
    page.open(several)
    y, modifiers = (8, 0) if how == "axis" else (60, 8)
    page.drag((300, y), (520, y), modifiers)
    from_, to = page.js("return octopipe.state.selection")
    assert (from_, to) == pytest.approx(
        page.js("const v = octopipe.state.view; return [v.timeAt(300), v.timeAt(520)]")
    )
    rows = page.js(
        """return [...document.querySelectorAll("#sums tr")].slice(1).map(
          (r) => [...r.children].map((c) => c.firstChild?.textContent ?? ""))"""
    )
    table = {name: cells for name, *cells in rows}
    timelines = [uneven(name, 4, 8) for name in ("1f1b", "zb-v", "dualpipe")]
    for number, timeline in enumerate(timelines):
        sums: dict[str, float] = defaultdict(float)
        for span in timeline.actions:
            inside = max(0.0, min(span.end_s, to) - max(span.start_s, from_))
            parts = getattr(span.item, "actions", (span.item,))
            for part in parts:
                sums[part.kind.value] += inside / len(parts)
        for name, cells in table.items():
            if not name.startswith("bubble"):
                assert cells[number] == seconds(sums[name[0]]), name
        gaps = [g for g in timeline.gaps if g.cause == "transfer" and not g.boundary]
        waited = sum(max(0.0, min(g.end_s, to) - max(g.start_s, from_)) for g in gaps)
        assert table["bubble: transfer"][number] == seconds(waited)


def busy_pixels(page: Page, panel: int, rank: int) -> tuple[dict[str, float], int]:
    """Pixels of every kind in a rank's row, over its height, and all that are not idle."""
    row = page.js(
        """
        const { view, rows } = octopipe.state;
        const row = rows.find((r) => r.panel.number === arguments[0] && r.rank === arguments[1]);
        const { pixels, width } = octopipe.picture.surface;
        const { looks } = octopipe.state.palette;
        const kinds = new Map();
        looks.forEach((variants, code) => variants && variants.forEach((look) => {
          for (const pixel of [look.base, look.line]) {
            const name = code < 5 ? "FBIWR"[code] : "idle";
            if (!kinds.has(pixel)) kinds.set(pixel, name);
            else if (kinds.get(pixel) !== name) throw Error(`${name}: ${kinds.get(pixel)}`);
          }
        }));
        const sums = {};
        for (let y = row.top - view.scroll; y < row.top - view.scroll + row.height; y++) {
          for (let x = 0; x < width; x++) {
            const name = kinds.get(pixels[y * width + x]) ?? "paper";
            sums[name] = (sums[name] ?? 0) + 1 / row.height;
          }
        }
        return [sums, width];
        """,
        panel,
        rank,
    )
    return tuple(row)


CROWDED = {
    "4": ("1f1b", 4, 8),
    "16": ("zb-h1", 16, 64),
    "64": ("zb-h1", 64, 112),
    "pairs": ("dualpipe", 8, 40),
}


@pytest.mark.parametrize(
    "size", [pytest.param(x, marks=[pytest.mark.slow] * (x == "64")) for x in CROWDED]
)
def test_busy_pixels_are_busy_time_at_every_zoom(page, tmp_path, size):
    timeline = uneven(*CROWDED[size])
    path = tmp_path / "crowded.html"
    path.write_text(render_html([Panel("crowded", timeline)]), encoding="utf-8")
    page.open(path)
    whole = 1.01 * timeline.makespan_s
    ranks = [0, len(timeline.ranks) // 3, 2 * len(timeline.ranks) // 5]
    for share, at in ((1.0, 0.0), (0.4, 0.5), (0.07, 0.47), (0.004, 0.481)):
        from_, to = at * whole, (at + share) * whole
        page.js("octopipe.state.view.show(...arguments); octopipe.moved()", from_, to)
        page.frame()
        for rank in ranks:
            pixels, width = busy_pixels(page, 0, rank)
            wanted: dict[str, float] = defaultdict(float)
            for span in timeline.actions:
                inside = min(span.end_s, to) - max(span.start_s, from_)
                if span.rank == rank and inside > 0:
                    parts = getattr(span.item, "actions", (span.item,))
                    for part in parts:
                        wanted[part.kind.value] += inside / (to - from_) * width / len(parts)
            busy = sum(pixels.get(kind, 0.0) for kind in "FBIWR")
            assert busy == pytest.approx(sum(wanted.values()), rel=0.01, abs=1.0)
            for kind, expected in wanted.items():
                assert pixels.get(kind, 0.0) == pytest.approx(expected, rel=0.02, abs=2.0)


def test_sparse_work_is_drawn_too(page, tmp_path):
    """Rows that are busy for a hundredth of every pixel's time, and of nearly all of it."""
    spans, at = [], 0.0
    for number in range(4000):
        length = 0.01 if number < 2000 else 0.99
        spans.append(ActionSpan(0, Action(0, Kind("FBW"[number % 3]), number), at, at + length))
        at += 1.0
    busy = sum(s.end_s - s.start_s for s in spans)
    ranks = (RankSummary(busy, at - busy, 0.0, at - busy, 1, 0.0),)
    path = tmp_path / "sparse.html"
    panel = Panel("sparse", Timeline(at, tuple(spans), (), ranks))
    path.write_text(render_html([panel]), encoding="utf-8")
    page.open(path)
    for from_, to, share in ((0.0, 2000.0, 0.01), (2000.0, 4000.0, 0.99), (0.0, 4000.0, 0.5)):
        page.js("octopipe.state.view.show(...arguments); octopipe.moved()", from_, to)
        page.frame()
        pixels, width = busy_pixels(page, 0, 0)
        drawn = sum(pixels.get(kind, 0.0) for kind in "FBW")
        assert drawn == pytest.approx(share * width, rel=0.01, abs=0.2)


def test_what_is_on_the_canvas_is_what_was_drawn(page, one):
    """Reads the canvas itself, between the labels' lines: the row is not covered by anything."""
    page.open(one)
    same = page.js(
        """
        const { surface, canvas } = octopipe.picture;
        const { rows, view } = octopipe.state;
        const y = rows[1].top + 1;
        const { pixels, width } = surface;
        const shown = canvas.getContext("2d").getImageData(view.left, 24 + y, width, 1).data;
        const drawn = new Uint8Array(pixels.buffer, 4 * y * width, 4 * width);
        return shown.every((value, i) => value === drawn[i]);
        """
    )
    assert same


def test_several_timelines_stand_on_one_clock(page, several, timeline):
    page.open(several)
    other = uneven("zb-v", 4, 8)
    ends = page.js(
        """
        const { panels, view } = octopipe.state;
        return panels.map((p) => (view.xOf(p.makespan_s) - view.left) / view.plot);
        """
    )
    longest = 1.01 * other.makespan_s
    assert ends[0] == pytest.approx(timeline.makespan_s / longest, rel=1e-6)
    assert ends[1] == pytest.approx(other.makespan_s / longest, rel=1e-6)
    order = "return octopipe.state.rows.map((r) => [r.panel.number, r.rank])"
    assert page.js(order)[:6] == [[0, -1], [0, 0], [0, 1], [0, 2], [0, 3], [1, -1]]
    page.key("g")
    assert page.js(order)[3:9] == [[0, 0], [1, 0], [2, 0], [0, 1], [1, 1], [2, 1]]
    y = place_of(page, "0F0", 1)[1]
    page.mouse("mouseMoved", 20, y)
    page.wait("return !octopipe.tip.hidden")
    difference = other.ranks[0].busy_s - timeline.ranks[0].busy_s
    assert f"against A: busy +{seconds(difference)}" in page.js("return octopipe.tip.innerText")


def test_memory_has_its_own_scale_and_the_capacity(page, one, timeline):
    page.open(one)
    lane = page.js(
        """
        const { rows, palette, panels } = octopipe.state;
        const { pixels, width } = octopipe.picture.surface;
        const row = rows[1];
        const top = row.top + row.height + 2;
        const heights = [];
        let capacity = -1;
        for (let y = 0; y < row.memory; y++) {
          if (pixels[(top + y) * width] === palette.capacity) capacity = y;
        }
        for (let x = 0; x < width; x++) {
          let count = 0;
          for (let y = 0; y < row.memory; y++) {
            const pixel = pixels[(top + y) * width + x];
            if (pixel === palette.memory || pixel === palette.memoryEdge) count++;
          }
          heights.push(count);
        }
        return { heights, capacity, tall: row.memory };
        """
    )
    peak = timeline.ranks[0].peak_bytes
    assert lane["capacity"] == 0  # at the top of the scale, since it is more than the peak
    assert max(lane["heights"]) == pytest.approx(peak / (8 * GIB) * lane["tall"], abs=1)
    page.mouse("mouseMoved", 640, place_of(page, "0F0")[1] + 30)
    page.wait("return octopipe.tip.innerText.startsWith('memory of rank 0')")
    assert f"at most {nbytes(peak)} of 8 GiB" in page.js("return octopipe.tip.innerText")
    page.key("m")
    assert page.js("return octopipe.state.rows[1].memory") == 0


def test_the_address_holds_the_state(page, several):
    page.open(several)
    page.js("octopipe.state.view.show(0.01, 0.02); octopipe.moved()")
    page.key("g")
    page.key("c")
    page.click(*place_of(page, "1F5"))
    page.drag((300, 8), (520, 8))
    page.key("/")
    page.type("mamba")
    page.wait("return location.hash.includes('q=mamba')")
    state = """
      const { view, pin, query, selection, critical, grouped } = octopipe.state;
      const { from, to } = view;
      return [from, to, pin.panel.number, pin.event, query, ...selection, critical, grouped];
    """
    before, hash_ = page.js(state), page.js("return location.hash.slice(1)")
    page.open(several, hash_)
    assert page.js(state) == pytest.approx(before)
    page.open(several, "t=x,y&pin=99,1&select=3,1&y=-7&theme=blue")  # nothing of it makes sense
    assert page.js("return octopipe.state.pin") is None
    assert page.js("return octopipe.state.selection") is None
    assert page.console() == []


@pytest.mark.parametrize("width", [360, 800, 2000])
def test_any_width(page, one, width):
    page.send(
        "Emulation.setDeviceMetricsOverride",
        width=width,
        height=700,
        deviceScaleFactor=2,
        mobile=False,
    )
    try:
        page.open(one)
        page.click(*place_of(page, "0F0"))
        inner, scroll, canvas = page.js(
            "const { canvas } = octopipe.picture;"
            "return [innerWidth, document.documentElement.scrollWidth, canvas.width]"
        )
        assert inner == width
        assert scroll <= width
        assert canvas <= 2 * width
        pixels, plot = busy_pixels_at_two(page)
        assert pixels == pytest.approx(plot, rel=0.01)
    finally:
        page.send("Emulation.clearDeviceMetricsOverride")


def busy_pixels_at_two(page: Page) -> tuple[float, float]:
    """At two pixels a CSS pixel: rank 0's busy pixels, and its busy time in those."""
    return tuple(
        page.js(
            """
            const { view, rows, panels, palette } = octopipe.state;
            const { pixels, width } = octopipe.picture.surface;
            const busy = new Set(palette.looks.slice(0, 5).flat().flatMap((l) => [l.base, l.line]));
            let count = 0;
            const top = 2 * rows[1].top;
            for (let y = top; y < top + 2 * rows[1].height; y++) {
              for (let x = 0; x < width; x++) count += busy.has(pixels[y * width + x]);
            }
            return [count / (2 * rows[1].height), (panels[0].busy_s[0] / view.whole) * width];
            """
        )
    )


def test_dark_and_light(page, one):
    looks = "const p = octopipe.state.palette; return [p.css.paper, p.looks[0][0].base]"
    page.open(one)
    light = page.js(looks)
    feature = {"name": "prefers-color-scheme", "value": "dark"}
    page.send("Emulation.setEmulatedMedia", features=[feature])
    try:
        page.wait("return octopipe.state.palette.css.paper === '#0d1117'")
        dark = page.js(looks)
        assert light[0] == "#ffffff"
        assert light[1] != dark[1]
        assert (
            page.js("return getComputedStyle(document.body).backgroundColor") == "rgb(13, 17, 23)"
        )
        page.open(one, "theme=light")
        assert page.js(looks) == light
    finally:
        page.send("Emulation.setEmulatedMedia", features=[])
    page.open(one, "theme=dark")
    assert page.js(looks) == dark


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_labels_can_be_read_on_every_bar(page, one, theme):
    page.open(one, f"theme={theme}")
    looks = page.js(
        """
        const { looks } = octopipe.state.palette;
        return looks.slice(0, 5).flatMap((l) => l.slice(0, 8).map((v) => [v.base, v.text]));
        """
    )
    for pixel, text in looks:
        base = "#" + pixel.to_bytes(4, "little")[:3].hex()
        low, high = sorted((xyz(base)[1], xyz(text)[1]))
        assert (high + 0.05) / (low + 0.05) > 4.5, (base, text)


def test_kinds_differ_by_hatching(page, one):
    page.open(one)
    tiles = page.js(
        "const { looks } = octopipe.state.palette;"
        "return looks.map((l) => l && JSON.stringify([...(l[0].tile ?? [])]))"
    )
    kinds, causes = tiles[:5], tiles[6:]
    assert len(set(kinds)) == 5
    assert len(set(causes)) == 5


def test_markup_in_names_is_shown_and_never_run(page, tmp_path, timeline):
    evil = "</script><img src=x onerror='window.hurt=1'><b>"
    path = tmp_path / "evil.html"
    panel = Panel(evil, timeline, note=evil, layers=(evil,) * 4)
    path.write_text(render_html([panel, replace(panel)], evil), encoding="utf-8")
    page.open(path)
    page.click(*place_of(page, "1F2"))
    page.mouse("mouseMoved", *place_of(page, "1F3"))
    page.wait("return !octopipe.tip.hidden")
    assert evil in page.js("return octopipe.tip.innerText")
    assert evil in page.js("return document.getElementById('details').innerText")
    assert evil in page.js("return document.querySelector('h1').innerText")
    assert page.js("return document.querySelectorAll('img, b').length") == 0
    assert page.js("return window.hurt") is None
    assert page.console() == []


def test_a_timeline_that_cannot_be_and_one_without_actions(page, tmp_path, timeline):
    instant = tuple(replace(s, start_s=0.0, end_s=0.0) for s in timeline.actions)
    circle = replace(timeline, actions=instant[::-1])
    path = tmp_path / "odd.html"
    path.write_text(render_html([Panel("circle", circle)]), encoding="utf-8")
    page.open(path)
    page.key("]")
    assert "wait for each other" in page.js("return document.getElementById('details').innerText")
    skewed = tuple(replace(s, start_s=0.8 * s.start_s) for s in timeline.actions)
    path.write_text(
        render_html([Panel("skewed", replace(timeline, actions=skewed))]), encoding="utf-8"
    )
    page.open(path)
    assert page.js(
        """
        const { first, start, end } = octopipe.state.panels[0].pieces;
        for (let i = 1; i < first[1]; i++) if (start[i] !== end[i - 1]) return false;
        return start[0] === 0 && Math.abs(end[first[1] - 1] - arguments[0]) < 1e-9;
        """,
        timeline.makespan_s,
    )
    path.write_text(render_html([Panel("none", Timeline(0.0, (), (), ()))]), encoding="utf-8")
    page.open(path)
    path.write_text(render_html([]), encoding="utf-8")
    page.open(path)
    assert page.console() == []


def test_a_damaged_page_says_so(page, tmp_path, one):
    path = tmp_path / "damaged.html"
    text = one.read_text(encoding="utf-8")
    data = json.loads(text.split('id="data">')[1].split("</script>")[0])
    path.write_text(text.replace(data[0]["blob"], data[0]["blob"][:80]), encoding="utf-8")
    page.driver.get(path.as_uri())
    page.wait(
        "return document.getElementById('loading')?.textContent.startsWith('This page is damaged')"
    )
    page.console()
