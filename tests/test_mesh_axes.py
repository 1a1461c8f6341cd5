"""Meshes with further axes, meshes that the caller has in force, shardings inside the model."""

import contextlib
import warnings
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import octojax as octopipe
from octojax.errors import MeshError, NonFiniteError, PlanError
from tests.pipelines import FAST

RNG = np.random.default_rng(0)
PARAMS = {
    "a": RNG.standard_normal((4, 8)).astype(np.float32) / 2,
    "b": RNG.standard_normal((8, 4)).astype(np.float32) / 2,
}
ROWS = RNG.standard_normal((8, 4)).astype(np.float32)
OPTIONS = {"microbatches": 2, "progress": False, "compiler_options": FAST}


def mesh_of(*shape, axes, explicit=False):
    kind = AxisType.Explicit if explicit else AxisType.Auto
    devices = jax.devices()[: int(np.prod(shape))]
    return jax.make_mesh(shape, axes, devices=devices, axis_types=(kind,) * len(axes))


def constrained(*shardings):
    """A loss that gives its hidden layer these shardings."""

    def loss(params, x):
        h = jnp.tanh(x @ params["a"])
        for sharding in shardings:
            h = jax.lax.with_sharding_constraint(h, sharding)
        return jnp.mean((h @ params["b"] - x) ** 2)

    return loss


plain = constrained()


def assert_exact(loss, mesh, expected=plain):
    with octopipe.value_and_grad(loss, PARAMS, ROWS, mesh=mesh, **OPTIONS) as f:
        assert_close(f(PARAMS, ROWS), jax.value_and_grad(expected)(PARAMS, ROWS))
        return f


def assert_close(found, expected):
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6), found, expected)


# ---------------------------------------------------------------------- further axes


@pytest.mark.parametrize(
    ("axes", "shape"),
    [
        (("pipe", "tensor"), (2, 2)),
        (("expert", "pipe"), (2, 2)),
        (("pipe", "fsdp"), (2, 1)),
        (("data", "context", "pipe"), (2, 2, 1)),
        (("pipe", "context", "data", "tensor"), (1, 2, 1, 2)),
    ],
)
def test_further_axes(axes, shape):
    mesh = mesh_of(*shape, axes=axes)
    further = tuple(a for a in axes if a not in ("pipe", "data"))
    assert_exact(constrained(P(None, further), NamedSharding(mesh, P(axes, None))), mesh)


def test_a_constraint_spreads_the_work_of_a_rank():
    mesh = mesh_of(2, 2, axes=("pipe", "tensor"))

    def loss(params, x):
        h = jax.lax.with_sharding_constraint(jnp.tanh(x @ params["a"]), P(None, "tensor"))
        b = jax.lax.with_sharding_constraint(params["b"], P("tensor", None))
        return jnp.mean((h @ b - x) ** 2)

    f = octopipe.value_and_grad(loss, PARAMS, ROWS, mesh=mesh, **OPTIONS)
    texts = [program.as_text() for program in f.loss.trainer.engine.programs]
    assert any("all-reduce(" in text for text in texts)
    assert_close(f(PARAMS, ROWS), jax.value_and_grad(plain)(PARAMS, ROWS))
    f.close()


# ---------------------------------------------------------------------- meshes of the caller


def legacy(mesh):
    stack = contextlib.ExitStack()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of `with mesh:` itself
        stack.enter_context(mesh)
    return stack


CONTEXTS = {
    "with mesh": legacy,
    "set_mesh": jax.set_mesh,
    "use_abstract_mesh": lambda mesh: jax.sharding.use_abstract_mesh(mesh.abstract_mesh),
}


@pytest.mark.parametrize("name", CONTEXTS)
def test_a_mesh_of_the_caller(name):
    mesh = mesh_of(2, 2, axes=("pipe", "data"))
    with CONTEXTS[name](mesh):
        assert_exact_under(constrained(P("data", None), P("pipe")), mesh)


