"""Optimizer state and parameters spread over the data axis."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import octojax as octopipe
from octojax.api.zero import over_data, param_specs
from tests.api.test_param_specs import (
    MATRIX,
    OPTIONS,
    PARAMS,
    ROWS,
    SPECS,
    assert_trains,
    bytes_by_device,
    compiled,
    loss,
    mesh_of,
)

CLIPPED = optax.chain(optax.clip_by_global_norm(0.1), optax.adamw(1e-2))


def moments(state):
    return [x for x in jax.tree.leaves(state.opt_state) if x.ndim]


@pytest.mark.parametrize(
    ("zero", "shape", "schedule"),
    [
        (1, (1, 2, 2), "1f1b"),
        pytest.param(1, (2, 2, 1), "1f1b", marks=pytest.mark.slow),
        pytest.param(3, (1, 2, 2), "1f1b", marks=pytest.mark.slow),
        (3, (2, 2, 1), "zb-h1"),
    ],
)
def test_the_same_step_with_less_on_each_device(zero, shape, schedule):
    specs = SPECS if shape[2] > 1 else None
    with compiled(mesh_of(*shape), specs, optimizer=CLIPPED, schedule=schedule, zero=zero) as step:
        state = assert_trains(step, optimizer=CLIPPED)
        data, tensor = shape[1:]
        per_rank = len(PARAMS["blocks"]) * 2 // shape[0] * MATRIX // tensor
        devices = [d for rank in step.loss.mesh.ranks for d in rank.devices]
        scale = PARAMS["scale"].nbytes
        last = set(step.loss.mesh.ranks[-1].devices)
        spread = {d: (per_rank + scale * (d in last)) // data for d in devices}
        whole = {d: per_rank + scale * (d in last) for d in devices}
        assert bytes_by_device(state.model.units) == (spread if zero == 3 else whole)
        assert bytes_by_device(moments(state)) == {d: 2 * size for d, size in spread.items()}
        results, *_ = step.loss.run(step.loss.trainer, state.model, ROWS)
        assert bytes_by_device(results.gradients) == spread
        ends = [p for p in step.report.collectives if p.name == "the end of a step"]
        assert {(c.kind, c.axes) for p in ends for c in p.collectives} <= {
            ("reduce-scatter", ("data",)),
            ("all-reduce", ("data",)),  # of the loss
        }
        assert step.report.not_spread == ()


def centered_columns(x):
    return x - jnp.mean(x, axis=0, keepdims=True) if x.ndim == 2 else x


def test_what_the_optimizer_mixes_stays_whole_and_is_named():
    centered = optax.stateless(lambda tree, _: jax.tree.map(centered_columns, tree))
    optimizer = optax.chain(optax.scale_by_adam(), centered, optax.scale(-1e-2))
    with compiled(mesh_of(1, 2, 1), optimizer=optimizer, zero=1) as step:
        state = assert_trains(step, optimizer=optimizer)
        text = "\n".join(step.report.not_spread)
        for name in ("blocks.0.up", "blocks.1.down"):
            assert f"{name}, whose elements the optimizer mixes (" in text
        assert "scale" not in text
        assert "(reduce_sum)" in text
        assert all(x.sharding.is_fully_replicated for x in moments(state) if x.ndim == 2)
        assert "not spread over data: blocks.0.up" in str(step.report)


def test_a_shape_that_data_does_not_divide_stays_whole():
    params = {**PARAMS, "odd": np.ones((3, 1), np.float32)}

    def odd_loss(p, x):
        return loss(p, x) * jnp.sum(p["odd"])

    with compiled(mesh_of(1, 2, 1), params=params, loss=odd_loss, zero=3) as step:
        assert_trains(step, params, odd_loss)
        assert step.report.not_spread == ("odd, whose shape [3, 1] data does not divide",)


def test_a_tied_weight_of_two_ranks():
    params = {"w": PARAMS["blocks"][0]["up"], "v": PARAMS["blocks"][0]["down"]}

    def tied(p, x):
        return jnp.mean((jnp.tanh(jnp.tanh(x @ p["w"]) @ p["v"]) @ p["w"] - 1) ** 2)

    specs = {"w": P(None, "tensor"), "v": P("tensor")}
    with compiled(mesh_of(2, 2, 1), specs, params=params, loss=tied, zero=3) as step:
        assert any(len(ranks) == 2 for ranks in step.loss.lowered.step.holders)
        assert_trains(step, params, tied)


def test_checkpoints_and_states_of_other_levels(tmp_path):
    mesh = mesh_of(1, 2, 2)
    with compiled(mesh, SPECS, zero=3) as spread, compiled(mesh) as whole:
        state, _ = spread(spread.init(), ROWS)
        with pytest.raises(ValueError, match=r"another step.*shardings"):
            whole(state, ROWS)
        adopted = whole.adopt(state)
        spread.save(tmp_path / "a", state)
        for found in (adopted, whole.restore(tmp_path / "a"), spread.restore(tmp_path / "a")):
            step = spread if found.origin == spread.origin else whole
            jax.tree.map(
                np.testing.assert_array_equal,
                (step.params(found), step.opt_state(found)),
                (spread.params(state), spread.opt_state(state)),
            )
        np.testing.assert_allclose(
            spread(state, ROWS)[1]["loss"], whole(adopted, ROWS)[1]["loss"], rtol=1e-6
        )


def test_where_the_data_axis_goes():
    mesh = jax.sharding.AbstractMesh((2, 4), ("data", "tensor"))
    assert over_data(P(), (6, 4), mesh) == P("data", None)
    assert over_data(P(), (3, 4), mesh) == P(None, "data")
    assert over_data(P("tensor"), (8, 4), mesh) == P("tensor", "data")
    assert over_data(P("tensor"), (8, 3), mesh) == P(("tensor", "data"), None)
    assert over_data(P("tensor"), (4, 3), mesh) == P("tensor")
    assert over_data(P(), (), mesh) == P()


@pytest.mark.parametrize("zero", [0, 1, 3])
def test_specs_by_level(zero):
    mesh = jax.sharding.AbstractMesh((2, 2), ("data", "tensor"))
    avals = [jax.ShapeDtypeStruct((4, 4), jnp.float32)] * 2
    found = param_specs(zero, [P(None, "tensor"), P()], avals, mesh, whole={1})
    plain, spread = (P(None, "tensor"), P()), (P("data", "tensor"), P("data", None))
    assert found.params == plain
    assert found.stored == (spread if zero == 3 else plain)
    assert found.gradients == ((spread[0], P()) if zero else plain)


def test_levels_that_there_are_not():
    with pytest.raises(ValueError, match=r"zero = 2, expected 0 .*2 would be 1"):
        compiled(mesh_of(1, 2, 1), zero=2)
    with pytest.raises(ValueError, match=r"zero=1 spreads what octopipe.compile keeps"):
        octopipe.value_and_grad(loss, PARAMS, ROWS, mesh=mesh_of(1, 2, 1), zero=1, **OPTIONS)
