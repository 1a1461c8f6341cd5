"""`octopipe show`, as a user calls it."""

import json
import subprocess
import sys

import pytest

from octojax.cli import main
from octojax.ir import LayerCost, Machine, Partition, Placement, Plan, Prediction, Profile, Schedule
from octojax.report import save_timeline
from octojax.simulate import simulate


@pytest.fixture
def files(tmp_path):
    schedule = Schedule.parse("0F0 0F1 0B0 0B1\n1F0 1B0 1F1 1B1")
    schedule.save(tmp_path / "table.csv")
    profile = Profile("p", (LayerCost("x", 1e-3, 1e-3, 1e-3),) * 3)
    profile.save(tmp_path / "profile.json")
    Profile("o", (LayerCost("y", 1e-3, 1e-3, 1e-3),) * 3).save(tmp_path / "other.json")
    plan = Plan(
        Partition((1, 2)),
        Placement.of((0, 1)),
        schedule,
        name="mine",
        prediction=Prediction("p", profile.fingerprint, 0.015, 0.012),
    )
    plan.save(tmp_path / "plan.json")
    save_timeline(simulate(plan, profile), tmp_path / "seconds.json")
    return tmp_path


@pytest.fixture(autouse=True)
def wide_terminal(monkeypatch):
    """Lines are not broken, whatever the terminal that the tests run in."""
    monkeypatch.setenv("COLUMNS", "120")


def call(capsys, *arguments) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as stop:
        main(["show", *map(str, arguments)])
    out = capsys.readouterr()
    return stop.value.code, out.out, out.err


def test_a_table_is_drawn_with_unit_costs(files, capsys):
    code, out, err = call(capsys, files / "table.csv", "--width", 60)
    assert (code, err) == (0, "")
    assert out.startswith("table, F = I = W = 1, B = 2: 9 units, bubbles 33.3%")
    assert "rank 1 .....1F0f|1B0bbbbbb|1F1f|1B1bbbbbb|....." in out


def test_a_plan_is_drawn_with_its_profile(files, capsys):
    code, out, _ = call(capsys, files / "plan.json", "--profile", files / "profile.json")
    assert code == 0
    assert out.startswith("mine, simulated with profile p: 15 ms, bubbles 40.0%")


def test_a_plan_without_its_profile_says_what_was_predicted(files, capsys):
    _, out, _ = call(capsys, files / "plan.json")
    heading, note = out.splitlines()[:2]
    assert heading.startswith("mine, F = I = W = 1, B = 2: 9 units, bubbles 33.3%")
    assert note == (
        "under profile p it takes 15 ms, within 25.0% of the lower bound 12 ms; draw that with "
        "--profile"
    )


def test_the_plans_own_bound_is_drawn_with_its_profile(files, capsys):
    _, out, err = call(capsys, files / "plan.json", "--profile", files / "profile.json")
    assert "15 ms, bubbles 40.0%, within 25.0% of the lower bound 12 ms" in out.splitlines()[0]
    assert err == ""


def test_a_file_whose_prediction_is_stale_says_both(files, capsys):
    text = (files / "plan.json").read_text().replace('"makespan_s": 0.015', '"makespan_s": 0.02')
    (files / "plan.json").write_text(text)
    _, out, _ = call(capsys, files / "plan.json", "--profile", files / "profile.json")
    assert out.splitlines()[1].startswith("under profile p it takes 20 ms")


def test_another_models_profile_is_taken_only_when_asked_for(files, capsys):
    arguments = (files / "plan.json", "--profile", files / "other.json")
    code, _, err = call(capsys, *arguments)
    assert code == 2
    assert "is of another model: its layers have other kinds or parameters" in err
    code, out, err = call(capsys, *arguments, "--any-profile")
    assert code == 0
    assert out.splitlines()[1].startswith("made for profile 'p', which has another model")
    assert "the times are those of 'o'" in err


@pytest.mark.parametrize(
    ("other", "what"),
    [
        (Profile("p", (LayerCost("x", 2e-3, 1e-3, 1e-3),) * 3), "other layer costs than"),
        (
            Profile("p", (LayerCost("x", 1e-3, 1e-3, 1e-3),) * 3, Machine(latency_s=1.0)),
            "another machine than",
        ),
    ],
)
def test_other_costs_of_the_same_model_are_named(files, capsys, other, what):
    other.save(files / "profile.json")
    code, out, err = call(capsys, files / "plan.json", "--profile", files / "profile.json")
    assert code == 0
    assert what in out.splitlines()[1]
    assert what in err
    assert "lower bound" not in out.splitlines()[0]


def test_files_are_written_instead_of_the_picture(files, capsys):
    names = {kind: files / f"out.{kind}" for kind in ("html", "svg", "trace", "csv", "json")}
    options = [x for kind, path in names.items() for x in (f"--{kind}", path)]
    code, out, err = call(capsys, files / "table.csv", *options)
    assert (code, out) == (0, "")
    assert all(f"wrote {path}" in err for path in names.values())
    assert names["html"].read_text().startswith("<!doctype html>")
    assert names["svg"].read_text().startswith("<svg ")
    assert json.loads(names["trace"].read_text())["traceEvents"]
    assert names["csv"].read_text().startswith("timeline,rank,action,")
    code, out, _ = call(capsys, names["json"])
    assert code == 0
    assert out.startswith("out: 9 units")


def test_a_measured_timeline_stands_under_the_simulated_one(files, capsys):
    call(capsys, files / "table.csv", "--json", files / "run.json")
    code, out, _ = call(capsys, files / "table.csv", "--measured", files / "run.json")
    assert code == 0
    assert "B = 2: 9 units" in out
    assert "measured: 9 units" in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["none.csv"], "none.csv does not exist"),
        (["plan.json", "--profile", "plan.json"], "lacks its list of 'layers'"),
        (["table.csv", "--measured", "plan.json"], "not a timeline"),
        (["table.csv", "--svg", "x", "--html", "x"], "two of the files to write"),
        (["broken.json"], "broken.json ends in the middle (line 1)"),
        (["table.csv", "--measured", "none.json"], "none.json does not exist"),
        (["table.csv", "--measured", "."], ". is a folder"),
        (["table.csv", "--bound", "nan"], "--bound nan: expected a number of seconds > 0"),
        (
            ["table.csv", "--bound", "1e9"],
            "--bound 1e+09: no lower bound of table.csv, which takes",
        ),
        (["table.csv", "--measured", "seconds.json"], "'measured' is in seconds. Give a profile"),
        (["plan.json", "--profile", "other.json"], "profile 'o' ("),
        (["table.csv", "--bound", "-1"], "--bound -1.0: expected a number of seconds > 0"),
        (["table.csv", "--html", "nowhere/x.html"], "there is no folder nowhere; make it first"),
        (["table.csv", "--svg", "."], "cannot write .: it is a folder"),
    ],
)
def test_mistakes_are_named(files, capsys, monkeypatch, arguments, message):
    monkeypatch.chdir(files)
    (files / "broken.json").write_text("{")
    code, out, err = call(capsys, *arguments)
    assert (code, out) == (2, "")
    assert message in err


def test_show_does_not_import_jax(files):
    code = (
        "import sys\nfrom octojax.cli import main\n"
        f"try: main(['show', {str(files / 'table.csv')!r}, '--html', {str(files / 'x.html')!r}])\n"
        "except SystemExit: pass\n"
        "print([m for m in ('jax', 'numba', 'matplotlib') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True
    )
    assert done.stdout.splitlines()[-1] == "[]"
