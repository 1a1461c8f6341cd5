"""Random kills and stops: whoever is hit, whenever, the others end by themselves and say why."""

import os
import random
import signal
import threading
import time
from pathlib import Path

import pytest

from octojax.launch import launch

SCRIPT = str(Path(__file__).parent / "falls.py")
CASES = int(os.environ.get("KILLS", "16"))
"""How many are tried: `KILLS=30 python -m pytest -m slow tests/processes/test_kills.py`."""
PHASES = {"start": "", "compilation": "now compiling", "step": "now stepping", "save": "now saving"}


class Hit:
    """Sends a signal to one process, some time after it has said a line."""

    def __init__(self, target: int, number: int, line: str, delay_s: float) -> None:
        self.target, self.number, self.line, self.delay_s = target, number, line, delay_s
        self.pids: dict[int, int] = {}
        self.said: dict[int, list[str]] = {}
        self.timer: threading.Timer | None = None

    def __call__(self, process: int, line: str) -> None:
        self.said.setdefault(process, []).append(line)
        if line.startswith("pid "):
            self.pids[process] = int(line.removeprefix("pid "))
        ready = self.target in self.pids and (line == self.line or not self.line)
        if process == self.target and ready and self.timer is None:
            self.timer = threading.Timer(self.delay_s, os.kill, (self.pids[process], self.number))
            self.timer.start()


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(CASES))
def test_the_others_end_in_time_and_say_why(seed, tmp_path):
    rng = random.Random(seed)
    processes = rng.choice((2, 3))
    target = rng.randrange(processes)
    number = rng.choice((signal.SIGKILL, signal.SIGSTOP, signal.SIGTERM))
    phase = list(PHASES)[seed % len(PHASES)]
    hit = Hit(target, number, PHASES[phase], rng.uniform(0, 1.5))
    begin = time.monotonic()
    exits = launch([SCRIPT, "train", str(tmp_path / "it")], processes, timeout_s=10.0, echo=hit)
    what = f"{number.name} to process {target} of {processes} at the {phase}"
    said = {p: "\n".join(lines) for p, lines in hit.said.items()}
    assert time.monotonic() - begin < 200, what
    for each in exits:
        if each.process_id == target:
            assert each.code == (None if number == signal.SIGSTOP else -number), (what, exits)
        else:
            text = said[each.process_id]
            assert each.code == 1, (what, exits, text)
            named = (f"process {target}", f"rank {target}", "out of step")
            assert any(name in text.split("now ")[-1] for name in named), (what, text)
    for pid in hit.pids.values():
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
