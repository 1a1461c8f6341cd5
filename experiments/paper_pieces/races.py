"""Plans in real time: the fidelity studies, started as processes with bounded waits."""

import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tuner_common import load

from octojax.ir import Placement, Plan, Timeline
from octojax.report.data import load_timeline
from paper_pieces.methods import METHODS, baselines
from paper_pieces.study import Settings, Study, load_average

SCRIPTS = Path(__file__).resolve().parent.parent
FINE = "OctoPipe, 56 stages"
SCALE, STEPS = 12.0, 3
"""Factor on the profile's times, so that sleeps outlast what a message costs; steps of a plan."""
LATENCY_S = 1e-4
"""Of a message between these processes, about, by the factor: what our plans are tuned for."""
GRACE_S = 20.0
"""For a study that is told to end."""


@dataclass(frozen=True)
class Race:
    """What an emulation wrote: a row per plan, the median step's timeline, the load meanwhile."""

    rows: tuple[Mapping[str, Any], ...]
    timelines: Mapping[str, Timeline]
    load_average: float


def plans(study: Study) -> dict[str, Plan]:
    """Returns the plans of TABLE III on Nemotron-H (Small): the baselines, our best, and our best
    with the paper's 56 stages dealt to the ranks in turn, of which partition and schedule are ours.
    """
    profile = load("nemotron-h-s")
    assert profile.ranks is not None
    with study.job(f"baselines of {profile.name}", 1.0):
        made = {name: method.plan for name, method in baselines(profile).items()}
    slow = profile.on(replace(profile.machine, latency_s=LATENCY_S))
    fine = study.tuned(
        slow, "s", start=Placement.loop(profile.ranks, 14), phases=("partition", "schedule"),
        replicated=False,
    )  # fmt: skip
    best = study.tuned(slow, "s", replicated=False)
    made |= {FINE: fine.plan, "OctoPipe": best.plan}
    names = ("1F1B", "OctoPipe") if study.settings.quick else (*METHODS[:-1], FINE, "OctoPipe")
    return {name: made[name] for name in names}


def emulated(study: Study) -> Race:
    """Returns the race of `plans` on four emulated ranks, run once."""
    settings = study.settings
    chosen = plans(study)

    def run() -> Race:
        with study.job("emulated ranks", emulation_s(settings)):
            return _emulated(chosen, settings)

    return study.once("emulated", run)


def emulation_s(settings: Settings) -> float:
    """Returns about how long the race takes on two free cores."""
    return 30.0 if settings.quick else 30.0 + 6 * (STEPS + 1) * 0.55 * SCALE


def _emulated(chosen: Mapping[str, Plan], settings: Settings) -> Race:
    scale, steps = (4.0, 1) if settings.quick else (SCALE, STEPS)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder)
        stored = {name: plan.to_json() for name, plan in chosen.items()}
        (path / "plans.json").write_text(json.dumps(stored), encoding="utf-8")
        options = {"plans": path / "plans.json", "timelines": path, "output": path / "rows.json"}
        started(
            "fidelity_emulated.py", 8 * emulation_s(settings),
            "--scale", str(scale), "--steps", str(steps),
            "--timeout", str(6 * emulation_s(settings)),
            *(word for key, value in options.items() for word in (f"--{key}", str(value))),
        )  # fmt: skip
        rows = json.loads((path / "rows.json").read_text(encoding="utf-8"))
        timelines = {name: load_timeline(path / f"{name}.json") for name in chosen}
    return Race(tuple(rows), timelines, load_average())


def started(script: str, timeout_s: float, *options: str) -> str:
    """Runs a study to its end and returns what it printed.

    Raises `ValueError` with its last lines where it fails, and where it takes longer; it is then
    told to end, and ends its own processes.
    """
    command = [sys.executable, str(SCRIPTS / script), *options]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    with subprocess.Popen(command, **pipes) as study:
        try:
            printed, _ = study.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            _end(study)
            raise ValueError(
                f"{script} was not done after {timeout_s:.0f} s: is the machine busy?"
            ) from None
        except BaseException:
            _end(study)
            raise
    if study.returncode:
        raise ValueError(f"{script} failed:\n{printed[-1500:]}")
    return printed


def _end(study: "subprocess.Popen[str]") -> None:
    """Ends a study that has processes of its own, which a kill would leave behind."""
    study.terminate()
    try:
        study.communicate(timeout=GRACE_S)
    except subprocess.TimeoutExpired:
        study.kill()
        study.communicate()
