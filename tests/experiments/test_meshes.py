"""`--mesh` of the experiments: axes by place or name, what does not divide, a run."""

import subprocess
import sys
from types import SimpleNamespace

import pytest
from flax import nnx
from hypothesis import given
from hypothesis import strategies as st

from octojax.models import jamba, llama
from tests.experiments.test_experiments import EXPERIMENTS, check, run, text  # noqa: F401

sys.path.insert(0, str(EXPERIMENTS))
import meshes

SIZES = st.integers(1, 99)


@given(pipe=SIZES, data=SIZES, tensor=SIZES, expert=SIZES)
def test_axes_go_by_place_or_by_name(pipe: int, data: int, tensor: int, expert: int) -> None:
    sizes = {"pipe": pipe, "data": data, "tensor": tensor, "expert": expert}
    wanted = {axis: size for axis, size in sizes.items() if axis == "pipe" or size > 1}
    assert meshes.parsed(f"{pipe}, {data},{tensor},{expert}") == wanted
    named = ",".join(f"{axis}={size}" for axis, size in reversed(wanted.items()))
    assert meshes.parsed(named) == wanted
    assert list(meshes.parsed(named)) == list(wanted)
    assert meshes.devices(wanted) == pipe * data * tensor * expert


@pytest.mark.parametrize(
    ("written", "said"),
    [
        ("2,0", "data is 0, expected a whole number from 1"),
        ("pipe=2,pipe=2", "pipe is there twice"),
        ("2,2,2,2,2", "'2' is none of pipe, data, tensor, expert"),
        ("pipe=x,tenor=2", "pipe is x, .*; 'tenor' is none of"),
        ("", "pipe is empty"),
    ],
)
def test_what_is_no_mesh_is_said(written: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        meshes.parsed(written)


def test_what_an_axis_does_not_divide_is_listed() -> None:
    config = jamba.tiny(64)
    model = nnx.eval_shape(lambda: jamba.Jamba(config, rngs=nnx.Rngs(0)))
    said = r"data 3 x tensor 5 x expert 3: 16 samples.*; .*heads = \d+.*; .*does not divide 4 exp"
    with pytest.raises(ValueError, match=said):
        meshes.check({"pipe": 2, "data": 3, "tensor": 5, "expert": 3}, 16, 8, model)
    meshes.check({"pipe": 2, "data": 2, "tensor": 2, "expert": 2}, 16, 8, model)
    dense = SimpleNamespace(config=llama.tiny(64))
    with pytest.raises(ValueError, match="does not divide 0 experts"):
        meshes.check({"pipe": 2, "expert": 2}, 16, 8, dense)


def test_the_command_line_refuses_a_mesh_before_it_does_anything(tmp_path) -> None:
    command = [sys.executable, str(EXPERIMENTS / "llama.py"), "--mesh", "2,x"]
    done = subprocess.run(
        [*command, "--out", str(tmp_path / "out")], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 2
    assert "llama: --mesh '2,x': data is x" in done.stderr
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["2,2,1", "pipe=2,tensor=2"])
def test_a_run_over_further_axes_is_exact(mesh: str, text, tmp_path) -> None:  # noqa: F811
    options = ["--mesh", mesh, "--layers", "4", "--tune-seconds", "1", "--data", str(text)]
    done = run("llama", *options, "--out", str(tmp_path), "--no-evaluate", "--no-race")
    summary = check(done, tmp_path)
    assert summary["settings"]["mesh"] == meshes.parsed(mesh)
    assert "pipe 2 x " in done.stdout
