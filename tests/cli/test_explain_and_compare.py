"""`octopipe explain`, `octopipe compare` and `show A B`, as a user calls them."""

import json

import pytest

from octojax.ir import LayerCost, Machine, Plan, Prediction, Profile, uniform_partition
from octojax.report import save_timeline
from octojax.schedules import generate
from octojax.simulate import simulate

PROFILE = Profile(
    "four",
    (LayerCost("x", 1e-3, 1e-3, 1e-3, output_bytes=8),) * 3
    + (LayerCost("head", 4e-3, 3e-3, 1e-3),),
    Machine(latency_s=1e-4),
    ranks=2,
    microbatches=4,
)


@pytest.fixture
def octopipe(command, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")
    PROFILE.save("profile.json")
    for name in ("1f1b", "zb-v"):
        table = generate(name, 2, 4)
        cut = uniform_partition(PROFILE.kinds, table.num_stages)
        told = Prediction("four", PROFILE.fingerprint, 0.05)
        plan = Plan(cut, table.placement, table, name=name, prediction=told)
        plan.save(f"{name}.json")
        table.save(f"{name}.csv")
    save_timeline(simulate(plan, PROFILE), "timeline.json")

    return command


def test_explain_prints_the_account(octopipe):
    code, out, err = octopipe("explain", "1f1b.json", "--profile", "profile.json")
    assert (code, err) == (0, "octopipe: 1f1b.json") if err else (0, "")
    assert out.startswith("1f1b, simulated with profile four: ")
    assert "rank 1 works longest, rank 0 least" in out


def test_explain_in_units_says_which_profile_to_give(octopipe):
    code, out, err = octopipe("explain", "1f1b.json")
    assert code == 0
    assert "F = I = W = 1, B = 2" in out.splitlines()[0]
    assert "give --profile (four)" in err


def test_explain_takes_a_schedules_name(octopipe):
    code, out, _ = octopipe("explain", "1f1b", "--profile", "profile.json")
    assert code == 0
    assert "2 ranks, 2 stages, 4 microbatches" in out
    code, out, _ = octopipe("explain", "zb-v", "--ranks", "4", "--microbatches", "8")
    assert out.startswith("zb-v, simulated with F = I = W = 1, B = 2: 51 units a step")


def test_explains_json_adds_up(octopipe):
    _, out, _ = octopipe("explain", "1f1b.json", "--profile", "profile.json", "--json")
    told = json.loads(out)
    whole = simulate(Plan.load("1f1b.json"), PROFILE).makespan_s
    assert told["makespan_s"] == whole
    assert sum(x["seconds"] for x in told["parts"]) == pytest.approx(whole)
    chain = told["critical_path"]
    assert sum(x["seconds"] for x in chain["ranks"] + chain["links"]) == pytest.approx(whole)


def test_compare_prints_a_table_and_a_picture(octopipe):
    code, out, _ = octopipe("compare", "1f1b.json", "zb-v", "gpipe", "--profile", "profile.json")
    assert code == 0
    heading, names, *rows = out.splitlines()
    assert heading == "simulated with profile four: 2 ranks, 4 microbatches"
    assert names.split()[:3] == ["step", "speed", "bubbles"]
    assert [row.split()[0] for row in rows[:3]] == ["1f1b", "zb-v", "gpipe"]
    assert out.count("rank 0 ") == 3
    assert "peak microbatches" not in out
    _, bare, _ = octopipe("compare", "1f1b", "zb-v", "--profile", "profile.json", "--no-picture")
    assert "rank 0" not in bare


def test_compares_json_and_files(octopipe, tmp_path):
    words = ("compare", "1f1b.csv", "1f1b.json", "--profile", "profile.json", "--json")
    _, out, err = octopipe(*words, "--svg", "c.svg", "--html", "c.html")
    assert [e["name"] for e in json.loads(out)["entries"]] == ["1f1b.csv", "1f1b.json"]
    assert "wrote c.svg" in err
    assert (tmp_path / "c.html").stat().st_size > 1000


def test_show_draws_several_on_one_clock(octopipe):
    code, out, _ = octopipe(
        "show", "1f1b.json", "gpipe", "timeline.json", "--profile", "profile.json"
    )
    assert code == 0
    assert "gpipe, simulated with profile four" in out
    assert out.count("rank 0 ") == 3
    code, _, err = octopipe("show", "1f1b.json", "timeline.json")
    assert code == 2
    assert "no common time axis" in err
    code, out, _ = octopipe("show", "1f1b.csv", "1f1b.csv", "interleaved:chunks=2")
    assert code == 0
    assert "1f1b.csv (2), F = I" in out


def test_tune_draws_its_plan_above_1f1b(octopipe, tmp_path):
    page = tmp_path / "tuned.html"
    code, _, err = octopipe("tune", "profile.json", "--iterations", "1", "--html", str(page))
    assert code == 0
    assert f"wrote {page}" in err
    text = page.read_text()
    assert "1f1b, simulated with profile four" in text