def assert_exact_under(loss, mesh, expected=plain):
    """`assert_exact`, with a mesh in force that plain JAX is not to see; it stays in force."""
    before = jax.sharding.get_abstract_mesh()
    with octopipe.value_and_grad(loss, PARAMS, ROWS, mesh=mesh, **OPTIONS) as f:
        found = jax.device_get(f(PARAMS, ROWS))
    assert jax.sharding.get_abstract_mesh() == before
    with jax.set_mesh(None):
        assert_close(found, jax.device_get(jax.value_and_grad(expected)(PARAMS, ROWS)))


@pytest.mark.parametrize("spec", [None, P("data", None)])
def test_a_mesh_with_explicit_axes(spec):
    mesh = mesh_of(2, 2, axes=("pipe", "data"), explicit=True)
    with jax.set_mesh(mesh):
        assert_exact_under(constrained() if spec is None else constrained(spec), mesh)


@pytest.mark.parametrize("explicit", [False, True])
def test_another_mesh_of_the_caller(explicit):
    other = mesh_of(4, axes=("elsewhere",), explicit=explicit)
    with jax.set_mesh(other):
        assert_exact_under(plain, mesh_of(2, axes=("pipe",)))


def test_the_mesh_in_force_is_the_default():
    with jax.set_mesh(mesh_of(2, 2, axes=("tensor", "pipe"))):
        assert_exact_under(constrained(P("tensor")), None)
    every = f"{len(jax.devices())} stages"  # more than there are layers
    with jax.set_mesh(mesh_of(2, axes=("elsewhere",))), pytest.raises(PlanError, match=every):
        octopipe.value_and_grad(plain, PARAMS, ROWS, **OPTIONS)


def test_a_nan_is_named_on_a_rank_of_several_devices():
    def loss(params, x):
        h = jax.lax.with_sharding_constraint(x @ params["a"], P(None, "tensor"))
        return jnp.mean(jnp.log(h @ params["b"]))  # of a negative number

    mesh = mesh_of(2, 2, axes=("pipe", "tensor"))
    place = r"rank 1: .*test_mesh_axes.py:\d+"
    f = octopipe.value_and_grad(loss, PARAMS, ROWS, mesh=mesh, **OPTIONS)
    with f, jax.debug_nans(True), pytest.raises(NonFiniteError, match=place):
        f(PARAMS, ROWS)


def test_a_step_is_called_under_another_mesh_than_it_was_compiled_under():
    mesh = mesh_of(2, 2, axes=("pipe", "tensor"))
    with octopipe.compile(PARAMS, plain, optax.adam(0.1), ROWS, mesh=mesh, **OPTIONS) as step:
        state = step.init()
        with jax.set_mesh(mesh_of(2, 2, axes=("pipe", "tensor"), explicit=True)):
            state, metrics = step(state, jax.device_put(ROWS, NamedSharding(mesh, P("tensor"))))
            loss = float(step.evaluate(state, ROWS)["loss"])
        assert_close(metrics["loss"], plain(PARAMS, ROWS))
        assert_close(step.reference(state, ROWS)[0], loss)


# ---------------------------------------------------------------------- shardings in the model


def nested(mesh):
    """Constraints in jit, scan, cond, checkpoint and a custom rule, over all axes."""
    at = NamedSharding(mesh, P("data", "tensor"))
    limit = partial(jax.lax.with_sharding_constraint, shardings=at)

    @jax.custom_vjp
    def sine(x):
        return limit(jnp.sin(x))

    sine.defvjp(lambda x: (sine(x), limit(jnp.cos(x))), lambda cos, g: (limit(2 * g * cos),))

    def loss(params, x):
        def body(h, _):
            h = jax.checkpoint(lambda h: limit(jnp.tanh(h @ params["b"] @ params["a"])))(h)
            spread = partial(jax.lax.with_sharding_constraint, shardings=P(None, "tensor"))
            return jax.lax.cond(params["a"][0, 0] > 0, spread, lambda h: 2 * h, h), None

        h, _ = jax.lax.scan(body, x @ params["a"], None, length=2)
        h = jax.jit(lambda h: limit(2 * h))(jax.device_put(h, at))
        return jnp.mean((sine(jax.jit(jnp.tanh, out_shardings=at)(h)) @ params["b"]) ** 2)

    return loss


