"""What commands refuse before any work: one line on standard error, exit code 2, no traceback."""

import pytest

import octojax
from octojax.cli import COMMANDS, main
from octojax.ir import LayerCost, Partition, Placement, Plan, Profile, Schedule


@pytest.fixture
def octopipe(capsys, tmp_path, monkeypatch):
    """Runs a command line in a folder with a table, a plan and profiles of two sizes."""
    monkeypatch.chdir(tmp_path)
    schedule = Schedule.parse("0F0 0B0\n1F0 1B0")
    schedule.save("table.csv")
    Plan(Partition((1, 1)), Placement.sequential(2), schedule).save("plan.json")
    for layers in (2, 3):
        Profile("p", (LayerCost("x", 1.0, 1.0, 1.0),) * layers).save(f"profile{layers}.json")

    def run(*arguments: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as stop:
            main(list(arguments))
        out, err = capsys.readouterr()
        return int(stop.value.code or 0), out, err

    return run


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("emulate plan.json --profile none.json", "none.json does not exist"),
        ("emulate plan.json --profile profile3.json", "[1 1] has 2 layers, the profile 3"),
        ("emulate plan.json --profile profile2.json -n 0", "--processes"),
        ("emulate plan.json --profile profile2.json --scale 0", "--scale 0.0: expected a number"),
        ("emulate plan.json --profile profile2.json --scale nan", "--scale nan: expected a number"),
        ("emulate plan.json --profile profile2.json --steps 0", "--steps"),
        ("emulate plan.json --profile profile2.json -o none/x.json", "there is no folder none"),
        ("launch none.py", "none.py does not exist; expected a Python script"),
        ("launch .", ". is a folder; expected a Python script"),
        ("launch table.csv -n 0", "--processes"),
        ("launch table.csv --devices 0", "--devices"),
        ("launch table.csv --port 99999999", "--port"),
        ("profile json:loads", "'json:loads' cannot be called without arguments"),
        ("profile json:loads -o none/x.json", "there is no folder none"),
        ("simulate table.csv --latency inf", "latency_s = inf"),
        ("simulate table.csv --latency 1e308", "the makespan is too large"),
        ("tune profile2.json --seed -1", "--seed"),
        ("tune profile2.json --offer-microbatches 4 --microbatches 4", "not both"),
        ("tune profile2.json -o none/x.json", "there is no folder none"),
        ("tune plan.json", "lacks its list of 'layers'"),
        ("simulat table.csv", "No such command 'simulat'"),
    ],
)
def test_refusals(octopipe, arguments, message):
    code, out, err = octopipe(*arguments.split())
    assert (code, out) == (2, "")
    assert message in err
    assert "Traceback" not in err


def test_version(octopipe):
    assert octopipe("--version") == (0, f"octopipe {octojax.__version__}\n", "")


def test_help_lists_every_command(octopipe):
    code, out, _ = octopipe("--help")
    assert code == 0
    assert all(f" {name} " in out for name in COMMANDS)
