"""Steps and gradients of the whole batch through real pipelines, terms of parameters included."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh

import octojax as octopipe
from octojax.errors import LossError
from tests.pipelines import FAST, pipe, relative_error

D = 8
OPTIONS = {"progress": False, "compiler_options": FAST}


def layers(n=4, dtype=jnp.float32):
    keys = jax.random.split(jax.random.key(0), n)
    return {f"w{i}": jax.random.normal(k, (D, D), dtype) / 3 for i, k in enumerate(keys)}


def batch(rows=8):
    rng = np.random.default_rng(0)
    mask = np.arange(6) < rng.integers(0, 7, (rows, 1))
    mask[0] = True
    x = rng.normal(size=(rows, 6, D)).astype(np.float32)
    return {"x": x, "mask": mask, "scale": np.linspace(1, 2, D, dtype=np.float32)}


def masked(params, b):
    h = b["x"]
    for w in params.values():
        h = h + jnp.tanh(h @ w)
    squares = ((h * b["scale"][None, None]) ** 2).mean(-1)
    return (squares * b["mask"]).sum() / jnp.maximum(b["mask"].sum(), 1)


def penalized(params, b):
    penalty = 1e-2 * sum(jnp.sum(w**2) for w in params.values())
    loss = masked(params, b)
    return loss + penalty, {"penalty": penalty, "data": loss}


@pytest.mark.parametrize("mesh", [(2, 1), (2, 2)])
def test_penalties_stay_with_the_owners_of_the_parameters(mesh):
    devices = np.array(jax.devices()[: mesh[0] * mesh[1]]).reshape(mesh)
    params, b = layers(), batch()
    step = octopipe.compile(
        params,
        penalized,
        optax.sgd(0.1),
        b,
        mesh=Mesh(devices, ("pipe", "data")),
        microbatches=2,
        shared="scale",
        schedule="zb-h1",
        **OPTIONS,
    )
    assert [len(ranks) for ranks in step.loss.lowered.step.holders] == [1] * 4
    assert len({term.units for term in step.loss.staged.terms}) == 4
    state = step.init()
    loss, aux, grads = step.value_and_grad(state, b)
    (wanted, wanted_aux), wanted_grads = jax.value_and_grad(penalized, has_aux=True)(params, b)
    assert relative_error((loss, grads), (wanted, wanted_grads)) < 1e-6
    assert relative_error(aux, wanted_aux) < 1e-6
    evaluated = step.evaluate(state, b)
    assert relative_error((evaluated["loss"], evaluated["aux"]), (wanted, wanted_aux)) < 1e-6
    assert relative_error(step.reference(state, b), (wanted, wanted_grads)) < 1e-6
    step.close()


def test_a_term_that_couples_ranks_stays_in_the_last_stage():
    def loss(params, b):
        norm = jnp.sqrt(sum(jnp.sum(w**2) for w in params.values()))
        return masked(params, b) + 0.1 * norm

    params, b = layers(), batch()
    options = {"mesh": pipe(2), "microbatches": 4, "shared": "scale", **OPTIONS}
    with octopipe.value_and_grad(loss, params, b, **options) as f:
        assert relative_error(f(params, b), jax.value_and_grad(loss)(params, b)) < 1e-6


def test_a_penalty_on_weights_stacked_over_layers_is_added_layer_by_layer():
    params = {"stack": jnp.stack(list(layers().values())), "out": jnp.ones((D, D)) / 9}

    def loss(params, b):
        def layer(h, w):
            return h + jnp.tanh(h @ w), None

        h, _ = jax.lax.scan(layer, b["x"], params["stack"])
        penalty = sum(jnp.sum(jnp.square(w)) for w in jax.tree.leaves(params))
        return jnp.mean((h @ params["out"]) ** 2) + 1e-2 * penalty

    b = {"x": batch()["x"]}
    step = octopipe.compile(
        params, loss, optax.sgd(0.1), b, mesh=pipe(2), microbatches=2, **OPTIONS
    )
    assert [len(ranks) for ranks in step.loss.lowered.step.holders] == [1] * 5
    value, _, grads = step.value_and_grad(step.init(), b)
    assert relative_error((value, grads), jax.value_and_grad(loss)(params, b)) < 1e-6
    step.close()


@pytest.mark.parametrize("microbatches", [3, 5])
def test_float64_is_exact_to_rounding_for_any_number_of_microbatches(microbatches):
    with jax.enable_x64(True):
        params = layers(2, jnp.float64)
        b = {"x": np.random.default_rng(1).normal(size=(15, D))}

        def loss(params, b):
            h = b["x"]
            for w in params.values():
                h = jnp.tanh(h @ w)
            return jnp.mean(h**2)

        options = {"mesh": pipe(2), "microbatches": microbatches, **OPTIONS}
        with octopipe.value_and_grad(loss, params, b, **options) as f:
            assert relative_error(f(params, b), jax.value_and_grad(loss)(params, b)) < 3e-15


def test_what_mixes_rows_is_warned_of_where_compile_is_called():
    def loss(params, b):
        return jnp.log(masked(params, b))

    def run(**options):
        return octopipe.value_and_grad(
            loss, layers(), batch(), mesh=pipe(1), microbatches=2, shared="scale", **options
        )

    with pytest.warns(octopipe.RowsWarning, match=r"test_whole_batch.py:\d+ \(log in loss\)") as w:
        run(**OPTIONS).close()
    assert [x.filename for x in w] == [__file__]
    with pytest.raises(LossError, match="strict=True"):
        run(strict=True, **OPTIONS)


def test_mistaken_names_of_leaves():
    for option in ("rows", "shared"):
        with pytest.raises(ValueError, match=f"{option}= names y, which the batch does not have"):
            octopipe.value_and_grad(masked, layers(), batch(), **{option: ("x", "y")}, **OPTIONS)
    with pytest.raises(ValueError, match="were both given"):
        octopipe.value_and_grad(masked, layers(), batch(), rows="x", shared="scale", **OPTIONS)


def test_reduction_is_deprecated():
    with pytest.warns(DeprecationWarning, match="no longer needed"):
        octopipe.Options(reduction="sum")
