"""`octopipe profile`, as a user calls it."""

import json
from pathlib import Path

import pytest

from octojax.cli import main
from octojax.ir import Partition, Placement, Plan, Profile, Schedule

MODEL = """
import jax, jax.numpy as jnp

def tiny():
    params = {"emb": jnp.ones((8, 4)), "layers": [jnp.ones((4, 4))] * 2, "out": jnp.ones((4, 8))}
    def loss(params, batch):
        x = params["emb"][batch]
        for w in params["layers"]:
            x = jnp.tanh(x @ w)
        return jnp.mean(jax.nn.logsumexp(x @ params["out"], axis=-1))
    return params, loss, jnp.arange(6)

def wrong():
    return 1, 2

number = 3
"""
MACHINE = {
    "name": "made up",
    "capacity_bytes": 1e9,
    "latency_s": 1e-5,
    "bandwidth_bytes_per_s": 1e9,
    "device": {"flops_per_s": 1e12, "bandwidth_bytes_per_s": 1e11},
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "tiny_model_for_profile.py").write_text(MODEL)
    (tmp_path / "machine.json").write_text(json.dumps(MACHINE))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def call(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[object, str, str]:
    with pytest.raises(SystemExit) as stop:
        main(["profile", *arguments])
    out = capsys.readouterr()
    return stop.value.code, out.out, out.err


def test_estimate_for_a_described_machine(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = "tiny_model_for_profile:tiny"
    code, out, err = call(
        capsys, target, "--machine", "machine.json", "-o", "p.json", "--ranks", "2"
    )
    assert (code, err) == (0, "")
    assert "machine: made up" in out
    assert "written to p.json" in out
    found = Profile.load(folder / "p.json")
    assert found.name == target
    assert found.ranks == 2
    assert found.machine.latency_s == 1e-5
    assert found.num_layers == 4
    assert all(x.forward_s > 0 for x in found.layers)


def test_measure_here_and_print_json(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = call(
        capsys,
        "tiny_model_for_profile:tiny",
        *("--measure", "--machine", "machine.json", "--rounds", "1", "--json"),
    )
    assert (code, err) == (0, "")
    found = Profile.from_json(json.loads(out))
    assert found.machine.name == "made up"
    assert found.layers[1].compute_s > 0
    assert "measured" in dict(found.extra)["costs"]


def two_stage_plan(layers: str) -> Plan:
    table = Schedule.parse("0F0 0I0 0W0\n1F0 1I0 1W0")
    return Plan(Partition.parse(layers), Placement.parse("0 1", 2), table)


def test_the_stages_of_a_plan(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    two_stage_plan("3 1").save(folder / "plan.json")
    target = "tiny_model_for_profile:tiny"
    code, out, err = call(
        capsys, target, "--plan", "plan.json", "--rounds", "1", "-o", "stages.json"
    )
    assert (code, err) == (0, "")
    assert "plan.json with its stages timed whole: " in out
    found = Profile.load(folder / "stages.json")
    assert found.num_layers == 2
    assert found.layers[0].kind == "stage"


def test_a_preset_on_a_machine_by_name(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = call(
        capsys,
        "octojax.models.nemotron_h:tiny",
        *("--machine", "h800", "--tensor", "2", "--sequence", "16", "--layers", "2"),
        *("--pattern", "M*", "--dtype", "float32", "--microbatch-size", "3", "-o", "p.json"),
    )
    assert code == 2  # the tiny one has one group of Mamba-2 heads
    assert "a tensor axis of 2 does not divide mamba.groups = 1" in err
    code, out, err = call(
        capsys,
        "octojax.models.llama:tiny",
        *("--machine", "h800", "--tensor", "2", "--sequence", "16", "--layers", "2"),
        *("--dtype", "float32", "--microbatch-size", "3", "-o", "p.json"),
    )
    assert (code, err) == (0, "")
    assert "machine: H800 SXM 80 GB" in out
    found = Profile.load(folder / "p.json")
    assert [x.kind for x in found.layers] == ["embedding", *["attention+mlp"] * 2, "head+loss"]
    assert dict(found.extra)["microbatch_size"] == 3
    assert found.layers[1].output_bytes == 4 * 3 * 16 * 128


def test_machines_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    code, listed, _ = call(capsys, "any:thing", "--machine", "list")
    assert code == 0
    assert listed.split()[0] == "a100"
    with pytest.raises(SystemExit):
        main(["machines"])
    assert capsys.readouterr().out == listed
    with pytest.raises(SystemExit):
        main(["machines", "--json"])
    first = json.loads(capsys.readouterr().out)[0]
    assert (first["key"], first["device"]["flops_per_s"]) == ("a100", 312e12)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["octojax.models.llama:llama-3-8", "--machine", "h100"],
            "did you mean llama-3-8b",
        ),
        (["octojax.models.llama:tiny", "--machine", "h80"], "no machine 'h80', did you mean h800"),
        (["octojax.models.llama:tiny"], "is a preset, which is priced from its shapes"),
        (
            ["octojax.models.llama:tiny", "--machine", "h800", "--measure"],
            "neither --measure, --plan nor --min-layers",
        ),
        (
            ["octojax.models.llama:tiny", "--machine", "h800", "--tensor", "3"],
            "tiny: a tensor axis of 3 does not divide",
        ),
        (
            ["tiny_model_for_profile:tiny", "--tensor", "2", "--microbatch-size", "2"],
            "--tensor, --microbatch-size: only for presets",
        ),
        (["tiny"], "expected MODULE:NAME"),
        (["no_such_module_here:f"], "cannot import no_such_module_here"),
        (["tiny_model_for_profile:absent"], "has no function 'absent'; it has"),
        (["tiny_model_for_profile:number"], "has no function 'number'"),
        (["tiny_model_for_profile:wrong"], "returned a tuple of 2, expected"),
        (["tiny_model_for_profile:tiny", "--optimizer", "walk"], "'walk' is no optimizer of optax"),
        (["tiny_model_for_profile:tiny", "--machine", "bad.json"], "unknown ['colour']"),
        (["tiny_model_for_profile:tiny", "--machine", "slow.json"], 'lacks "device"'),
        (["tiny_model_for_profile:tiny", "--machine", "absent.json"], "absent.json"),
        (["tiny_model_for_profile:tiny", "--plan", "table.csv"], "is a table; give a plan"),
        (
            ["tiny_model_for_profile:tiny", "--plan", "long.json"],
            "the model has 4: emb",
        ),
        (
            ["tiny_model_for_profile:tiny", "--plan", "long.json", "--machine", "machine.json"],
            "--plan times stages",
        ),
    ],
)
def test_mistakes_are_told(
    arguments: list[str], message: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "bad.json").write_text(json.dumps({**MACHINE, "colour": "blue"}))
    (folder / "slow.json").write_text(json.dumps({"latency_s": 1e-6}))
    two_stage_plan("4 5").save(folder / "long.json")
    two_stage_plan("1 1").schedule.save(folder / "table.csv")
    code, out, err = call(capsys, *arguments)
    assert (code, out) == (2, "")
    assert message in err
