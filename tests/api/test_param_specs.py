"""Parameters that are spread over the devices of a rank: where they lie, and that nothing else
changes."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx
from flax.core.spmd import logical_axis_rules
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import octojax as octopipe
from octojax.errors import MeshError
from tests.pipelines import FAST

RNG = np.random.default_rng(0)
WIDTH, HIDDEN = 4, 8


def block():
    return {
        "up": RNG.standard_normal((WIDTH, HIDDEN)).astype(np.float32) / 2,
        "down": RNG.standard_normal((HIDDEN, WIDTH)).astype(np.float32) / 3,
    }


PARAMS = {"blocks": [block(), block()], "scale": np.ones(WIDTH, np.float32)}
SPECS = {"blocks": [{"up": P(None, "tensor"), "down": P("tensor")}] * 2}
ROWS = RNG.standard_normal((8, WIDTH)).astype(np.float32)
OPTIONS = {"microbatches": 2, "progress": False, "compiler_options": FAST}


def loss(params, x):
    h = x
    for b in params["blocks"]:
        h = h + jnp.tanh(h @ b["up"]) @ b["down"]
    return jnp.mean((h * params["scale"][None] - 1) ** 2)


def mesh_of(*shape, axes=("pipe", "data", "tensor")):
    devices = jax.devices()[: int(np.prod(shape))]
    return jax.make_mesh(shape, axes, devices=devices, axis_types=(AxisType.Auto,) * len(axes))


def compiled(mesh, specs=None, params=PARAMS, optimizer=None, loss=loss, **options):
    optimizer = optimizer or optax.adamw(1e-2)
    return octopipe.compile(
        params, loss, optimizer, ROWS, mesh=mesh, param_specs=specs, **{**OPTIONS, **options}
    )


def assert_close(found, expected):
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6), found, expected)


def assert_trains(step, params=PARAMS, loss=loss, optimizer=None):
    """Two steps against the plain model; returns the last state."""
    optimizer = optimizer or optax.adamw(1e-2)
    state, slots = step.init(), optimizer.init(params)
    for _ in range(2):
        value, grads = jax.value_and_grad(loss)(params, ROWS)
        found = step.value_and_grad(state, ROWS)
        assert_close(jax.tree.leaves(found[2]), jax.tree.leaves(grads))
        state, metrics = step(state, ROWS)
        assert_close(metrics["loss"], value)
        updates, slots = optimizer.update(grads, slots, params)
        params = optax.apply_updates(params, updates)
    assert_close(jax.tree.leaves(step.params(state)), jax.tree.leaves(params))
    return state


def bytes_by_device(values):
    """Bytes that each device keeps of some arrays."""
    found: dict = {}
    for array in jax.tree.leaves(values):
        for shard in array.addressable_shards:
            found[shard.device] = found.get(shard.device, 0) + shard.data.nbytes
    return found


MATRIX = WIDTH * HIDDEN * 4
"""Bytes."""


@pytest.mark.parametrize(
    ("shape", "schedule"),
    [((2, 1, 2), "1f1b"), ((1, 2, 2), "zb-h1"), ((2, 1, 2), "zb-h1"), ((2, 2, 1), "gpipe")],
)
def test_every_device_keeps_its_share(shape, schedule):
    mesh = mesh_of(*shape)
    parts = shape[2]
    with compiled(mesh, SPECS, schedule=schedule) as step:
        state = assert_trains(step)
        ranks = step.loss.mesh.ranks
        matrices = [2 * len(PARAMS["blocks"]) // len(ranks)] * len(ranks)
        owned = [matrices[r] * MATRIX // parts for r in range(len(ranks))]
        owned[step.loss.owners[[u.name for u in step.loss.staged.units].index("scale")]] += 16
        expected = {d: owned[r.index] for r in ranks for d in r.devices}
        assert bytes_by_device(state.model.units) == expected
        moments = {d: 2 * size for d, size in expected.items()}
        arrays = [x for x in jax.tree.leaves(state.opt_state) if x.ndim]
        assert bytes_by_device(arrays) == moments
        results, *_ = step.loss.run(step.loss.trainer, state.model, ROWS)
        assert bytes_by_device(results.gradients) == expected


def test_sums_of_gradients_and_residuals_are_spread():
    with compiled(mesh_of(1, 1, 2), SPECS, schedule="zb-h1") as step:
        engine = step.loss.trainer.engine
        (preparation,) = engine._preparations.values()
        spread = {t.sharding.spec for t in preparation.totals}
        assert spread == {P(None, "tensor"), P("tensor"), P()}


def test_a_checkpoint_of_spread_parameters(tmp_path):
    whole, spread = mesh_of(2, axes=("pipe",)), mesh_of(2, 1, 2)
    with compiled(spread, SPECS) as first, compiled(whole) as second:
        state, _ = first(first.init(), ROWS)
        first.save(tmp_path / "a", state)
        again = first.restore(tmp_path / "a")
        assert bytes_by_device(again.model.units) == bytes_by_device(state.model.units)
        other = second.restore(tmp_path / "a")
        jax.tree.map(np.testing.assert_array_equal, first.params(state), second.params(other))
        jax.tree.map(np.testing.assert_array_equal, first.opt_state(again), second.opt_state(other))
        assert_close(first(again, ROWS)[1], second(second.adopt(state), ROWS)[1])


# ---------------------------------------------------------------------- where specs come from


def nnx_model(up, down, **metadata):
    class Model(nnx.Module):
        def __init__(self, rngs):
            init = nnx.initializers.lecun_normal()
            layer = partial(nnx.Linear, use_bias=False, rngs=rngs)
            wrap = partial(nnx.with_partitioning, init, **metadata)
            self.up = layer(WIDTH, HIDDEN, kernel_init=wrap(up))
            self.down = layer(HIDDEN, WIDTH, kernel_init=wrap(down))

        def __call__(self, x):
            return x + self.down(jnp.tanh(self.up(x)))

    return Model(nnx.Rngs(0))


def specs_of(step):
    return {unit.name: spec for unit, spec in zip(step.loss.staged.units, step.loss.unit_specs)}


def nnx_loss(model, x):
    return jnp.mean((model(x) - 1) ** 2)


def nnx_by_hand(params, x):
    up, down = (params[name]["kernel"] for name in ("up", "down"))
    return jnp.mean((x + jnp.tanh(x @ up) @ down - 1) ** 2)


RULES = (("embed", None), ("mlp", "tensor"))


@pytest.mark.parametrize("how", ["axes", "rules of the model", "rules in force"])
def test_metadata_of_nnx(how):
    names = (None, "tensor") if how == "axes" else ("embed", "mlp")
    mesh = mesh_of(2, 1, 2)
    rules = {"sharding_rules": RULES} if how == "rules of the model" else {}
    with jax.set_mesh(mesh), logical_axis_rules(RULES if how == "rules in force" else ()):
        model = nnx_model(names, names[::-1], **rules)
        step = compiled(mesh, params=model, loss=nnx_loss)
    assert set(specs_of(step).values()) == {P(None, "tensor"), P("tensor", None)}
    params = jax.tree.map(np.asarray, nnx.to_pure_dict(nnx.state(model, nnx.Param)))
    assert_trains(step, params, nnx_by_hand)
    step.close()


@pytest.mark.parametrize("logical", [False, True])
def test_metadata_of_linen(logical):
    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            init = nn.initializers.lecun_normal()
            wrap = nn.with_logical_partitioning if logical else nn.with_partitioning
            names = ("embed", "mlp") if logical else (None, "tensor")
            h = jnp.tanh(nn.Dense(HIDDEN, use_bias=False, kernel_init=wrap(init, names))(x))
            return x + nn.Dense(WIDTH, use_bias=False, kernel_init=wrap(init, names[::-1]))(h)

    model, mesh = Model(), mesh_of(2, 1, 2)
    variables = model.init(jax.random.key(0), ROWS)

    def loss(variables, x):
        return jnp.mean((model.apply(variables, x) - 1) ** 2)

    with nn.logical_axis_rules(RULES), jax.set_mesh(mesh):
        step = octopipe.compile(
            model, loss, optax.adamw(1e-2), ROWS, params=variables, mesh=mesh, **OPTIONS
        )
    assert set(specs_of(step).values()) == {P(None, "tensor"), P("tensor", None)}
    assert_trains(step, nn.unbox(variables), loss)
    step.close()


def test_arrays_of_the_mesh_and_what_is_said_beside():
    mesh = mesh_of(2, 1, 2)
    other = mesh_of(2, 2, axes=("a", "b"))
    placed = {
        "a": jax.device_put(PARAMS["blocks"][0]["up"], NamedSharding(mesh, P(None, "tensor"))),
        "b": jax.device_put(PARAMS["blocks"][0]["down"], NamedSharding(other, P("b"))),
        "c": jax.device_put(PARAMS["blocks"][1]["up"], NamedSharding(mesh, P("tensor"))),
    }

    def loss(p, x):
        return jnp.mean((jnp.tanh(jnp.tanh(x @ p["a"]) @ p["b"]) @ p["c"]) ** 2)

    with compiled(mesh, {"c": P()}, params=placed, loss=loss) as step:
        assert specs_of(step) == {"a": P(None, "tensor"), "b": P(), "c": P()}
        assert_trains(step, jax.tree.map(np.asarray, placed), loss)


def test_a_function_of_path_and_shape_and_rows_of_a_stack():
    stacked = {"w": np.stack([np.eye(4, dtype=np.float32)] * 4) / 2}

    def loss(p, x):
        return jnp.mean(jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, p["w"])[0] ** 2)

    asked = []

    def spec(path, shape):
        asked.append((path, shape))
        return P(None, None, "tensor")

    with compiled(mesh_of(2, 1, 2), spec, params=stacked, loss=loss) as step:
        assert asked == [("w", (4, 4, 4))]
        assert step.loss.unit_specs == (P(None, "tensor"),) * 4
        assert_trains(step, stacked, loss)


def test_a_model_that_exists_only_as_shapes():
    mesh = mesh_of(2, 1, 2)
    at = NamedSharding(mesh.abstract_mesh, P(None, "tensor"))

    def make():
        a, b = jax.random.split(jax.random.key(0))
        return {"a": jax.random.normal(a, (WIDTH, HIDDEN)), "b": jax.random.normal(b, (HIDDEN, 4))}

    shapes = jax.eval_shape(make)
    shapes["a"] = jax.ShapeDtypeStruct((WIDTH, HIDDEN), jnp.float32, sharding=at)

    def loss(p, x):
        return jnp.mean((jnp.tanh(x @ p["a"]) @ p["b"]) ** 2)

    with compiled(mesh, {"b": P("tensor")}, params=shapes, loss=loss) as step:
        state = step.init(params=make())
        assert [x.sharding.spec for x in state.model.units] == [P(None, "tensor"), P("tensor")]
    with compiled(mesh, {"b": P("tensor")}, params=make, loss=loss) as step:
        state = step.init()
        assert [x.sharding.spec for x in state.model.units][1] == P("tensor")
        jax.tree.map(np.testing.assert_array_equal, step.params(state), jax.jit(make)())


# ---------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("specs", "text"),
    [
        ({"scale": P("pipe")}, r"scale of shape \[4\] has P.*'pipe'.*names the pipeline's axis"),
        ({"scale": P("data")}, r"scale.*names the axis 'data'"),
        ({"scale": P("tenor")}, r"scale.*no axis 'tenor' \(did you mean 'tensor'\?\)"),
        ({"scale": P(None, "tensor")}, r"scale.*2 entries for 1 dimensions"),
        (
            {"blocks": P("tensor", "tensor")},
            r"4 partition.*blocks\.0\.up.*blocks\.1\.up.*twice",
        ),
        ({"block": P("tensor")}, r"'block' \(did you mean 'blocks"),
        ({"scale": "tensor"}, "scale a value of type str, expected a jax.sharding.PartitionSpec"),
    ],
)
def test_specs_that_do_not_fit_are_refused(specs, text):
    with pytest.raises(MeshError, match=text):
        compiled(mesh_of(2, 1, 2), specs)


def test_dimensions_that_do_not_divide_are_listed():
    params = {"a": np.ones((4, 3), np.float32), "b": np.ones((3, 5), np.float32)}
    text = r"2 partition.*a of shape \[4, 3\].*dimension 1 of 3.*b of shape.*dimension 0 of 3.*2 of"
    with pytest.raises(MeshError, match=text):
        compiled(
            mesh_of(2, 1, 2),
            {"a": P(None, "tensor"), "b": P("tensor")},
            params=params,
            loss=lambda p, x: jnp.mean((x @ p["a"] @ p["b"]) ** 2),
        )


class Tied(nnx.Module):
    """The first matrix is also the last one, and the block runs twice, under two names."""

    def __init__(self, rngs):
        self.up = nnx.Linear(WIDTH, HIDDEN, use_bias=False, rngs=rngs)
        self.block = nnx.Linear(HIDDEN, HIDDEN, use_bias=False, rngs=rngs)
        self.down = nnx.Linear(WIDTH, HIDDEN, use_bias=False, rngs=rngs)
        self.down.kernel, self.later = self.up.kernel, self.block

    def __call__(self, x):
        h = self.later(jnp.tanh(self.block(jnp.tanh(self.up(x)))))
        return h @ self.down.kernel[...].T


def tied_by_hand(params, x):
    h = jnp.tanh(x @ params["down"]["kernel"])
    h = jnp.tanh(h @ params["block"]["kernel"]) @ params["block"]["kernel"]
    return jnp.mean((h @ params["down"]["kernel"].T - 1) ** 2)


@pytest.mark.parametrize(
    "specs",
    [
        {"up": {"kernel": P(None, "tensor")}, "later": P("tensor")},
        lambda path, shape: {"up.kernel": P(None, "tensor"), "block.kernel": P("tensor")}.get(path),
    ],
)
def test_a_tied_weight_has_the_spec_of_any_of_its_paths(specs):
    model = Tied(nnx.Rngs(0))
    with compiled(mesh_of(2, 1, 2), specs, params=model, loss=nnx_loss) as step:
        divided = {name: tuple(spec).index("tensor") for name, spec in specs_of(step).items()}
        assert divided == {"block.kernel": 0, "down.kernel": 1}
        params = jax.tree.map(np.asarray, nnx.to_pure_dict(nnx.state(model, nnx.Param)))
        assert_trains(step, params, tied_by_hand)


@pytest.mark.parametrize("function", [False, True])
def test_two_specs_for_one_tied_weight_are_refused_with_all_offenders(function):
    by_path = {
        "up": {"kernel": P(None, "tensor")},
        "down": {"kernel": P("tensor")},
        "block": {"kernel": P("tensor")},
        "later": {"kernel": P(None, "tensor")},
    }

    def spec(path, shape):
        first, *rest = path.split(".")
        return by_path[first][rest[0]]

    text = (
        r"block\.kernel .*'tensor'.* and later\.kernel .*None, 'tensor'.*; "
        r"down\.kernel .*'tensor'.* and up\.kernel .*None, 'tensor'.* the same spec"
    )
    with pytest.raises(MeshError, match=text):
        compiled(
            mesh_of(2, 1, 2),
            spec if function else by_path,
            params=Tied(nnx.Rngs(0)),
            loss=nnx_loss,
        )


def test_the_layers_of_a_stack_are_not_spread():
    stacked = {"w": np.stack([np.eye(4, dtype=np.float32)] * 4)}

    def loss(p, x):
        return jnp.mean(jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, p["w"])[0] ** 2)

    with pytest.raises(MeshError, match="dimension 0 is that of the layers"):
        compiled(mesh_of(2, 1, 2), {"w": P("tensor")}, params=stacked, loss=loss)
