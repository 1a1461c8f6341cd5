"""Derivative rules around parameters that several stages read: the gradient is made once."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest

from octojax.ir.partition import Partition
from octojax.layers.cut import StagedLoss, cut_stages
from octojax.layers.find import find_layers
from octojax.stages import differentiate
from octojax.trace import trace_loss
from tests.pipelines import relative_error
from tests.stages.chain import run_chain
from tests.zoo.chain import unit_value

D = 8


def around(gradient: Any) -> Any:
    """The identity of a weight whose gradient is `gradient(weight, cotangent)`."""

    @jax.custom_vjp
    def f(w: jax.Array) -> jax.Array:
        return w

    f.defvjp(lambda w: (w, w), lambda w, g: (gradient(w, g),))
    return f


decayed = around(lambda w, g: jnp.clip(g, -0.01, 0.01) + w)
doubled = around(lambda w, g: jnp.where(w > 0, 2 * g, 0.0))


@jax.custom_vjp
def observed(x: jax.Array, amax: jax.Array) -> jax.Array:
    """`x`; the gradient of `amax` is the largest entry, whatever comes back."""
    return x


observed.defvjp(lambda x, amax: (x, jnp.max(jnp.abs(x))), lambda most, g: (g, most))


def tied(p: Any, x: jax.Array) -> jax.Array:
    w = decayed(decayed(p["w"])[0])
    h = x @ w
    for u, amax in zip(p["u"], p["amax"], strict=True):
        h = jnp.tanh(observed(h, amax) @ u)
    return jnp.mean((h @ w.T) ** 2)


def stacked(rule: Any) -> Any:
    def loss(p: Any, x: jax.Array) -> jax.Array:
        def layer(h: jax.Array, row: Any) -> tuple[jax.Array, None]:
            w, amax = row
            return jnp.tanh(observed(h, amax) @ w), None

        return jnp.mean(jax.lax.scan(layer, x, (rule(p["u"]), p["amax"]))[0] ** 2)

    return loss


LOSSES = {
    "tied": tied,
    "stack": stacked(decayed),
    "stack, row by row": stacked(jax.vmap(decayed)),
    "stack, linear": stacked(doubled),
}


@pytest.mark.parametrize("name", LOSSES)
def test_a_rule_that_several_stages_read(name: str) -> None:
    keys = jax.random.split(jax.random.key(0), 3)
    params = {
        "w": jax.random.normal(keys[0], (1, D, D)),
        "u": jax.random.normal(keys[1], (4, D, D)) / 2,
        "amax": jnp.zeros(4),
    }
    x = jax.random.normal(keys[2], (4, D))
    loss = LOSSES[name]
    layered = find_layers(trace_loss(lambda p, s, b: (loss(p, b), None, s), params, x))
    n = layered.graph.num_layers
    sizes = ((n,), (2, n - 2), (1,) * n)
    cuts = [cut_stages(layered, Partition(some)) for some in sizes]
    whole = [any(b.aval.shape in ((D, D), (4, D, D)) for b in bs) for bs in cuts[-1].borders]
    assert whole == [name != "stack, linear"] * (n - 1)

    @jax.jit
    def everything(params: Any, x: jax.Array) -> Any:
        return jax.grad(loss)(params, x), [gradients(staged, params, x) for staged in cuts]

    wanted, found = everything(params, x)
    for grads in found:
        assert relative_error(grads, wanted) < 1e-6


def gradients(staged: StagedLoss, params: Any, x: jax.Array) -> Any:
    """Gradients of the stages in the tree of the parameters."""
    leaves = jax.tree.leaves(params)
    units = [unit_value(u, leaves) for u in staged.units]
    _, grads = run_chain(differentiate(staged.forwards), units, [x])
    found = list(map(jnp.zeros_like, leaves))
    for k, unit in enumerate(staged.units):
        whole = ... if unit.index is None else unit.index
        found[unit.leaf] = found[unit.leaf].at[whole].set(grads.get(k, 0.0))
    return jax.tree.unflatten(jax.tree.structure(params), found)
