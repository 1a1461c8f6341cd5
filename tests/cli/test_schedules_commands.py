"""`octopipe schedules` and `octopipe schedule`, as a user calls them."""

import json

import pytest

from octojax.cli import main
from octojax.ir import Schedule
from octojax.schedules import SCHEDULES, generate


def call(capsys, *arguments):
    with pytest.raises(SystemExit) as stop:
        main([str(a) for a in arguments])
    out = capsys.readouterr()
    return stop.value.code, out.out, out.err


def test_schedules_lists_every_name_with_its_source(capsys):
    code, out, err = call(capsys, "schedules")
    assert (code, err) == (0, "")
    for name, record in SCHEDULES.items():
        assert f"\n{name} " in "\n" + out
        assert record.source in out
        assert record.constraints in out


def test_schedules_as_json(capsys):
    code, out, _ = call(capsys, "schedules", "--json")
    listed = json.loads(out)
    assert code == 0
    assert [record["name"] for record in listed] == list(SCHEDULES)
    assert listed[3]["options"]["group_size"]["default"] is None


def test_comparison(capsys):
    sizes = ["--ranks", "4", "--microbatches", "4,8"]
    arguments = ["schedules", "--compare", *sizes, "--names", "gpipe,zb-h1"]
    code, out, _ = call(capsys, *arguments)
    assert code == 0
    assert "gpipe          |  0.429     4     4" in out
    code, out, _ = call(capsys, *arguments, "--json")
    assert [row["makespan"] for row in json.loads(out)] == [21, 33, 15, 27]
    code, _, err = call(capsys, "schedules", "--compare", "--microbatches", "8,x")
    assert code == 2
    assert "--microbatches '8,x': expected whole numbers >= 1" in err


def test_schedule_prints_csv(capsys):
    code, out, err = call(capsys, "schedule", "1f1b", "--ranks", 4, "--microbatches", 8)
    assert (code, err) == (0, "")
    assert Schedule.from_csv(out) == generate("1f1b", 4, 8)


def test_schedule_takes_chunks_options_and_a_file(capsys, tmp_path):
    file = tmp_path / "table.csv"
    code, out, _ = call(
        capsys, "schedule", "interleaved", "--ranks", 4, "--microbatches", 12, "--chunks", 3,
        "--option", "group-size=6", "--option", "moe_overlap=true", "-o", file,
    )  # fmt: skip
    assert (code, out) == (0, "")
    assert Schedule.load(file) == generate("interleaved", 4, 12, 3, group_size=6, moe_overlap=True)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("zbh1 --ranks 4 --microbatches 8", "did you mean 'zb-h1'"),
        ("interleaved --ranks 4 --microbatches 9", "nearest valid microbatch count is 8 (or 10)"),
        ("dualpipe --ranks 3 --microbatches 9", "nearest valid rank count is 2 (or 4)"),
        ("1f1b --ranks 4 --microbatches 8 --option memory", "expected key=value"),
        ("1f1b --ranks 4 --microbatches 8 --option memory=3", "has no option 'memory'"),
        ("1f1b --ranks 4", "--microbatches"),
        ("1f1b --ranks 99999999999 --microbatches 1", "are 99999999999 forward actions, more"),
        ("1f1b --ranks 4 --microbatches 8 -o nowhere/t.csv", "there is no folder nowhere"),
        ("1f1b --ranks 4 --microbatches 8 -o /", "it is a folder"),
        ("1f1b --ranks 0 --microbatches 8", "--ranks"),
    ],
)
def test_mistakes_go_to_standard_error_with_code_2(capsys, arguments, message):
    code, out, err = call(capsys, "schedule", *arguments.split())
    assert (code, out) == (2, "")
    assert message in err
