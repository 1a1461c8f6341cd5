"""`octopipe tune` from the outside: JSON, files, text, exit codes."""

import json
from pathlib import Path

import pytest

from octojax.cli import main
from octojax.ir import LayerCost, Machine, Plan, Profile
from octojax.simulate import simulate

PROFILE = str(Path(__file__).parents[1] / "data" / "profiles" / "jamba-s.calibrated.json")


def run(capsys, *arguments: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as stop:
        main(["tune", *arguments])
    out, err = capsys.readouterr()
    return stop.value.code, out, err


def test_json_has_the_promised_fields_and_the_plan_file_simulates_alike(capsys, tmp_path):
    path = tmp_path / "plan.json"
    code, out, _ = run(capsys, PROFILE, "--iterations", "1", "--json", "-o", str(path))
    data = json.loads(out)
    assert code == 0
    assert {
        "makespan_s", "lower_bound_s", "gap", "baselines", "speedup_over_1f1b", "iterations",
        "seconds", "peak_bytes",
    } <= set(data)  # fmt: skip
    assert set(data["iterations"]) == {"partition", "placement", "schedule"}
    plan = Plan.load(path)
    assert simulate(plan, Profile.load(PROFILE)).makespan_s == pytest.approx(data["makespan_s"])
    assert plan.num_ranks == len(data["peak_bytes"]) == 4
    prediction = plan.prediction
    assert prediction.differences(Profile.load(PROFILE)) == ()
    assert (prediction.makespan_s, prediction.lower_bound_s) == (
        data["makespan_s"],
        data["lower_bound_s"],
    )


def test_text_names_bound_gap_and_every_speedup(capsys):
    code, out, _ = run(
        capsys, PROFILE, "--iterations", "2", "--method", "octopipe", "--ranks", "3",
        "--microbatches", "6", "--seed", "4", "--no-overlap", "--phases", "partition,schedule",
    )  # fmt: skip
    assert code == 0
    assert "3 ranks, 6 microbatches" in out
    for word in ("makespan", "lower bound", "gap", "1f1b-split", "interleaved", "partition-only",
                 "schedule-only", "peak GiB", "placement 0"):  # fmt: skip
        assert word in out, word


def test_says_that_the_search_is_being_compiled(capsys, monkeypatch):
    from octojax.tune import tuner

    tuner.warm_up.cache_clear()
    monkeypatch.setattr(tuner, "is_compiled", lambda: False)
    _, _, err = run(capsys, PROFILE, "--iterations", "1")
    assert "first plan: 1f1b-split, " in err
    assert "the search is being compiled, once on this machine" in err


def test_host_cost_and_capacity_change_the_answer(capsys):
    plain = json.loads(run(capsys, PROFILE, "--iterations", "1", "--json")[1])
    costly = json.loads(
        run(capsys, PROFILE, "--iterations", "1", "--json", "--host-cost", "0.0005")[1]
    )
    assert costly["makespan_s"] > plain["makespan_s"]
    capped = json.loads(
        run(capsys, PROFILE, "--iterations", "1", "--json", "--capacity-gib", "4.5")[1]
    )
    assert max(capped["peak_bytes"]) <= 4.5 * 2**30


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["no-such.json"], "does not exist"),
        ([PROFILE, "--method", "guess"], "unknown method 'guess'"),
        ([PROFILE, "--ranks", "40"], "18 layers for 40 ranks"),
        ([PROFILE, "--capacity-gib", "0.5"], "lacking"),
        ([PROFILE, "--phases", "order"], "choose at least one of"),
    ],
)
def test_mistakes_exit_with_2(capsys, arguments, message):
    code, out, err = run(capsys, *arguments, "--iterations", "1")
    assert (code, out) == (2, "")
    assert message in " ".join(err.split())


def test_missing_field_names_file_layer_and_field(capsys, tmp_path):
    path = tmp_path / "p.json"
    path.write_text('{"layers": [{"kind": "x", "forward_s": 1}]}', encoding="utf-8")
    code, _, err = run(capsys, str(path))
    assert code == 2
    assert "layer 0" in err
    assert "input_grad_s" in err


