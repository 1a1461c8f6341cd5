"""Every form of a user's model becomes one pure function, with nothing lost."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx
from flax.core import freeze

from octojax.errors import LossError
from octojax.frontends import adapt
from octojax.trace import trace_loss
from tests.zoo import CASES, FLAX_CASES
from tests.zoo.flax_cases import Hybrid, nnx_lm_loss


def leaves(x: Any) -> list[Any]:
    return jax.tree.leaves(x)


def test_plain_pytrees_pass_through() -> None:
    params = {"w": jnp.ones((2, 2))}
    pure = adapt(params, lambda p, b: jnp.sum(b @ p["w"]))
    loss, aux, state = pure.fn(pure.params, pure.state, jnp.ones((1, 2)))
    assert (float(loss), aux, state) == (4.0, None, None)
    assert pure.merge(params, None) is params
    again = adapt(None, lambda p, b: (jnp.sum(b @ p["w"]), {"n": 1}), params)
    assert again.fn(params, None, jnp.ones((1, 2)))[1] == {"n": 1}


def test_functional_state_may_be_returned_or_left() -> None:
    params, state = jnp.float32(2), {"n": jnp.int32(0)}
    forms = {
        "loss": (lambda p, s, b: p * b, None, 0),
        "aux": (lambda p, s, b: (p * b, "aux"), "aux", 0),
        "state": (lambda p, s, b: (p * b, None, {"n": s["n"] + 1}), None, 1),
    }
    for loss_fn, aux, count in forms.values():
        pure = adapt(params, loss_fn, state=state)
        found = pure.fn(params, state, jnp.float32(3))
        assert (float(found[0]), found[1], int(found[2]["n"])) == (6.0, aux, count)
    assert pure.merge(params, state) == (params, state)


def test_nnx_variables_shared_under_two_names_are_one_leaf() -> None:
    tied = adapt(Hybrid(nnx.Rngs(0), tied=True), nnx_lm_loss)
    free = adapt(Hybrid(nnx.Rngs(0)), nnx_lm_loss)
    assert len(leaves(free.params)) == len(leaves(tied.params)) + 1
    merged = tied.merge(tied.params, tied.state)
    assert merged.head is merged.embed


def test_nnx_filter_freezes_the_rest() -> None:
    pure = CASES["nnx-frozen"]().pure()
    traced = trace_loss(pure.fn, pure.params, CASES["nnx-frozen"]().batch(2), pure.state)
    assert all("up" in n or "down" in n or "head" in n for n in traced.params.names)
    assert any("embed" in n for n in traced.state.names)


def test_nnx_merge_gives_back_a_module_with_new_values() -> None:
    pure = CASES["nnx-hybrid"]().pure()
    doubled = jax.tree.map(lambda x: 2 * x, pure.params)
    model = pure.merge(doubled, pure.state)
    assert isinstance(model, Hybrid)
    original = CASES["nnx-hybrid"]().model
    np.testing.assert_array_equal(model.embed.embedding[...], 2 * original.embed.embedding[...])


@pytest.mark.parametrize("name", [n for n in FLAX_CASES if n.startswith("nnx")])
def test_nnx_losses_equal_the_call_on_the_module(name: str) -> None:
    case = CASES[name]()
    pure = case.pure()
    batch = case.batch(2)
    found = pure.fn(pure.params, pure.state, batch)[0]
    model = CASES[name]().model  # a fresh one: the call changes its state
    wanted = case.loss_fn(model, batch)
    wanted = wanted[0] if isinstance(wanted, tuple) else wanted
    np.testing.assert_array_equal(found, wanted)


def test_nnx_state_comes_back_as_the_module_would_hold_it() -> None:
    case = CASES["nnx-batchnorm"]()
    pure = case.pure()
    state = pure.fn(pure.params, pure.state, case.batch(4))[2]
    model = CASES["nnx-batchnorm"]().model
    case.loss_fn(model, case.batch(4))
    _, _, wanted = nnx.split(model, nnx.Param, ...)
    assert jax.tree.structure(state) == jax.tree.structure(wanted)
    for x, y in zip(leaves(state), leaves(wanted)):
        if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            x, y = jax.random.key_data(x), jax.random.key_data(y)
        np.testing.assert_array_equal(x, y)
    floats = [(x, y) for x, y in zip(leaves(state), leaves(pure.state)) if x.dtype == jnp.float32]
    assert any(bool((x != y).any()) for x, y in floats)  # and pure.state is as it was


class Writes(nnx.Module):
    def __init__(self, what: str) -> None:
        self.what = what
        self.w = nnx.Param(jnp.ones((2, 2)))

    def __call__(self, x: jax.Array) -> jax.Array:
        if self.what == "param":
            self.w[...] = self.w[...] * 2
        if self.what == "new":
            self.extra = nnx.BatchStat(jnp.zeros(()))
        return x @ self.w[...]


@pytest.mark.parametrize(
    ("what", "message"),
    [("param", r"changes trained parameters: writes \['w'\]"), ("new", r"new \['extra'\]")],
)
def test_nnx_writes_that_cannot_be_kept_are_refused(what: str, message: str) -> None:
    pure = adapt(Writes(what), lambda m, b: jnp.sum(m(b)))
    with pytest.raises(LossError, match=message):
        trace_loss(pure.fn, pure.params, jnp.ones((1, 2)), pure.state)


def test_linen_collections_besides_params_are_state() -> None:
    case = CASES["linen-batchnorm"]()
    pure = case.pure()
    assert set(pure.state) == {"batch_stats"}
    loss, aux, state = pure.fn(pure.params, pure.state, case.batch(4))
    assert aux is None
    wanted_loss, updates = case.loss_fn(case.params, case.batch(4))
    np.testing.assert_array_equal(loss, wanted_loss)
    for x, y in zip(leaves(state), leaves(updates)):
        np.testing.assert_array_equal(x, y)
    assert set(pure.merge(pure.params, state)) == {"params", "batch_stats"}


def test_linen_updates_beside_aux() -> None:
    case = CASES["linen-batchnorm"]()

    def loss(variables: Any, batch: Any) -> Any:
        value, updates = case.loss_fn(variables, batch)
        return value, {"metric": value}, updates

    _, aux, state = adapt(case.model, loss, case.params).fn(
        case.params["params"], {"batch_stats": case.params["batch_stats"]}, case.batch(4)
    )
    assert set(aux) == {"metric"}
    assert set(state) == {"batch_stats"}

    def wrong(variables: Any, batch: Any) -> Any:
        return case.loss_fn(variables, batch)[0], None, {"cache": 0}

    pure = adapt(case.model, wrong, case.params)
    with pytest.raises(LossError, match=r"updates of collections \['cache'\]"):
        pure.fn(pure.params, pure.state, case.batch(4))


def test_linen_parameters_alone_will_do() -> None:
    model = linen.Dense(2)
    params = model.init(jax.random.key(0), jnp.ones((1, 3)))["params"]
    pure = adapt(model, lambda p, b: jnp.sum(model.apply({"params": p}, b)), params)
    assert pure.state is None
    assert pure.fn(pure.params, None, jnp.ones((1, 3)))[0].shape == ()


def test_options_that_do_not_fit_are_refused() -> None:
    model = Writes("nothing")
    loss = lambda m, b: jnp.sum(m(b))  # noqa: E731
    with pytest.raises(LossError, match="'Writes' holds its own parameters"):
        adapt(model, loss, params={"w": jnp.ones(2)})
    with pytest.raises(LossError, match="trainable= is a filter for nnx"):
        adapt({"w": jnp.ones(2)}, loss, trainable=nnx.Param)
    with pytest.raises(LossError, match="'Dense' is a linen module"):
        adapt(linen.Dense(2), loss)
    with pytest.raises(LossError, match="'dict' has no trained parameters"):
        adapt({}, loss)
    with pytest.raises(LossError, match="tuple of 4 parts"):
        adapt({"w": 1.0}, lambda p, b: (1, 2, 3, 4)).fn({"w": 1.0}, None, None)


def test_the_users_module_is_left_alone() -> None:
    model = CASES["nnx-batchnorm"]().model
    before = [np.asarray(x) for x in leaves(nnx.state(model, nnx.BatchStat))]
    case = CASES["nnx-batchnorm"]()
    pure = adapt(model, case.loss_fn)
    pure.fn(pure.params, pure.state, case.batch(4))
    merged = pure.merge(pure.params, pure.state)
    case.loss_fn(merged, case.batch(4))
    for x, y in zip(before, leaves(nnx.state(model, nnx.BatchStat))):
        np.testing.assert_array_equal(x, y)


# ---------------------------------------------------------------- where new state comes back


class Outputs(NamedTuple):
    logits: Any
    stats: Any


def batchnorm() -> Any:
    case = CASES["linen-batchnorm"]()

    def apply(variables: Any, batch: Any, mutable: Any = ("batch_stats",)) -> tuple[Any, Any, Any]:
        mutable = mutable if isinstance(mutable, bool) else list(mutable)
        y, updates = case.model.apply(variables, batch["x"], train=True, mutable=mutable)
        return jnp.mean(y**2), y, updates

    return case, apply


RETURNED: dict[str, Callable[[Any, Any, Any], Any]] = {
    "updates": lambda v, y, u: (v, u),
    "aux, updates": lambda v, y, u: (v, y, u),
    "updates, aux": lambda v, y, u: (v, u, y),
    "(updates, logits)": lambda v, y, u: (v, (u, y)),
    "(logits, updates)": lambda v, y, u: (v, (y, u)),
    "[logits, updates]": lambda v, y, u: (v, [y, u]),
    "flat": lambda v, y, u: (v, {**u, "logits": y}),
    "nested": lambda v, y, u: (v, {"logits": y, "state": {"new": u}}),
    "frozen": lambda v, y, u: (v, (freeze(u), y)),
    "collection": lambda v, y, u: (v, (y, u["batch_stats"])),
    "collection, 3": lambda v, y, u: (v, y, u["batch_stats"]),
    "renamed": lambda v, y, u: (v, {"stats": u["batch_stats"], "logits": y}),
    "named tuple": lambda v, y, u: (v, Outputs(y, u)),
    "named tuple of collection": lambda v, y, u: (v, Outputs(y, u["batch_stats"])),
    "twice the same": lambda v, y, u: (v, (u, u["batch_stats"], y)),
}


@pytest.mark.parametrize("form", RETURNED)
def test_linen_updates_are_carried_wherever_they_stand(form: str) -> None:
    case, apply = batchnorm()
    batch = case.batch(4)

    def loss(variables: Any, batch: Any) -> Any:
        return RETURNED[form](*apply(variables, batch))

    pure = adapt(case.model, loss, case.params)
    _, aux, state = pure.fn(pure.params, pure.state, batch)
    _, y, wanted = apply(case.params, batch)
    assert jax.tree.structure(state) == jax.tree.structure(pure.state)
    for a, b in zip(leaves(state), leaves(wanted), strict=True):
        np.testing.assert_array_equal(a, b)
    assert len(leaves(aux)) == (0 if form == "updates" else 1)
    if form == "(updates, logits)":
        np.testing.assert_array_equal(aux[1], y)


@pytest.mark.parametrize("mutable", [True, ["batch_stats"], ["batch_stats", "intermediates"]])
def test_linen_mutable_collections(mutable: Any) -> None:
    case, apply = batchnorm()
    batch = case.batch(4)

    def loss(variables: Any, batch: Any) -> Any:
        value, y, updates = apply(variables, batch, mutable)
        if mutable != ["batch_stats"]:
            updates = {**updates, "intermediates": {"h": (y,)}}
        return value, updates

    pure = adapt(case.model, loss, case.params)
    _, aux, state = pure.fn(pure.params, pure.state, batch)
    assert any((a != b).any() for a, b in zip(leaves(state), leaves(pure.state), strict=True))
    assert len(leaves(aux)) == (0 if mutable == ["batch_stats"] else 1)
    trace_loss(pure.fn, pure.params, batch, pure.state)


def test_what_is_no_update_is_refused_with_the_right_form() -> None:
    case, apply = batchnorm()
    batch = case.batch(4)

    def refused(form: Callable[[Any, Any, Any, Any], Any], message: str) -> None:
        def loss(variables: Any, batch: Any) -> Any:
            return form(variables, *apply(variables, batch))

        pure = adapt(case.model, loss, case.params)
        with pytest.raises(LossError, match=message):
            trace_loss(pure.fn, pure.params, batch, pure.state)

    def part(u: Any) -> Any:
        return {"batch_stats": dict(list(u["batch_stats"].items())[1:])}

    def doubled(tree: Any) -> Any:
        return jax.tree.map(lambda x: 2 * x, tree)

    refused(lambda w, v, y, u: (v, (y, part(u))), r"gone \['.*mean', '.*var'\].*whole collection")
    refused(lambda w, v, y, u: (v, (u, doubled(u))), "new state twice: 'batch_stats' at aux")
    refused(
        lambda w, v, y, u: (v, {**u, "params": doubled(w["params"])}), "changes trained parameters"
    )


STATEFUL: dict[str, Callable[[Any, Any, Any], Any]] = {
    "3": lambda v, a, s: (v, a, s),
    "(state, aux)": lambda v, a, s: (v, (s, a)),
    "(aux, state)": lambda v, a, s: (v, (a, s)),
    "state": lambda v, a, s: (v, s),
    "dict": lambda v, a, s: (v, {"state": s, "acc": a}),
    "other name": lambda v, a, s: (v, {"new": s, "acc": a}),
}


@pytest.mark.parametrize("form", STATEFUL)
def test_functional_state_is_carried_wherever_it_stands(form: str) -> None:
    state = {"bn/~/mean_ema": {"average": jnp.zeros(2), "counter": jnp.int32(0)}}

    def loss(p: Any, s: Any, b: Any) -> Any:
        new = jax.tree.map(lambda x: x + jnp.ones_like(x), s)
        return STATEFUL[form](p * b, jnp.float32(7), new)

    pure = adapt(jnp.float32(2), loss, state=state)
    value, aux, new = pure.fn(pure.params, state, jnp.float32(3))
    assert float(value) == 6
    assert [float(x.sum()) for x in leaves(new)] == [2, 1]
    assert [float(x) for x in leaves(aux)] == ([] if form == "state" else [7])


def test_functional_state_without_names_is_not_guessed() -> None:
    state = (jnp.zeros(2), jnp.zeros(2))
    pure = adapt(jnp.float32(2), lambda p, s, b: (p * b, (s, 1.0)), state=state)
    with pytest.raises(LossError, match=r"aux.0 has the shapes .* Return loss, aux, new_state"):
        pure.fn(pure.params, state, jnp.float32(3))
    pure = adapt(jnp.float32(2), lambda p, s, b: (p * b, 1.0, (s[1], s[0] + 1)), state=state)
    assert float(pure.fn(pure.params, state, jnp.float32(3))[2][1][0]) == 1
    metric = adapt(jnp.float32(2), lambda p, s, b: (p * b, 5.0), state=jnp.float32(0))
    assert metric.fn(metric.params, jnp.float32(0), jnp.float32(3))[1:] == (5.0, 0)


def test_variables_given_as_parameters_are_not_trained_by_mistake() -> None:
    case, apply = batchnorm()
    pure = adapt(case.params, lambda v, b: apply(v, b)[::2])
    with pytest.raises(LossError, match=r"new values of \['batch_stats'\].*params=variables"):
        trace_loss(pure.fn, pure.params, case.batch(4))


def test_fp8_collections_are_refused_by_name() -> None:
    variables = {"params": {"w": jnp.ones(2)}, "_overwrite_with_gradient": {"s": jnp.ones(1)}}
    with pytest.raises(LossError, match=r"_overwrite_with_gradient.*by max"):
        adapt(linen.Dense(2), lambda v, b: jnp.sum(v["params"]["w"]), variables)
    with pytest.raises(LossError, match=r"_overwrite_with_gradient.*by max"):
        adapt(variables, lambda v, b: jnp.sum(v["params"]["w"]))


def test_fp8_variables_of_nnx_are_refused_by_name() -> None:
    dense = linen.Dense(2, dot_general_cls=linen.fp8_ops.Fp8DirectDotGeneralOp)
    model = nnx.bridge.ToNNX(dense, rngs=nnx.Rngs(0)).lazy_init(jnp.ones((1, 2)))
    with pytest.raises(LossError, match=r"Fp8DirectDotGeneralOp_0\.input_scale.*by max"):
        adapt(model, lambda m, b: jnp.sum(m(b)))


def equinox_like(**leaves: Any) -> Any:
    """A module as Equinox registers it: a pytree of all its fields, whatever they are."""
    kind = type("Mlp", (), {"__module__": "equinox.nn._mlp"})
    jax.tree_util.register_pytree_with_keys(
        kind,
        lambda x: ([(jax.tree_util.GetAttrKey(k), v) for k, v in vars(x).items()], tuple(vars(x))),
        lambda names, values: _with(kind(), zip(names, values, strict=True)),
    )
    return _with(kind(), leaves.items())


def _with(value: Any, fields: Any) -> Any:
    for name, field in fields:
        setattr(value, name, field)
    return value


def test_an_equinox_module_passed_whole_is_to_be_partitioned() -> None:
    module = equinox_like(w=jnp.ones((2, 2)), activation=jax.nn.relu, inference=False)
    loss = lambda p, b: jnp.sum(b)  # noqa: E731
    for model, where in ((module, "activation"), ({"enc": [module]}, "enc.0.activation")):
        with pytest.raises(LossError, match=rf"{where} .*\n.*eqx.partition\(model") as error:
            adapt(model, loss)
        assert "inference (bool)" in str(error.value)
    arrays = equinox_like(w=jnp.ones((2, 2)), activation=None)
    assert len(leaves(adapt(arrays, loss).params)) == 1