def test_constraints_inside_every_kind_of_call():
    mesh = mesh_of(1, 2, 2, axes=("pipe", "data", "tensor"))
    with jax.set_mesh(mesh):
        whole = jax.jit(jax.value_and_grad(nested(mesh)))(PARAMS, ROWS)
    with octopipe.value_and_grad(nested(mesh), PARAMS, ROWS, mesh=mesh, **OPTIONS) as f:
        assert_close(jax.device_get(f(PARAMS, ROWS)), jax.device_get(whole))


def mapped(rows, check, **options):
    def loss(params, x):
        multiply = jax.shard_map(
            lambda h, w: jax.lax.psum(h @ w, "tensor"),
            in_specs=(P(rows, "tensor"), P("tensor", None)),
            out_specs=P(rows, None),
            check_vma=check,
            **options,
        )
        return jnp.mean((multiply(jnp.tanh(x @ params["a"]), params["b"]) - x) ** 2)

    return loss


@pytest.mark.parametrize("check", [True, False])
def test_shard_map_over_an_axis_of_a_rank(check):
    assert_exact(mapped(None, check), mesh_of(2, 2, axes=("pipe", "tensor")))
    assert_exact(mapped("data", check), mesh_of(1, 2, 2, axes=("pipe", "data", "tensor")))


@pytest.mark.parametrize("axes", [("pipe", "tensor"), ("pipe", "data")])
def test_terms_of_the_parameters_alone(axes):
    mesh = mesh_of(2, 2, axes=axes)

    def loss(params, x, limit=lambda p: p):
        penalty = sum(jnp.sum(limit(p) ** 2) for p in params.values())
        return plain(params, x) + 0.1 * penalty

    limited = partial(jax.lax.with_sharding_constraint, shardings=P(axes[1]))
    with jax.set_mesh(mesh):
        assert_exact_under(lambda params, x: loss(params, x, limited), mesh, loss)


@pytest.mark.parametrize("shape", [(1, 2, 2), (2, 1, 2)])
def test_keys_of_a_batch_and_what_they_are_compared_with(shape):
    mesh = mesh_of(*shape, axes=("pipe", "data", "tensor"))

    def loss(params, batch):
        x, key = batch
        h = jax.lax.with_sharding_constraint(x @ params["a"], P("data", "tensor"))
        h = h * jax.random.bernoulli(jax.random.fold_in(key, 1), 0.5, h.shape)
        return jnp.mean((h @ params["b"] - x) ** 2)

    batch = ROWS, jax.random.key(0)
    with octopipe.compile(PARAMS, loss, optax.sgd(0.1), batch, mesh=mesh, **OPTIONS) as step:
        state = step.init()
        expected = step.reference(state, batch)
        assert_close(step.value_and_grad(state, batch)[0], expected[0])
        assert_close(step(state, batch)[1]["loss"], expected[0])


# ---------------------------------------------------------------------- refusals


def resharded(params, x):
    return plain(params, jax.sharding.reshard(x, P("data")))


def summed_over_data(params, x):
    mean = jax.shard_map(
        lambda x: jax.lax.pmean(x, "data"), in_specs=P(), out_specs=P(), check_vma=False
    )
    return plain(params, mean(x))


DATA = ("pipe", "data")


@pytest.mark.parametrize(
    ("loss", "text"),
    [
        (constrained(P("model")), "axes .*pipe.*data.*names an axis that the mesh does not have"),
        (
            lambda p, x: constrained(NamedSharding(mesh_of(4, axes=("model",)), P("model")))(p, x),
            r"test_mesh_axes.py:\d+:?\d* .*'model'.*Name axes of this mesh",
        ),
        (resharded, r"explicit sharding.*axis_types=\(jax.sharding.AxisType.Auto"),
        (summed_over_data, r"test_mesh_axes.py:\d+:?\d* .*computes over the axis 'data'"),
        (
            lambda p, x: mapped(None, True, mesh=mesh_of(2, 2, axes=("pipe", "tensor")))(p, x),
            "shard_map with a mesh of its own. Leave mesh= out",
        ),
    ],
)
def test_what_does_not_fit_the_mesh_is_refused(loss, text):
    mesh = mesh_of(2, 2, axes=DATA)
    with jax.set_mesh(mesh), pytest.raises(MeshError, match=text):
        octopipe.value_and_grad(loss, PARAMS, ROWS, mesh=mesh, **OPTIONS)


