"""The experiments as a user runs them: as scripts, with small sizes."""

import importlib.util
import json
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
