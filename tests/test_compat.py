"""The door to JAX's inside opens in every supported version: CI runs this at both ends."""

import jax
import jax.numpy as jnp
import numpy as np

from octojax import compat


def test_builds_and_runs_a_jaxpr() -> None:
    x = compat.new_var(jax.typeof(jnp.ones(3)))
    y = compat.new_var(x.aval)
    eqn = compat.new_eqn(jax.lax.neg_p, [x], [y], {})
    jaxpr = compat.new_jaxpr([x], [y, x], [eqn])
    first, second = compat.eval_jaxpr(jaxpr, [jnp.arange(3.0)])
    np.testing.assert_array_equal(first, [0, -1, -2])
    np.testing.assert_array_equal(second, [0, 1, 2])
    assert len(jaxpr.jaxpr.invars) == 1
    grad = jax.grad(lambda v: compat.eval_jaxpr(jaxpr, [v])[0].sum())(jnp.ones(3))
    np.testing.assert_array_equal(grad, [-1, -1, -1])


def test_splits_constants_from_open_and_closed_jaxprs() -> None:
    table = jnp.arange(4.0)
    closed, shape = compat.trace(lambda x: x + table, jnp.ones(4))
    assert shape.shape == (4,)
    inner, consts = compat.split_consts(closed)
    assert len(inner.constvars) == len(consts)
    body = compat.trace(jax.checkpoint(jnp.sin), jnp.ones(2))[0].eqns[0].params["jaxpr"]
    assert compat.split_consts(body)[1] == ()


def test_kinds_and_sizes_of_values() -> None:
    key = jax.typeof(jax.random.key(0))
    assert compat.is_key(key)
    assert not compat.is_float(key)
    assert compat.num_bytes(key) == 8
    half = jax.ShapeDtypeStruct((3, 5), jnp.bfloat16)
    assert compat.is_float(half)
    assert compat.num_bytes(half) == 30
    assert not compat.is_float(jax.ShapeDtypeStruct((), jnp.int32))


def test_names_of_call_equations() -> None:
    def name(fn, *args) -> str:
        return compat.trace(fn, *args)[0].eqns[0].primitive.name

    assert name(jax.jit(jnp.sin), 1.0) in compat.JIT_NAMES
    assert name(jax.checkpoint(jnp.sin), 1.0) in compat.REMAT_NAMES
    custom = jax.custom_jvp(jnp.sin)
    custom.defjvps(lambda g, ans, x: g)
    assert name(custom, 1.0) in compat.CUSTOM_NAMES
    custom = jax.custom_vjp(jnp.sin)
    custom.defvjp(lambda x: (x, None), lambda _, g: (g,))
    assert name(custom, 1.0) in compat.CUSTOM_NAMES


def test_counts_the_operands_of_a_scan() -> None:
    w = jnp.ones((3, 3))

    def run(w, h, xs):
        return jax.lax.scan(lambda c, x: (c @ w + x, c), h, xs)

    closed, _ = compat.trace(run, w, jnp.ones((2, 3)), jnp.ones((5, 2, 3)))
    (eqn,) = [e for e in closed.eqns if e.primitive.name == "scan"]
    assert compat.scan_counts(eqn.params) == (1, 1)
    assert eqn.params["length"] == 5
