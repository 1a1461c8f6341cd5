"""A model called twice, or mapped over chunks, has the layers of the model called once."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from octojax.ir.partition import Partition
from octojax.layers import boundary, cut_stages, find_layers
from octojax.layers.find import LayeredLoss
from octojax.stages import Role, differentiate
from octojax.trace import trace_loss
from tests.pipelines import FAST, relative_error
from tests.stages.chain import run_chain
from tests.zoo.chain import unit_value

D, N = 4, 2


def block(w: Any, h: jax.Array) -> jax.Array:
    x = h * jax.lax.rsqrt(jnp.mean(h * h, -1, keepdims=True) + 1e-3) * w["scale"]
    return h + jnp.tanh(x @ w["up"]) @ w["down"]


def net(p: Any, h: jax.Array, block: Callable[..., jax.Array] = block) -> jax.Array:
    for w in p:
        h = block(w, h)
    return h


def scanned(p: Any, h: jax.Array) -> jax.Array:
    stack = jax.tree.map(lambda *x: jnp.stack(x), *p)
    return jax.lax.scan(lambda h, w: (block(w, h), None), h, stack)[0]


def dropped(p: Any, h: jax.Array, key: jax.Array) -> jax.Array:
    for k, w in enumerate(p):
        keep = jax.random.bernoulli(jax.random.fold_in(key, k), 0.7, h.shape)
        h = jnp.where(keep, block(w, h), 0.0)
    return h


def weights(count: int, seed: int) -> list[Any]:
    keys = jax.random.split(jax.random.key(seed), 2 * count)
    return [
        {
            "scale": jnp.ones((1, D)),
            "up": jax.random.normal(keys[2 * k], (D, 2 * D)) / 2,
            "down": jax.random.normal(keys[2 * k + 1], (2 * D, D)) / 2,
        }
        for k in range(count)
    ]


PARAMS = {"net": weights(N, 0), "other": weights(N, 1), "a": jnp.eye(D), "b": 2 * jnp.eye(D)}
BATCH = {
    "x": jax.random.normal(jax.random.key(2), (4, D)),
    "y": jax.random.normal(jax.random.key(3), (4, D)),
    "long": jax.random.normal(jax.random.key(4), (8, D)),
    "key": jax.random.key(5),
}


def siamese(p: Any, b: Any) -> jax.Array:
    return jnp.mean((net(p["net"], b["x"]) - net(p["net"], b["y"])) ** 2)


def preference(p: Any, b: Any) -> jax.Array:
    def margin(p: Any) -> jax.Array:
        return jnp.sum(net(p, b["x"]) - net(p, b["y"]), -1)

    frozen = jax.lax.stop_gradient(margin(p["other"]))
    return -jnp.mean(jax.nn.log_sigmoid(margin(p["net"]) - frozen))


def towers(p: Any, b: Any) -> jax.Array:
    one, other = net(p["net"], b["x"] @ p["a"]), net(p["net"], jnp.tanh(b["y"] @ p["b"]))
    return jnp.mean((one @ other.T) ** 2)


def joint_head(p: Any, b: Any) -> jax.Array:
    both = net(p["net"], b["x"]) * net(p["net"], b["y"])
    return jnp.mean(net(p["other"], both) ** 2)


def crops(p: Any, b: Any) -> jax.Array:
    shifts = (0.0, 0.5, 1.0)
    return jnp.mean(jnp.stack([net(p["net"], b["x"] + s) for s in shifts]) ** 2)


def regularized(p: Any, b: Any) -> jax.Array:
    """Two passes with their own dropout."""
    keys = jax.random.split(b["key"])
    one, other = dropped(p["net"], b["x"], keys[0]), dropped(p["net"], b["x"], keys[1])
    return jnp.mean((one - other) ** 2) + jnp.mean(one**2)


def lengths(p: Any, b: Any) -> jax.Array:
    return jnp.mean(net(p["net"], b["x"])) * jnp.mean(net(p["net"], b["long"]) ** 2)


def remat(p: Any, b: Any) -> jax.Array:
    kept = jax.checkpoint(block)
    return jnp.mean((net(p["net"], b["x"], kept) - net(p["net"], b["y"], kept)) ** 2)


def stacked(p: Any, b: Any) -> jax.Array:
    return jnp.mean((scanned(p["net"], b["x"]) - scanned(p["net"], b["y"])) ** 2)


def chunks(p: Any, b: Any) -> jax.Array:
    x = b["x"].reshape(2, -1, D)
    return jnp.mean(jax.lax.map(lambda c: jnp.mean(net(p["net"], c) ** 2), x))


def chunks_inside(p: Any, b: Any) -> jax.Array:
    @jax.jit
    @jax.checkpoint
    def mapped(x: jax.Array) -> jax.Array:
        return jax.lax.map(jax.jit(jax.checkpoint(lambda c: net(p["net"], c))), x)

    return jnp.mean(mapped(b["x"].reshape(2, -1, D)) ** 2)


def chunks_added(p: Any, b: Any) -> jax.Array:
    def add(total: Any, c: jax.Array) -> Any:
        h = net(p["net"], c)
        return (total[0] + jnp.sum(h**2), total[1] + 1, total[2]), h[0]

    (total, count, one), rows = jax.lax.scan(add, (0.0, 0, 2.0), b["x"].reshape(2, -1, D))
    return one * total / count + jnp.mean(rows)


def chunks_counted(p: Any, b: Any) -> jax.Array:
    x = b["x"].reshape(2, -1, D)
    add = lambda i, t: t + (i + 1) * jnp.mean(net(p["net"], x[i]) ** 2)  # noqa: E731
    return jax.lax.fori_loop(0, 2, add, jnp.float32(0))


def chunks_of_a_stack(p: Any, b: Any) -> jax.Array:
    return jnp.mean(jax.lax.map(lambda c: scanned(p["net"], c), b["x"].reshape(2, -1, D)) ** 2)


def chunks_with_keys(p: Any, b: Any) -> jax.Array:
    keys = jax.random.split(b["key"], 2)
    run = lambda c: dropped(p["net"], c[0], c[1])  # noqa: E731
    return jnp.mean(jax.lax.map(run, (b["x"].reshape(2, -1, D), keys)) ** 2)


def chunks_one_by_one(p: Any, b: Any) -> jax.Array:
    return sum(jnp.mean(net(p["net"], c) ** 2) for c in b["x"].reshape(2, -1, D))  # type: ignore[return-value]


def chunks_with_marks(p: Any, b: Any) -> jax.Array:
    def run(c: jax.Array) -> jax.Array:
        for w in p["net"]:
            c = boundary(c + jnp.tanh(c @ w["up"] @ w["down"]))
        return jnp.mean(c**2)

    return jnp.mean(jax.lax.map(run, b["x"].reshape(2, -1, D)))


ONCE = [
    siamese,
    preference,
    towers,
    joint_head,
    crops,
    regularized,
    lengths,
    remat,
    stacked,
    chunks,
    chunks_inside,
    chunks_added,
    chunks_counted,
    chunks_of_a_stack,
    chunks_with_keys,
    chunks_one_by_one,
    chunks_with_marks,
]


def layers_of(loss: Callable[..., Any], min_layers: int = 1) -> LayeredLoss:
    traced = trace_loss(lambda p, s, b: (loss(p, b), None, s), PARAMS, BATCH)
    return find_layers(traced, min_layers)


def assert_exact(loss: Callable[..., Any], layered: LayeredLoss) -> None:
    """Asserts that a stage per layer gives the loss and the gradients of the loss itself."""
    staged = cut_stages(layered, Partition((1,) * layered.graph.num_layers))
    stages = differentiate(staged.forwards)

    def both(params: Any, batch: Any) -> Any:
        leaves = jax.tree.leaves(params)
        units = [unit_value(u, [*leaves, *staged.constants]) for u in staged.units]
        value, grads = run_chain(stages, units, jax.tree.leaves(batch))
        found = list(map(jnp.zeros_like, leaves))
        for k, unit in enumerate(staged.units):
            whole = ... if unit.index is None else unit.index
            if unit.leaf < len(found):
                found[unit.leaf] = found[unit.leaf].at[whole].set(grads.get(k, 0.0))
        found = jax.tree.unflatten(jax.tree.structure(params), found)
        return (value, found), jax.value_and_grad(loss)(params, batch)

    run = jax.jit(both).lower(PARAMS, BATCH).compile(compiler_options=FAST)
    (value, grads), (wanted, wanted_grads) = run(PARAMS, BATCH)
    assert float(value) == pytest.approx(float(wanted), rel=1e-5)
    assert relative_error(grads, wanted_grads) < 1e-5


@pytest.mark.parametrize("loss", ONCE, ids=lambda f: f.__name__)
def test_each_layer_stands_once_and_gradients_are_exact(loss: Callable[..., Any]) -> None:
    layered = layers_of(loss)
    count = layered.graph.num_layers
    nets = 2 if loss in (preference, joint_head) else 1
    assert count >= nets * N
    staged = cut_stages(layered, Partition((1,) * count))
    for unit in range(len(staged.units)):
        holders = [
            s.index
            for s in staged.forwards
            if any(r.role is Role.PARAM and r.index == unit for r in s.forward.reads)
        ]
        assert len(holders) <= 1, (staged.units[unit].name, holders)
    assert_exact(loss, layered)


def tied_depth(p: Any, b: Any) -> jax.Array:
    return jnp.mean(net(p["net"], net(p["net"], b["x"])) ** 2)


def recurrent(p: Any, b: Any) -> jax.Array:
    h = b["x"]
    for _ in range(3):
        h = block(p["net"][0], h)
    return jnp.mean(h**2)


def queries(p: Any, b: Any) -> jax.Array:
    """One layer with weights inside the map: its chunks save memory."""
    h = net(p["net"], b["x"]).reshape(2, -1, D)
    return jnp.mean(jax.lax.map(lambda c: jnp.mean((c @ p["a"]) ** 2), h))


@pytest.mark.parametrize("loss", [tied_depth, recurrent, queries], ids=lambda f: f.__name__)
def test_what_cannot_or_need_not_be_laid_so_stays(loss: Callable[..., Any]) -> None:
    layered = layers_of(loss)
    at = [layered.normal.flat.eqns[k].primitive.name for k in layered.steps]
    plain = jax.make_jaxpr(loss)(PARAMS, BATCH)
    assert at.count("scan") == (loss is queries)
    assert layered.graph.num_layers >= (2 * N if loss is tied_depth else N)
    if loss is tied_depth:
        heavy = [e for e in plain.jaxpr.eqns if e.primitive.name == "dot_general"]
        assert at.count("dot_general") == len(heavy)
        modules = [layer.name.split("/")[0] for layer in layered.graph.layers]
        assert [m for m, before in zip(modules, ["", *modules]) if m != before] == [
            "net.0",
            "net.1",
            "net.0",
            "net.1",
        ]


def test_a_model_called_twice_has_the_layers_of_one_called_once() -> None:
    once = layers_of(lambda p, b: jnp.mean(net(p["net"], b["x"]) ** 2))
    for loss in (siamese, crops, lengths):
        twice = layers_of(loss).graph
        assert twice.num_layers == once.graph.num_layers
        assert sum(x.param_bytes for x in twice.layers) == sum(
            x.param_bytes for x in once.graph.layers
        )


@settings(
    deadline=None, max_examples=4, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(calls=st.lists(st.tuples(st.sampled_from("xy"), st.integers(1, 2)), min_size=1, max_size=3))
def test_any_calls_keep_their_gradients(calls: list[tuple[str, int]]) -> None:
    """Passes over either input, some of them over the output of the pass before."""

    def loss(p: Any, b: Any) -> jax.Array:
        h, total = b["x"], 0.0
        for name, times in calls:
            h = h if times == 2 else b[name]
            h = net(p["net"], h)
            total += jnp.mean(h**2 * b[name])
        return total  # type: ignore[return-value]

    assert_exact(loss, layers_of(loss, 3))
