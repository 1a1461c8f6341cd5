"""The index of a checkpoint: every version that was ever written loads, anything else is refused
with the file's name."""

import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from octojax import checkpoint
from octojax.errors import FormatError
from octojax.ir import Partition, Placement, Plan, Schedule

PLAN = Plan(Partition((1, 2)), Placement.sequential(2), Schedule.parse("0F0 0B0\n1F0 1B0"))
PARAMS = {"layers": [np.arange(6.0).reshape(2, 3)], "none": np.zeros((0, 3), np.float32)}


def write_version_1(path: Path) -> None:
    """What the first version wrote, by Orbax and json alone."""
    key = jax.random.key_data(jax.random.key(3))
    tree = {
        "params": {"layers": {"0": PARAMS["layers"][0]}},
        "module_state": {"value": np.asarray(key)},
    }
    orbax.checkpoint.PyTreeCheckpointer().save(path / "tree", tree)
    leaves = [
        {"name": ["params", "layers", "0"], "shape": [2, 3], "dtype": "float64"},
        {"name": ["params", "none"], "shape": [0, 3], "dtype": "float32"},
        {"name": ["module_state", "value"], "shape": [2], "dtype": "uint32", "key": "threefry2x32"},
    ]
    index = {"version": 1, "step": 7, "plan": PLAN.to_json(), "leaves": leaves}
    (path / "octojax.json").write_text(json.dumps(index, indent=1) + "\n")


def test_version_1_loads_and_is_overwritten(tmp_path: Path) -> None:
    write_version_1(tmp_path)
    found = checkpoint.load(tmp_path, PARAMS)
    np.testing.assert_array_equal(found.params["layers"][0], PARAMS["layers"][0])
    assert found.params["none"].shape == (0, 3)
    assert found.step == 7
    assert found.plan == PLAN
    np.testing.assert_array_equal(
        jax.random.key_data(found.module_state["value"]), jax.random.key_data(jax.random.key(3))
    )
    checkpoint.save(tmp_path, PARAMS, step=8, overwrite=True)
    assert checkpoint.load(tmp_path).step == 8
    assert len(list(tmp_path.iterdir())) == 2


def test_damaged_data_of_version_1_are_told_by_name(tmp_path: Path) -> None:
    write_version_1(tmp_path)
    index = tmp_path / "octojax.json"
    index.write_text(index.read_text().replace('"layers"', '"other"'))
    with pytest.raises(FormatError, match=rf"{tmp_path / 'tree'}.*params.other.0 is missing"):
        checkpoint.load(tmp_path)
    (tmp_path / "tree" / "_METADATA").write_text("{")
    with pytest.raises(FormatError, match=rf"{tmp_path / 'tree'} is damaged and cannot be read"):
        checkpoint.load(tmp_path)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda index: {**index, "version": 4}, "version 4, .*newer one: upgrade"),
        (lambda index: {**index, "version": "1"}, "version '1', but this octojax reads"),
        (lambda index: {**index, "version": True}, "version True"),
        (lambda index: [1], "is not the index of a checkpoint"),
        (lambda index: {"name": "package.json"}, "is not the index of a checkpoint"),
        (lambda index: {"version": 1, "step": 1, "plan": None}, "it has no leaves"),
        (lambda index: {**index, "version": 1, "step": "x"}, "the step is 'x'"),
        (lambda index: {**index, "version": 1, "step": True}, "the step is True"),
        (lambda index: {**index, "version": 1, "step": -1}, "the step is -1"),
        (lambda index: {**index, "version": 1, "plan": {"a": 1}}, "its plan cannot be read"),
        (lambda index: {**index, "version": 1, "leaves": {}}, "leaves are dict"),
        (lambda index: {**index, "version": 1, "leaves": [{}]}, "leaf 0 cannot be read.*name"),
        (lambda index: {**index, "version": 1, "leaves": index["leaves"] * 2}, "come twice: p"),
        (lambda index: {**index, "version": 1, "tree": "../x"}, "data are in '../x'"),
        (lambda index: {**index, "step": 2}, "its digest is another one"),
        (lambda index: {**index, "tree": "tree-00000000"}, "its digest is another one"),
    ],
)
def test_an_index_that_cannot_be_is_named(tmp_path: Path, change: Any, text: str) -> None:
    checkpoint.save(tmp_path, {"w": np.ones(2)}, step=1)
    file = tmp_path / "octojax.json"
    file.write_text(json.dumps(change(json.loads(file.read_text()))))
    with pytest.raises(FormatError, match=f"{file}.*{text}"):
        checkpoint.load(tmp_path)


@given(st.data())
@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_any_other_text_is_refused_by_name(tmp_path: Path, data: Any) -> None:
    file = tmp_path / "octojax.json"
    if not file.exists():
        checkpoint.save(tmp_path, {"w": np.ones(2)}, step=1)
    good = file.read_bytes()
    kind = data.draw(st.sampled_from(["cut", "bytes", "byte"]))
    text = good[: data.draw(st.integers(0, len(good) - 3))]
    if kind == "bytes":
        text = data.draw(st.binary(max_size=40))
    if kind == "byte":
        at = data.draw(st.integers(0, len(good) - 1))
        text = good[:at] + data.draw(st.binary(min_size=1, max_size=1)) + good[at + 1 :]
    file.write_bytes(text)
    try:
        if text.split() != good.split():
            with pytest.raises(FormatError, match=str(file)):
                checkpoint.load(tmp_path)
    finally:
        file.write_bytes(good)
