"""The experiments as a user runs them: as scripts, with small sizes."""

import importlib.util
import json
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from octojax.ir import Plan, Profile, Schedule

EXPERIMENTS = Path(__file__).resolve().parents[2] / "experiments"
SMALL = "--width 64 --length 16 --batch 4 --microbatches 2 --ranks 2 --steps 3"


def run(name: str, *options: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-W", "error::DeprecationWarning", str(EXPERIMENTS / f"{name}.py")]
    return subprocess.run(
        [*command, *SMALL.split(), *options], capture_output=True, text=True, timeout=900
    )


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("text")
    (folder / "b.txt").write_text("the quick brown fox jumps over the lazy dog. " * 60)
    (folder / "a.txt").write_text("pack my box with five dozen liquor jugs. " * 60)
    return folder


def check(done: subprocess.CompletedProcess, out: Path) -> dict:
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.splitlines()[-1] == f"results in {out}"
    assert "rank 1 " in done.stdout
    assert "tokens/s" in done.stdout
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [0, 1, 2]
    assert lines[-1]["loss"] < lines[0]["loss"]
    plan = Plan.load(out / "plan.json")
    assert Schedule.load(out / "schedule.csv") == plan.schedule
    assert (out / "timeline.html").read_text().startswith("<!doctype html>")
    summary = json.loads((out / "summary.json").read_text())
    assert summary["check"]["loss"] < 1e-5
    assert summary["check"]["gradients"] < 1e-5
    return summary


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_llama_trains_on_the_users_text(text, tmp_path):
    out = tmp_path / "out"
    done = run("llama", "--layers=1", f"--data={text}", f"--out={out}", "--schedule=1f1b")
    summary = check(done, out)
    assert 50_000 < summary["parameters"] < 150_000
    assert str(text) in done.stdout


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_nemotron_h_profiles_tunes_and_trains(text, tmp_path):
    out = tmp_path / "out"
    options = ("--layers=3", f"--data={text}", f"--out={out}", "--tune-seconds=1", "--no-race")
    done = run("nemotron_h", *options)
    summary = check(done, out)
    assert "simulated speedup over 1f1b" in done.stdout
    profile = Profile.load(out / "profile.json")
    assert profile.num_layers == Plan.load(out / "plan.json").partition.num_layers
    assert summary["simulated"]["makespan_s"] <= summary["simulated"]["1f1b"]
    assert summary["simulated"]["lower_bound_s"] <= summary["simulated"]["makespan_s"]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_jamba_trains_with_its_balance_loss(text, tmp_path):
    out = tmp_path / "out"
    options = ("--layers=2", f"--data={text}", f"--out={out}", "--schedule=zb-h1")
    check(run("jamba", *options), out)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--data=/nowhere",), "--data /nowhere: there is no such file or folder"),
        (("--width=100",), "--width 100: heads are 32 wide"),
    ],
)
def test_mistakes_end_with_a_message(options, message):
    done = run("llama", *options)
    assert done.returncode == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr


def corpus_module():
    spec = importlib.util.spec_from_file_location("experiments_corpus", EXPERIMENTS / "corpus.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def test_text_is_read_in_order_and_split(text):
    corpus = corpus_module().load(str(text), 16)
    whole = (text / "a.txt").read_bytes() + (text / "b.txt").read_bytes()
    assert bytes(corpus.training) + bytes(corpus.held_out) == whole
    assert len(corpus.held_out) == len(whole) // 20


def test_batches_depend_on_step_and_seed_alone(text):
    corpus = corpus_module().load(str(text), 16)
    first = corpus.batch(3, 4, 16, seed=1)["tokens"]
    assert first.shape == (4, 17)
    assert (first == corpus.batch(3, 4, 16, seed=1)["tokens"]).all()
    assert (first != corpus.batch(4, 4, 16, seed=1)["tokens"]).any()
    assert (first != corpus.batch(3, 4, 16, seed=2)["tokens"]).any()


def test_the_default_text_is_the_standard_library():
    corpus = corpus_module().load(None, 128)
    assert "standard library" in corpus.source
    assert len(corpus.training) > 1_000_000
    assert b"import" in bytes(corpus.training[:100_000])


def test_too_little_text_is_refused_with_the_numbers(tmp_path):
    (tmp_path / "x.txt").write_text("short")
    with pytest.raises(ValueError, match=r"found 5 bytes.*give at least 360 bytes"):
        corpus_module().load(str(tmp_path), 16)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("name", "preset", "parameters"),
    [
        ("nemotron_h", "nemotron-h-56b", "56,324,350,464"),
        ("jamba", "jamba-1.5-large", "398,555,145,696"),
    ],
)
def test_a_published_model_is_planned_for_64_devices_on_this_host(
    name: str, preset: str, parameters: str, tmp_path: Path
) -> None:
    """In three minutes of two cores and 4 GiB."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    command = [sys.executable, str(EXPERIMENTS / f"{name}.py"), "--preset", preset]
    done = subprocess.run(
        [*command, "--devices", "64", "--dry-run", "--out", str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 2 * 180
    assert after.ru_maxrss < 4 * 2**20  # KiB, of the largest child
    assert f"{parameters} parameters on 64 devices" in done.stdout
    plan = Plan.load(tmp_path / "plan.json")
    table = done.stdout.partition(" rank  layers")[2].splitlines()[1 : 1 + plan.num_ranks]
    assert [int(line.split()[0]) for line in table] == [*range(plan.num_ranks)]
    assert sum(int(line.split()[1]) for line in table) >= plan.partition.num_layers
    assert all(0 < float(line.split()[-1]) <= 80e9 / 2**30 for line in table)


def test_a_dry_run_needs_a_preset_that_is_there() -> None:
    command = [sys.executable, str(EXPERIMENTS / "jamba.py"), "--dry-run"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2
    assert "--dry-run needs --preset" in done.stderr
    done = subprocess.run(
        [*command, "--preset", "jamba-2"], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 2
    assert "--preset 'jamba-2': expected one of jamba-v0.1, jamba-1.5-large" in done.stderr