def test_a_bare_spec_without_a_mesh_in_force_is_refused():
    mesh = mesh_of(2, 2, axes=DATA)
    with pytest.raises(MeshError, match=r"with jax.set_mesh\(mesh\)"):
        octopipe.value_and_grad(constrained(P("data")), PARAMS, ROWS, mesh=mesh, **OPTIONS)


# ---------------------------------------------------------------------- Flax


class Linen(nn.Module):
    @nn.compact
    def __call__(self, x):
        init = nn.initializers.lecun_normal()
        up = nn.Dense(8, kernel_init=nn.with_partitioning(init, (None, "tensor")))
        h = nn.with_logical_constraint(jnp.tanh(up(x)), ("batch", "mlp"))
        return nn.Dense(4, kernel_init=nn.with_logical_partitioning(init, ("mlp", None)))(h)


class Nnx(nnx.Module):
    def __init__(self, rngs):
        init = nnx.initializers.lecun_normal()
        self.up = nnx.Linear(
            4, 8, kernel_init=nnx.with_partitioning(init, (None, "tensor")), rngs=rngs
        )
        self.down = nnx.Linear(
            8, 4, kernel_init=nnx.with_partitioning(init, ("tensor", None)), rngs=rngs
        )

    def __call__(self, x):
        return self.down(jax.lax.with_sharding_constraint(jnp.tanh(self.up(x)), P(None, "tensor")))


def assert_trains(step, loss, params):
    """Two steps of Adam, and the reference, against plain JAX without any mesh."""
    optimizer = optax.adam(0.1)
    slots, state = optimizer.init(params), step.init()
    for _ in range(2):
        state, metrics = step(state, ROWS)
        value, grads = jax.value_and_grad(loss)(params, ROWS)
        assert_close(metrics["loss"], value)
        updates, slots = optimizer.update(grads, slots, params)
        params = optax.apply_updates(params, updates)
    assert_close(jax.tree.leaves(step.params(state)), jax.tree.leaves(params))
    assert_close(step.reference(state, ROWS)[0], loss(params, ROWS))
    step.close()


def test_linen_with_partitioning_and_logical_constraints():
    model, mesh = Linen(), mesh_of(1, 2, 2, axes=("pipe", "data", "tensor"))
    variables = model.init(jax.random.key(0), ROWS)

    def loss(variables, x):
        return jnp.mean((model.apply(variables, x) - x) ** 2)

    with nn.logical_axis_rules((("batch", "data"), ("mlp", "tensor"))), jax.set_mesh(mesh):
        step = octopipe.compile(
            model, loss, optax.adam(0.1), ROWS, params=variables, mesh=mesh, **OPTIONS
        )
        with jax.set_mesh(None):
            assert_trains(step, loss, nn.unbox(variables))


@pytest.mark.parametrize("explicit", [False, True])
def test_nnx_with_partitioning(explicit):
    mesh = mesh_of(2, 2, axes=("pipe", "tensor"), explicit=explicit)
    with jax.set_mesh(mesh):
        model = Nnx(nnx.Rngs(0))
    assert not model.up.kernel.get_value().sharding.is_fully_replicated

    def loss(model, x):
        return jnp.mean((model(x) - x) ** 2)

    def by_hand(params, x):
        up, down = (params[name] for name in ("up", "down"))
        h = jnp.tanh(x @ up["kernel"] + up["bias"][None])
        return jnp.mean((h @ down["kernel"] + down["bias"][None] - x) ** 2)

    params = jax.tree.map(np.asarray, nnx.to_pure_dict(nnx.state(model, nnx.Param)))
    step = octopipe.compile(model, loss, optax.adam(0.1), ROWS, mesh=mesh, **OPTIONS)
    assert_trains(step, by_hand, params)
