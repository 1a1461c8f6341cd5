"""Checkpoints: the user's layout in and out, under other plans, in parts, refused when wrong."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import SingleDeviceSharding

from octojax import checkpoint
from octojax.errors import FormatError
from octojax.executor.update import Update
from octojax.ir import Partition, Placement, Plan, Schedule
from octojax.update import Places, build_update


def make_params() -> dict[str, Any]:
    return {
        "layers": [{"w": jnp.arange(12.0).reshape(3, 4)}, {"w": jnp.ones((2,), jnp.bfloat16)}],
        "none": jnp.zeros((0, 3)),
        "scale": jnp.float32(3),
    }


def same(got: Any, expected: Any) -> None:
    assert jax.tree.structure(got) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


def test_everything_comes_back_in_the_users_structure(tmp_path: Path) -> None:
    params = make_params()
    state = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3)).init(params)
    module_state = {"key": jax.random.key(7), "count": jnp.int32(4)}
    schedule = Schedule.parse("0F0 0B0\n1F0 1B0")
    plan = Plan(Partition((1, 2)), Placement.sequential(2), schedule)
    checkpoint.save(tmp_path / "c", params, state, step=12, module_state=module_state, plan=plan)
    found = checkpoint.load(tmp_path / "c", params, state, module_state)
    same(found.params, params)
    same(found.opt_state, state)
    assert found.step == 12
    assert found.plan == plan
    assert found.module_state["count"] == 4
    np.testing.assert_array_equal(
        jax.random.key_data(found.module_state["key"]), jax.random.key_data(module_state["key"])
    )


def test_without_templates_plain_dicts_come_back(tmp_path: Path) -> None:
    checkpoint.save(tmp_path / "c", make_params())
    found = checkpoint.load(tmp_path / "c")
    np.testing.assert_array_equal(found.params["layers"]["0"]["w"], np.arange(12).reshape(3, 4))
    assert found.params["layers"]["1"]["w"].dtype == jnp.bfloat16
    assert found.opt_state is None
    assert found.plan is None


def test_a_single_array_is_a_tree_too(tmp_path: Path) -> None:
    checkpoint.save(tmp_path / "c", jnp.arange(3))
    same(checkpoint.load(tmp_path / "c", jnp.arange(3)).params, np.arange(3, dtype=np.int32))


def test_state_continues_under_another_placement(tmp_path: Path) -> None:
    optimizer = optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(1e-2))
    params = {"a": jnp.linspace(0.0, 1.0, 6).reshape(2, 3), "b": jnp.ones(4)}
    grads = [jnp.cos(x) for x in jax.tree.leaves(params)]
    expected, expected_state = params, optimizer.init(params)
    leaves: Any = jax.tree.leaves(params)
    state = None
    for step, owners in enumerate([(0, 1), (1, 0), (0, 0)]):
        plan = build_update(optimizer, params, owners, 2)
        where = Places(tuple(SingleDeviceSharding(d) for d in jax.devices()[:2]))
        update = Update(plan, where)

        def put(values: Any, plan: Any = plan, where: Places = where) -> Any:
            return [
                jax.device_put(np.asarray(x), where.of_param(plan, i)) for i, x in enumerate(values)
            ]

        if step == 0:
            leaves = put(leaves)
            state = update.init(leaves)
        else:
            found = checkpoint.load(tmp_path / str(step - 1), params, expected_state)
            leaves, state = put(jax.tree.leaves(found.params)), update.scatter(found.opt_state)
        leaves, state, *_ = update.apply(leaves, put(grads), state)
        tree = jax.tree.unflatten(jax.tree.structure(params), leaves)
        checkpoint.save(tmp_path / str(step), tree, update.gather(state), step=step)
        updates, expected_state = optimizer.update(
            jax.tree.unflatten(jax.tree.structure(params), grads), expected_state, expected
        )
        expected = optax.apply_updates(expected, updates)
    for got, want in zip(leaves, jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-6)


def test_an_interrupted_checkpoint_is_refused(tmp_path: Path) -> None:
    checkpoint.save(tmp_path / "c", jnp.ones(2))
    (tmp_path / "c" / "octojax.json").unlink()
    with pytest.raises(FileNotFoundError, match="interrupted"):
        checkpoint.load(tmp_path / "c")
    checkpoint.save(tmp_path / "c", jnp.zeros(3))
    same(checkpoint.load(tmp_path / "c", jnp.ones(3)).params, np.zeros(3, np.float32))


def test_what_does_not_fit_is_named(tmp_path: Path) -> None:
    path = tmp_path / "c"
    checkpoint.save(path, {"a": jnp.ones((2, 3)), "old": jnp.ones(1)})
    with pytest.raises(FormatError) as error:
        checkpoint.load(path, {"a": jnp.ones((2, 4)), "new": jnp.ones(1)})
    message = str(error.value)
    assert "3 leaves of params do not fit" in message
    assert "new is not in the file" in message
    assert "old is in the file only" in message
    assert "a is float32[2, 3] in the file, expected float32[2, 4]" in message
    with pytest.raises(FileExistsError, match="overwrite=True"):
        checkpoint.save(path, {"a": jnp.ones(1)})
    with pytest.raises(FileNotFoundError, match="does not exist"):
        checkpoint.load(tmp_path / "nowhere")


def test_names_of_equal_text_are_different_leaves(tmp_path: Path) -> None:
    params = {
        "a.b": jnp.zeros(2),
        "a": {"b": jnp.ones(2), "b~1": jnp.full(2, 2.0)},
        "": jnp.ones(1),
    }
    checkpoint.save(tmp_path, params)
    same(checkpoint.load(tmp_path, params).params, params)


def test_numbers_are_arrays_of_their_jax_type(tmp_path: Path) -> None:
    params = {"scale": 1.5, "count": 3, "on": True, "half": -0.0}
    checkpoint.save(tmp_path, params)
    found = checkpoint.load(tmp_path, params).params
    assert {k: str(x.dtype) for k, x in found.items()} == {
        "scale": "float32",
        "count": "int32",
        "on": "bool",
        "half": "float32",
    }
    assert np.signbit(found["half"])


def test_leaves_that_are_no_arrays_are_named_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=r"params.name is of type str; opt_state.0 is of type obj"):
        checkpoint.save(tmp_path / "c", {"name": "model", "w": jnp.ones(1)}, [object()])
    assert not (tmp_path / "c").exists()
