"""A real browser without a window, for tests of the page."""

import json
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--force-device-scale-factor=1",
    "--window-size=1300,900",
)
NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


class Page:
    """One page in a browser. `js` runs the body of a function and returns what that does."""

    def __init__(self, driver: Any) -> None:
        self.driver = driver

    def open(self, path: Path, hash_: str = "") -> None:
        self.driver.get("about:blank")
        self.driver.get(f"{path.as_uri()}#{hash_}")
        self.wait("return window.octopipe && octopipe.frames.length > 0")

    def js(self, body: str, *values: Any) -> Any:
        return self.driver.execute_script(body, *values)

    def wait(self, body: str, seconds: float = 20.0) -> Any:
        end = time.monotonic() + seconds
        while not (answer := self.js(body)):
            assert time.monotonic() < end, f"never true in {seconds} s: {body}"
            time.sleep(0.02)
        return answer

    def frame(self) -> None:
        """Returns when what was asked for is drawn."""
        self.driver.execute_async_script(
            "const done = arguments[0]; requestAnimationFrame(() => requestAnimationFrame(done))"
        )

    def send(self, method: str, **values: Any) -> Any:
        return self.driver.execute_cdp_cmd(method, values)

    def mouse(self, sort: str, x: float, y: float, **more: Any) -> None:
        """Sends a mouse event at a place of the picture."""
        left, top = self.js("const b = octopipe.stage.getBoundingClientRect(); return [b.x, b.y]")
        self.send("Input.dispatchMouseEvent", type=sort, x=left + x, y=top + y, **more)

    def drag(
        self, start: tuple[float, float], end: tuple[float, float], modifiers: int = 0
    ) -> None:
        button = {"button": "left", "clickCount": 1, "modifiers": modifiers}
        self.mouse("mouseMoved", *start)
        self.mouse("mousePressed", *start, **button)
        for share in (0.3, 0.7, 1.0):
            at = [a + share * (b - a) for a, b in zip(start, end, strict=True)]
            self.mouse("mouseMoved", *at, button="left", buttons=1, modifiers=modifiers)
        self.mouse("mouseReleased", *end, **button)
        self.frame()

    def click(self, x: float, y: float) -> None:
        self.drag((x, y), (x, y))

    def key(self, key: str, modifiers: int = 0) -> None:
        """Presses a key that has the focus, as a person would."""
        code = {"text": key} if len(key) == 1 else {}
        for sort in ("keyDown", "keyUp"):
            more = code if sort == "keyDown" else {}
            self.send("Input.dispatchKeyEvent", type=sort, key=key, modifiers=modifiers, **more)
        self.frame()

    def type(self, text: str) -> None:
        for letter in text:
            self.key(letter)

    def console(self) -> list[str]:
        return [entry["message"] for entry in self.driver.get_log("browser")]

    def requests(self, path: Path) -> set[str]:
        """The addresses that a page, and no page of the browser's own, asked for."""
        messages = [json.loads(e["message"])["message"] for e in self.driver.get_log("performance")]
        sent = [m["params"] for m in messages if m["method"] == "Network.requestWillBeSent"]
        mine = [r for r in sent if r.get("documentURL", "").startswith(path.as_uri())]
        return {r["request"]["url"] for r in mine}


@contextmanager
def opened() -> Iterator[Page]:
    """Starts Chromium, or skips the test that asked for it."""
    binary = next(filter(None, map(shutil.which, NAMES)), None)
    chromedriver = shutil.which("chromedriver")
    if binary is None or chromedriver is None:
        lacking = "chromedriver" if binary else "Chromium"
        pytest.skip(
            f"no {lacking} on this machine (Debian: apt-get install chromium chromium-driver)"
        )
    webdriver = pytest.importorskip("selenium.webdriver")
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    options.binary_location = binary
    for flag in FLAGS:
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        options.add_argument(f"--user-data-dir={folder}")
        driver = webdriver.Chrome(options=options, service=Service(chromedriver))
        driver.set_script_timeout(30)
        try:
            yield Page(driver)
        finally:
            driver.quit()
