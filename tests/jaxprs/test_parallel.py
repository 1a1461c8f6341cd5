"""Scans that carry sums alone are run at once, others are not taken for such."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import jaxpr_as_fun

from octojax.compat import new_jaxpr
from octojax.jaxprs.flat import flatten, rewrite
from octojax.jaxprs.parallel import is_map, open_map

X = jnp.arange(12.0).reshape(4, 3) / 7
W = jnp.linspace(-1.0, 1.0, 9).reshape(3, 3)


def sums(carry: Any, x: jax.Array) -> Any:
    total, count, same = carry
    y = jnp.tanh(x @ W) * same
    return (total + y, jnp.int32(3) + count, same), (y[0], jnp.sum(y))


def counted(carry: Any, x: jax.Array) -> Any:
    i, total = carry
    return (i + 2, x * i + total), i


MAPS: dict[str, Callable[[], Any]] = {
    "map": lambda: jax.lax.map(lambda x: jnp.sin(x @ W), X),
    "sums": lambda: jax.lax.scan(sums, (jnp.zeros(3), 5, 0.5), X),
    "weak sum": lambda: jax.lax.scan(lambda t, x: (t + jnp.sum(x), None), 0.0, X),
    "reverse": lambda: jax.lax.scan(lambda t, x: (t + x, 2 * x), jnp.ones(3), X, reverse=True),
    "counter": lambda: jax.lax.scan(counted, (1, jnp.zeros(3)), X),
    "loop": lambda: jax.lax.fori_loop(0, 4, lambda i, t: t + X[i] * (i + 1), jnp.zeros(3)),
    "keys": lambda: jax.lax.map(jax.random.uniform, jax.random.split(jax.random.key(0), 3)),
}
OTHERS: dict[str, Callable[[], Any]] = {
    "recurrence": lambda: jax.lax.scan(lambda h, x: (jnp.tanh(h @ W) + x, None), X[0], X),
    "running sum": lambda: jax.lax.scan(lambda t, x: (t + x, t), X[0], X),
    "new running sum": lambda: jax.lax.scan(lambda t, x: (t + x, t + x), X[0], X),
    "doubling": lambda: jax.lax.scan(lambda t, x: (t + t, x), X[0], X),
    "product": lambda: jax.lax.scan(lambda t, x: (t * x, None), X[0], X),
    "swap": lambda: jax.lax.scan(lambda t, x: (t[::-1], x), (X[0], X[1]), X),
    "reverse counter": lambda: jax.lax.scan(counted, (1, jnp.zeros(3)), X, reverse=True),
    "sum that another sum reads": lambda: jax.lax.scan(
        lambda t, x: ((t[0] + x, t[1] + t[0]), None), (X[0], X[1]), X
    ),
    "prints": lambda: jax.lax.scan(lambda _, x: (jax.debug.print("{}", x), None), None, X),
}


def scan_of(fn: Callable[[], Any]) -> Any:
    flat = flatten(jax.make_jaxpr(fn)())
    return flat, next(eqn for eqn in flat.eqns if eqn.primitive.name == "scan")


@pytest.mark.parametrize("name", MAPS)
def test_a_map_gives_the_same_at_once(name: str) -> None:
    flat, eqn = scan_of(MAPS[name])
    assert is_map(eqn)
    opened = rewrite(flat, lambda b, e, args: open_map(b, e, args) if e is eqn else None)
    assert not [e for e in opened.eqns if e.primitive.name == "scan"]
    run = jaxpr_as_fun(new_jaxpr(opened.constvars, opened.outvars, opened.eqns))
    found, wanted = run(*opened.constants), jax.tree.leaves(MAPS[name]())
    for x, y in zip(found, wanted, strict=True):
        assert jnp.result_type(x) == jnp.result_type(y)
        np.testing.assert_allclose(x, y, rtol=1e-6)


@pytest.mark.parametrize("name", OTHERS)
def test_what_passes_from_step_to_step_is_no_map(name: str) -> None:
    assert not is_map(scan_of(OTHERS[name])[1])
