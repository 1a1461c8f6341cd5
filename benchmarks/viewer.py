"""What the viewer costs at 21,500 and 100,000 actions: the page, the first picture, a frame.

    python benchmarks/viewer.py

zb-h1 on 64 ranks with uneven stages, in headless Chromium without a GPU, 1,300 x 900 pixels.
Processor time of the page's main thread by the browser's own clock; of frames the mean over 60,
and of three such rounds the median. Needs chromium, chromium-driver and octojax[test].
"""

import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from octojax.report import Panel, render_html
from tests.report.browser import opened
from tests.report.pages import layers, uneven
from tests.report.viewer_costs import costs_of


def main() -> None:
    """Prints a table of both sizes."""
    with tempfile.TemporaryDirectory() as folder, opened() as page:
        for microbatches in (112, 520):
            timeline = uneven("zb-h1", 64, microbatches)
            path = Path(folder) / f"{microbatches}.html"
            begin = time.process_time()
            text = render_html([Panel("zb-h1", timeline, layers=layers(64))])
            wrote_s = time.process_time() - begin
            path.write_text(text, encoding="utf-8")
            print(
                f"{len(timeline.actions):,} actions, {len(timeline.transfers):,} transfers: "
                f"page {len(text) / 1e6:.2f} MB, written in {wrote_s:.2f} s"
            )
            for name, milliseconds in costs_of(page, path).items():
                print(f"  {name:32} {milliseconds:7.1f} ms")


if __name__ == "__main__":
    main()
