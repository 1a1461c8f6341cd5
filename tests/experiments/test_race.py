"""One core against two: figures of turns, what stands in the way, failures, and a tiny race."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
EXPERIMENTS = ROOT / "experiments"
sys.path.insert(0, str(EXPERIMENTS))

import race  # noqa: E402
from pair import Figures, Turn  # noqa: E402
from runner import Settings, settings_from_json, settings_json  # noqa: E402

TWO_CORES = hasattr(os, "sched_getaffinity") and len(os.sched_getaffinity(0)) >= 2
SETTINGS = Settings(
    name="llama",
    data=None,
    out=Path("out"),
    ranks=2,
    microbatches=2,
    schedule="auto",
    steps=3,
    batch=4,
    length=16,
    width=64,
    layers=1,
    lr=1e-3,
    seed=0,
    tune_seconds=1.0,
    check=True,
    race=None,
    evaluate=None,
)


def test_the_slower_process_counts_in_every_step_and_both_in_processor_time() -> None:
    first = [Turn((1.0, 3.0), 0.5, faults=2.0), Turn((2.0, 2.0), 0.7, faults=4.0)]
    second = [Turn((2.0, 1.0), 0.25, 0.1), Turn((1.0, 4.0), 0.25, 0.3)]
    figures = Figures.of([first, second])
    assert figures.step_s == 2.5  # of 2, 3, 2 and 4
    assert figures.processor_s == pytest.approx((0.75 + 0.95) / 2)
    assert figures.by_process_s == (pytest.approx(0.6), 0.25)
    assert figures.queued_s == pytest.approx(0.2)
    assert figures.faults == 3.0


def test_figures_of_no_turns_are_refused() -> None:
    with pytest.raises(ValueError, match="no turn was taken"):
        Figures.of([[], []])


def test_lines_say_speedups_over_the_plain_step() -> None:
    outcome = race.Race(
        cores=(2, 5),
        tokens=1000,
        step_s={"plain": 0.5, "1f1b": 0.4, "tuned": 0.25},
        processor_s={"plain": 0.4, "1f1b": 0.5, "tuned": 0.44},
        simulated={"1f1b": 1.5, "tuned": 1.9},
        bound=1.96,
    )
    plain, one, tuned, bound = outcome.lines()
    assert plain == "on core 5 alone, the plain step: 500 ms, 2,000 tokens/s"
    assert "cores 2, 5, 1f1b: 400 ms, 2,500 tokens/s, [bold]1.25x[/] (simulated 1.50x; +25%" in one
    assert "[bold]2.00x[/] (simulated 1.90x; +10% processor time)" in tuned
    assert bound.endswith("1.96x as fast")


def test_settings_survive_the_way_to_the_processes() -> None:
    assert settings_from_json(json.loads(json.dumps(settings_json(SETTINGS)))) == SETTINGS


def test_one_core_is_not_enough_and_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(race, "usable_cores", lambda: (3,))
    assert race.why_not() == "it takes 2 cores, and this process may use core 3 alone"
    monkeypatch.setattr(race, "usable_cores", lambda: ())
    assert race.why_not() == "this system does not bind processes to cores"
    monkeypatch.setattr(race, "usable_cores", lambda: (0, 4, 5))
    assert race.why_not() is None


def children() -> set[str]:
    """The processes that this one has started and that are still there."""
    return set(Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text().split())


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_failing_process_is_named_and_none_is_left(tmp_path: Path) -> None:
    before = children()
    with pytest.raises(RuntimeError, match=r"process \d exited with code 1, .*profile\.json"):
        race.race(settings_from_json({**settings_json(SETTINGS), "out": str(tmp_path)}), 120.0)
    assert children() == before


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_race_without_time_ends_in_time(tmp_path: Path) -> None:
    before, begin = children(), time.monotonic()
    with pytest.raises(RuntimeError, match="not done within 1 s"):
        race.race(settings_from_json({**settings_json(SETTINGS), "out": str(tmp_path)}), 1.0)
    assert time.monotonic() - begin < 120
    assert children() == before


def main_job(folder: Path, steps: int) -> tuple[list[str], Path]:
    """Returns the command of a tiny training run that ends with a race, and where it writes."""
    text, out = folder / "text.txt", folder / "out"
    text.write_text("pack my box with five dozen liquor jugs. " * 120)
    options = (
        f"--width=64 --length=16 --batch=4 --microbatches=2 --ranks=2 --steps={steps} --layers=1 "
        "--tune-seconds=1 --no-check --race --no-evaluate"
    )
    script = str(EXPERIMENTS / "llama.py")
    return [sys.executable, script, *options.split(), f"--data={text}", f"--out={out}"], out


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.skipif(not TWO_CORES, reason="two cores race")
def test_the_main_job_ends_with_a_race(tmp_path: Path) -> None:
    command, out = main_job(tmp_path, steps=3)
    done = subprocess.run(command, capture_output=True, text=True, timeout=800)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads((out / "summary.json").read_text())["race"]
    assert set(found["step_s"]) == {"plain", "1f1b", "tuned"}
    assert found["cores"] == sorted(os.sched_getaffinity(0))[:2]
    assert found["tokens"] == 64
    assert min(found["step_s"].values()) > 0
    assert f"on core {found['cores'][1]} alone, the plain step" in done.stdout
    assert json.loads((out / "race.json").read_text()) == found


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.skipif(not TWO_CORES, reason="two cores race")
def test_an_interrupted_race_leaves_nothing_behind(tmp_path: Path) -> None:
    command, _ = main_job(tmp_path, steps=1)
    job = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    limit = time.monotonic() + 600
    racers: list[int] = []
    try:
        while len(racers) < race.PROCESSES and job.poll() is None and time.monotonic() < limit:
            time.sleep(0.2)
            racers = [p for p in descendants(job.pid) if b"race.py" in command_of(p)]
        assert len(racers) == race.PROCESSES
        job.send_signal(signal.SIGINT)
        assert job.wait(120) != 0
    finally:
        job.kill()
        job.wait()
    assert not [p for p in racers if b"race.py" in command_of(p)]


def descendants(pid: int) -> list[int]:
    """The processes that a process has started, in any of its threads."""
    pids: list[int] = []
    for file in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            pids += map(int, file.read_text().split())
    return pids


def command_of(pid: int) -> bytes:
    """The command line of a process; nothing if it has ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.skipif(not TWO_CORES, reason="two cores race")
def test_the_benchmark_takes_a_step_apart(tmp_path: Path) -> None:
    output = tmp_path / "out.json"
    options = (
        "--plans=zb-h1 --width=64 --layers=1 --microbatches=2 --rounds=1 --steps=1 --seconds=1 "
        f"--output={output}"
    )
    command = [sys.executable, str(ROOT / "benchmarks" / "two_cores.py"), *options.split()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=800)
    assert done.returncode == 0, done.stdout[-2000:]
    assert "| zb-h1 | 2 |" in done.stdout
    assert "| bound |" in done.stdout
    (row,) = json.loads(output.read_text())["rows"]
    assert row["simulated_s"] > 0
    assert len(row["by_rank_s"]) == 2
    pieces = row["work"]
    assert 0 < pieces["apart_s"] < 10
    assert pieces["plain_update_s"] < pieces["plain_s"]


def test_an_unknown_plan_of_the_benchmark_is_refused() -> None:
    command = [sys.executable, str(ROOT / "benchmarks" / "two_cores.py"), "--plans=2f2b,tuned"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert "--plans 2f2b: expected some of 1f1b, zb-h1" in done.stderr
