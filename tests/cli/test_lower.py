"""`octopipe lower`: the table that every rank executes, counts, files, and what it refuses."""

import json

import pytest

from octojax.ir import LayerCost, LoweredPlan, Machine, Partition, Plan, Profile
from octojax.passes import lowered
from octojax.schedules import generate


@pytest.fixture
def octopipe(command, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    schedule = generate("1f1b", 2, 4)
    schedule.save("table.csv")
    Plan(Partition((1, 2)), schedule.placement, schedule, name="mine").save("plan.json")
    Profile("p", (LayerCost("x", 1.0, 1.0, 1.0),) * 3, Machine(latency_s=0.5)).save("p.json")

    return command


def test_the_table_and_its_counts_are_printed(octopipe):
    code, out, _ = octopipe("lower", "table.csv")
    plan = lowered(generate("1f1b", 2, 4))
    *rows, counts = out.splitlines()
    assert (code, tuple(rows)) == (0, plan.lines)
    assert "8 transfers: 3 mismatches found, 3 repaired, 0 overlapped" in counts


def test_files_and_dumps(octopipe, tmp_path):
    spec = "split,transfers,reorder(mode=blocking),join"
    code, out, _ = octopipe(
        "lower", "plan.json", "--profile", "p.json", "--passes", spec, "--dump", "tables",
        "-o", "out.json", "--json",
    )  # fmt: skip
    plan = LoweredPlan.load("out.json")
    result = json.loads(out)
    assert code == 0
    assert LoweredPlan.from_json(result["plan"]) == plan
    assert (plan.name, plan.partition.sizes) == ("mine", (1, 2))
    assert result["transfers"] == 8
    assert len(list((tmp_path / "tables").iterdir())) == 5
    for command in ("check", "simulate", "show"):
        assert octopipe(command, "out.json")[0] == 0
    octopipe("lower", "table.csv", "-o", "out.csv")
    for command in ("check", "simulate", "show"):
        assert octopipe(command, "out.csv")[0] == 0
    assert "is lowered already" in octopipe("lower", "out.csv")[2]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("lower table.csv --passes transfers,reodrer", "did you mean 'reorder'?"),
        ("lower table.csv --passes reorder,transfers", "reorder needs transfers before it"),
        ("lower table.csv --passes transfers", "not deliverable"),
        ("lower none.csv", "none.csv does not exist"),
        ("lower table.csv -o none/x.json", "there is no folder none"),
        ("lower table.csv --profile table.csv", "table.csv"),
    ],
)
def test_refusals(octopipe, arguments, message):
    code, out, err = octopipe(*arguments.split())
    assert (code, out) == (2, "")
    assert message in err
    assert "Traceback" not in err
