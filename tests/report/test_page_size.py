"""Pages of large plans stay small. What they cost to draw is measured by benchmarks/viewer.py."""

import pytest

from octojax.report import Panel, render_html
from tests.report.pages import layers, uneven


@pytest.mark.slow
@pytest.mark.parametrize(("microbatches", "actions"), [(112, 21_504), (520, 99_840)])
def test_pages_of_large_plans_are_small(microbatches, actions):
    timeline = uneven("zb-h1", 64, microbatches)
    assert len(timeline.actions) == actions
    page = render_html([Panel("x", timeline, layers=layers(64))])
    assert len(page.encode()) < 1_000_000
