"""`octopipe simulate`: the documented JSON, and messages that help."""

import json
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

from octojax.ir import LayerCost, Machine, Partition, Placement, Plan, Profile, Schedule

GOLDENS = Path(__file__).parents[1] / "goldens"
TABLE = str(GOLDENS / "sail_1F1B_p4_m8_v1.csv")


@pytest.fixture
def octopipe(command):
    return partial(command, "simulate")


@pytest.fixture
def profile(tmp_path) -> str:
    layers = tuple(
        LayerCost(kind, 1.0, 1.0, 1.0, state_bytes=100, residual_bytes=8, output_bytes=4)
        for kind in ("embed", "x", "x", "x", "x", "head")
    )
    Profile("six", layers, Machine(latency_s=1.0)).save(tmp_path / "p.json")
    return str(tmp_path / "p.json")


def test_json(octopipe):
    code, out, err = octopipe(TABLE, "--json")
    assert (code, err) == (0, "")
    result = json.loads(out)
    assert result["makespan_s"] == 33
    assert [r["bubble_s"] for r in result["ranks"]] == [9] * 4
    assert [r["residual_bubble_s"] for r in result["ranks"]] == [9, 6, 3, 0]
    assert [r["boundary_bubble_s"] for r in result["ranks"]] == [0, 3, 6, 9]
    assert [r["peak_microbatches"] for r in result["ranks"]] == [4, 3, 2, 1]
    assert result["transfers"]["count"] == 48


@pytest.mark.parametrize(
    ("options", "makespan"),
    [
        (("--costs", "1,1,1"), 33),
        (("--costs", "1,1,1,1"), 22),
        (("--latency", "1"), 49),
        (("--costs", "1,.5,.5", "--latency", "0"), 22),
    ],
)
def test_costs(octopipe, options, makespan):
    code, out, _ = octopipe(TABLE, *options, "--json")
    assert code == 0
    assert json.loads(out)["makespan_s"] == makespan


def test_profile(octopipe, profile):
    """Six layers on four ranks: inner layers 1 each, embedding and head with the ends."""
    result = json.loads(octopipe(TABLE, "--profile", profile, "--latency", "0", "--json")[1])
    assert [r["busy_s"] for r in result["ranks"]] == [48, 24, 24, 48]
    assert result["ranks"][0]["peak_bytes"] > 200
    slower = json.loads(octopipe(TABLE, "--profile", profile, "--json")[1])
    assert slower["makespan_s"] > result["makespan_s"]


def test_plan(octopipe, profile, tmp_path):
    schedule = Schedule.parse("0F0 0B0\n1F0 1B0")
    Plan(Partition((2, 4)), Placement.sequential(2), schedule).save(tmp_path / "plan.json")
    code, out, _ = octopipe(str(tmp_path / "plan.json"), "--profile", profile, "--json")
    assert code == 0
    assert json.loads(out)["makespan_s"] == 2 + 1 + 4 + 8 + 1 + 4


def test_text(octopipe):
    code, out, _ = octopipe(TABLE)
    assert code == 0
    assert "makespan 33 units, bubble ratio 0.2727, 48 transfers" in out
    assert out.count("\n") == 7


def test_blocking(octopipe):
    gpipe = str(GOLDENS / "torch_GPipe_p4_m8_v1.csv")
    result = json.loads(octopipe(gpipe, "--blocking", "--latency", "1", "--json")[1])
    assert result["makespan_s"] == 67
    code, _, err = octopipe(TABLE, "--blocking")
    assert code == 2
    assert "stuck at 0SEND_F3 1SEND_F2 2SEND_F1 3SEND_B0" in err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--costs", ""), "expected three or four numbers >= 0"),
        (("--costs", "1,2"), "expected three or four numbers >= 0"),
        (("--costs", "1,2,x"), "expected three or four numbers >= 0"),
        (("--costs", "1,2,-3"), "expected three or four numbers >= 0"),
        (("--costs", "1,2,nan"), "expected three or four numbers >= 0"),
        (("--costs", "1,1,1", "--profile", "x"), "not both"),
        (("--profile", "none.json"), "none.json does not exist"),
        (("--profile", TABLE), "not JSON"),
        (("--latency", "-1"), "latency"),
    ],
)
def test_bad_options(octopipe, options, message):
    code, out, err = octopipe(TABLE, *options)
    assert (code, out) == (2, "")
    assert message in err


def test_bad_tables(octopipe, profile, tmp_path):
    code, out, err = octopipe(str(GOLDENS / "negative" / "bad_missing_W_p2_m2.csv"))
    assert (code, out) == (2, "")
    assert "0W1 is missing" in err
    schedule = Schedule.parse("0F0 0B0\n1F0 1B0")
    Plan(Partition((2, 2)), Placement.sequential(2), schedule).save(tmp_path / "plan.json")
    code, out, err = octopipe(str(tmp_path / "plan.json"), "--profile", profile)
    assert (code, out) == (2, "")
    assert "[2 2] has 4 layers, the profile 6" in err


@pytest.mark.parametrize("command", ["check", "simulate"])
def test_neither_jax_nor_a_compiler_is_loaded(command):
    """What makes the commands start quickly: they load only what they use."""
    code = (
        "import sys\nfrom octojax.cli import main\n"
        f"try: main(['{command}', {TABLE!r}])\n"
        "except SystemExit as stop: assert not stop.code\n"
        "loaded = [m for m in ('jax', 'numba', 'networkx', 'scipy') if m in sys.modules]\n"
        "assert not loaded, loaded"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=GOLDENS.parents[1], timeout=120)
