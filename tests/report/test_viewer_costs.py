"""The viewer stays quick on large plans. Slow: CI runs it by itself."""

import pytest

from octojax.report import Panel, render_html
from tests.report.browser import opened
from tests.report.pages import layers, uneven
from tests.report.viewer_costs import costs_of


@pytest.mark.slow
@pytest.mark.parametrize(("microbatches", "actions"), [(112, 21_504), (520, 99_840)])
def test_first_picture_within_a_second_and_frames_within_sixteen_milliseconds(
    tmp_path, microbatches, actions
):
    timeline = uneven("zb-h1", 64, microbatches)
    assert len(timeline.actions) == actions
    path = tmp_path / "page.html"
    path.write_text(render_html([Panel("x", timeline, layers=layers(64))]), encoding="utf-8")
    assert path.stat().st_size < 2_000_000
    with opened() as page:
        costs = costs_of(page, path)
    assert costs.pop("first picture") < 1000
    if actions < 50_000:  # of the larger plan the benchmark tells
        assert max(costs.values()) < 16, costs