def test_microbatches_can_be_offered(capsys):
    """More, smaller microbatches of the same batch cost the same work and less fill."""
    code, out, _ = run(
        capsys, PROFILE, "--iterations", "0", "--json", "--offer-microbatches", "4,16"
    )
    data = json.loads(out)
    assert code == 0
    assert max(len(row.split()) for row in data["plan"]["schedule"]) > 0
    assert Plan.from_json(data["plan"]).num_microbatches == 16
    assert run(capsys, PROFILE, "--offer-microbatches", "4,x")[0] == 2


def test_devices_choose_sizes_and_show_what_was_weighed(capsys, tmp_path):
    path = tmp_path / "plan.json"
    sizes = ("--devices", "16", "--global-batch", "1", "--iterations", "1")
    code, out, err = run(capsys, PROFILE, *sizes, "--json", "-o", str(path))
    assert code == 0
    assert "tune: pipeline" in err
    data = json.loads(out)
    assert all(r["pipeline"] * r["tensor"] * r["data"] == 16 for r in data["weighed"])
    assert Plan.load(path).num_ranks == data["best"]["pipeline"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--global-batch", "8"), "choose sizes for --devices; give that"),
        (("--devices", "8"), "--devices needs --global-batch"),
        (("--devices", "8", "--global-batch", "8", "--ranks", "2"), "leave --ranks out"),
        (("--devices", "8", "--global-batch", "8", "--capacity-gib", "0.01"), "no plan of"),
    ],
)
def test_sizes_that_contradict_each_other_are_refused(capsys, options, message):
    code, _, err = run(capsys, PROFILE, "--iterations", "1", *options)
    assert code == 2
    assert message in err


def small_profile(tmp_path: Path) -> str:
    """Six layers of one unit, as in Fig. 3 of the paper."""
    path = tmp_path / "fig3.json"
    layers = tuple(LayerCost("x", 1.0, 1.0, 1.0) for _ in range(6))
    path.write_text(json.dumps(Profile("fig3", layers, Machine(), 2, 2).to_json()))
    return str(path)


def test_a_search_begins_where_it_is_told(capsys, tmp_path):
    profile, plan = small_profile(tmp_path), str(tmp_path / "plan.json")
    first = run(
        capsys, profile, "--start", "partition:2,4", "--phases", "schedule", "--iterations", "2",
        "--json", "-o", plan,
    )  # fmt: skip
    assert json.loads(first[1])["makespan_s"] == 26
    assert Plan.load(plan).partition.sizes == (2, 4)
    again = run(
        capsys, profile, "--start", plan, "--phases", "partition", "--iterations", "2", "--json",
        "--recompute", "all",
    )  # fmt: skip
    data = json.loads(again[1])
    assert data["recompute"] == "all"
    assert data["plan"]["recompute"] == [True, True]
    assert data["plan"]["schedule"] == Plan.load(plan).to_json()["schedule"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--start", "partition:2,5"), "partition has 7 layers, asked are 6"),
        (("--start", "partitoin:2,4"), "did you mean 'partition'"),
        (("--start", "nowhere.json"), "nowhere.json does not exist"),
        (("--start", "PROFILE"), "is a profile; expected a plan"),
        (("--start", "partition:2,4", "--method", "exact"), "begins from none"),
        (("--recompute", "some"), "expected auto"),
        (
            ("--devices", "4", "--global-batch", "4", "--recompute", "all", "--start", "x"),
            "leave --start, --recompute out",
        ),
    ],
)
def test_starts_and_recompute_that_make_no_sense_are_refused(capsys, tmp_path, options, message):
    profile = small_profile(tmp_path)
    asked = [profile if word == "PROFILE" else word for word in options]
    code, out, err = run(capsys, profile, "--iterations", "1", *asked)
    assert (code, out) == (2, "")
    assert message in " ".join(err.split())


def test_a_table_without_partition_is_no_start(capsys, tmp_path):
    table = tmp_path / "table.csv"
    table.write_text("0F0,0B0\n1F0,1B0\n", encoding="utf-8")
    code, _, err = run(capsys, small_profile(tmp_path), "--start", str(table))
    assert code == 2
    assert "a table says no partition" in err
