"""`octopipe run` on a small model of plain functions."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

import octojax
from octojax.cli import build, main
from octojax.cli.children import grouped
from octojax.report import load_timeline

MODEL = """
import jax, jax.numpy as jnp

def tiny():
    keys = jax.random.split(jax.random.key(0), 4)
    params = {f"w{i}": jax.random.normal(k, (8, 8)) / 3 for i, k in enumerate(keys)}

    def loss(params, batch):
        h = batch["x"]
        for i in range(4):
            h = jnp.tanh(h @ params[f"w{i}"])
        return jnp.mean((h * batch["scale"]) ** 2)

    return params, loss, {"x": jnp.ones((2, 8)), "scale": jnp.float32(2.0)}
"""


@pytest.fixture
def target(tmp_path, monkeypatch) -> str:
    (tmp_path / "model_to_run.py").write_text(MODEL)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(Path(octojax.__file__).parents[1]))
    return "model_to_run:tiny"


def test_a_recorded_run_draws_measured_above_simulated(target, tmp_path):
    arguments = ["run", target, "--record", "--steps", "2", "--microbatches", "3", "-o", "t.json"]
    arguments += ["--html", "t.html"]
    found = CliRunner().invoke(build(), arguments)
    assert found.exit_code == 0, found.output
    assert found.output.index("measured: ") < found.output.index("simulated: ")
    assert "simulated against measured: makespan" in found.output
    assert "(simulated from a rehearsal)" in found.output
    timeline = load_timeline(tmp_path / "t.json")
    assert len(timeline.actions) == 2 * 2 * 3
    assert len(timeline.transfers) == 2 * 3
    page = (tmp_path / "t.html").read_text(encoding="utf-8")
    assert "measured" in page
    assert "simulated" in page


@pytest.mark.slow
def test_processes_train_to_the_same_loss_as_one(target):
    losses = []
    for processes in ("1", "2"):
        arguments = [
            "run",
            target,
            "-n",
            processes,
            "--schedule",
            "zb-h1",
            "--steps",
            "1",
            "--json",
        ]
        found = CliRunner().invoke(build(), arguments)
        assert found.exit_code == 0, found.output
        losses.append(json.loads(found.stdout)["loss"])
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["train.py"], "octopipe launch -n 1 train.py"),
        (["a:b", "-n", "2", "--ranks", "3"], "3 ranks cannot be spread over 2 processes evenly"),
    ],
)
def test_mistakes_are_named(arguments, said, capsys):
    with pytest.raises(SystemExit) as ended:
        main(["run", *arguments])
    assert ended.value.code == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["-o", "nowhere/t.json"], "there is no folder nowhere"),
        (["--plan", "absent.json"], "absent.json does not exist"),
        (["--plan", "table.csv"], "--plan takes a plan"),
    ],
)
def test_mistaken_files_are_refused_before_anything_starts(
    target, tmp_path, capsys, arguments, message
):
    (tmp_path / "table.csv").write_text("0F0,0B0\n1F0,1B0\n")
    with pytest.raises(SystemExit, match="2"):
        main(["run", target, *arguments])
    assert message in capsys.readouterr().err


def test_a_mistake_found_in_the_processes_is_named_without_a_traceback(target, capsys):
    with pytest.raises(SystemExit, match="1"):
        main(["run", target, "--ranks", "2", "--schedule", "interleavd"])
    said = capsys.readouterr().err
    assert "[0] octopipe: " in said
    assert "interleaved" in said
    assert "Traceback" not in said


def test_an_error_of_the_users_own_code_shows_where_it_happened(target, tmp_path, capsys):
    broken = MODEL.replace("h = batch", "raise ValueError('mine')\n        h = batch")
    (tmp_path / "model_to_run.py").write_text(broken)
    with pytest.raises(SystemExit, match="1"):
        main(["run", target, "--ranks", "2"])
    said = capsys.readouterr().err
    assert all(text in said for text in ("Traceback", "model_to_run.py", "mine"))


def test_equal_texts_are_shown_once():
    said = {0: ["a", "b"], 1: ["c"], 2: ["a", "b"]}
    assert grouped(said) == ["[0,2] a", "[0,2] b", "[1] c"]
