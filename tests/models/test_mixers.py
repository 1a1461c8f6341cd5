"""Every mixer against its definition, written as plainly as it can be."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from octojax.models.attention import Mask, causal_attention
from octojax.models.delta import delta_rule
from octojax.models.dense import ACTIVATIONS, rms_norm
from octojax.models.mamba1 import selective_scan
from octojax.models.mamba2 import causal_conv, ssd
from octojax.models.moe import MoE, MoEConfig, route
from octojax.models.rotary import Rotary, Smoothing, rotate

F32 = jnp.dtype(jnp.float32)


def normal(seed: int, *shape: int) -> jax.Array:
    draws = np.random.default_rng(seed).standard_normal(shape)  # compiles nothing
    return jnp.asarray(draws.astype(np.float32))


def naive_attention(q, k, v, window):
    heads, length = q.shape[2], q.shape[1]
    k, v = (jnp.repeat(x, heads // k.shape[2], axis=2) for x in (k, v))
    scores = jnp.einsum("bthk,bshk->bhts", q, k) / np.sqrt(q.shape[-1])
    distance = np.arange(length)[:, None] - np.arange(length)[None]
    seen = (distance >= 0) & (distance < (window or length))
    scores = jnp.where(jnp.asarray(seen)[None, None], scores, -jnp.inf)
    return jnp.einsum("bhts,bshk->bthk", jax.nn.softmax(scores), v)


def assert_same_with_gradients(f, g, *inputs, tolerance=2e-5):
    """f and g agree, and so do their gradients for a random cotangent."""

    @jax.jit
    def both(*inputs):
        out_f, pull_f = jax.vjp(f, *inputs)
        out_g, pull_g = jax.vjp(g, *inputs)
        cotangent = normal(99, *out_f.shape)
        return out_f, out_g, pull_f(cotangent), pull_g(cotangent)

    out_f, out_g, gradients_f, gradients_g = both(*inputs)
    np.testing.assert_allclose(out_f, out_g, rtol=tolerance, atol=tolerance)
    for x, y in zip(gradients_f, gradients_g, strict=True):
        scale = max(float(np.max(np.abs(y))), 0.1)
        np.testing.assert_allclose(
            np.asarray(x) / scale, np.asarray(y) / scale, rtol=0, atol=tolerance
        )


@pytest.mark.parametrize(
    ("length", "groups", "per_group", "window", "block"),
    [
        (13, 2, 3, None, 64),
        (12, 1, 3, 4, 5),
        (5, 2, 2, 1, 3),
    ],
)
def test_attention_is_softmax_attention(length, groups, per_group, window, block):
    q = normal(0, 2, length, groups * per_group, 4)
    k, v = normal(1, 2, length, groups, 4), normal(2, 2, length, groups, 4)
    assert_same_with_gradients(
        lambda *x: causal_attention(*x, Mask(window, block)),
        lambda *x: naive_attention(*x, window),
        q,
        k,
        v,
    )


def test_attention_keeps_no_score_matrix():
    q, k = normal(0, 1, 64, 4, 8), normal(1, 1, 64, 2, 8)
    _, pull = jax.vjp(causal_attention, q, k, k)
    kept = sum(x.size for x in jax.tree.leaves(pull))
    assert kept <= 2 * q.size + 2 * k.size + 64 * 4 + 64  # q, out, k, v, log


@pytest.mark.parametrize(
    "rotary",
    [
        Rotary(100.0),
        Rotary(100.0, 4.0, Smoothing(1.0, 4.0, 16)),
        Rotary(100.0, part=0.5),
        Rotary(100.0, interleaved=True),
    ],
)
def test_rotation_depends_on_distance_alone(rotary):
    q, k = (jnp.broadcast_to(normal(i, 1, 1, 1, 8), (1, 10, 1, 8)) for i in range(2))
    scores = jnp.einsum("bthk,bshk->bts", rotate(q, rotary), rotate(k, rotary))[0]
    for t in range(1, 9):
        np.testing.assert_allclose(scores[t, t - 1], scores[9, 8], rtol=1e-4)
    assert abs(float(scores[9, 0] - scores[9, 8])) > 1e-3


def naive_ssd(x, dt, a, b, c):
    batch, time, heads, width = x.shape
    b, c = (jnp.repeat(v, heads // v.shape[2], axis=2) for v in (b, c))
    state = jnp.zeros((batch, heads, b.shape[-1], width))
    ys = []
    for t in range(time):
        decay = jnp.exp(dt[:, t] * a[None])
        gain = jnp.einsum("bhn,bhp->bhnp", b[:, t], x[:, t] * dt[:, t, :, None])
        state = state * decay[..., None, None] + gain
        ys.append(jnp.einsum("bhn,bhnp->bhp", c[:, t], state))
    return jnp.stack(ys, axis=1)


@pytest.mark.parametrize(
    ("length", "chunk", "groups", "per_group"),
    [(11, 4, 2, 2), (4, 1, 1, 2), (5, 16, 2, 1)],
)
def test_ssd_is_its_recurrence(length, chunk, groups, per_group):
    heads = groups * per_group
    x, dt = normal(0, 2, length, heads, 3), jax.nn.softplus(normal(1, 2, length, heads))
    b, c = normal(2, 2, length, groups, 5), normal(3, 2, length, groups, 5)
    a = -jnp.exp(normal(4, heads))
    assert_same_with_gradients(lambda *v: ssd(*v, chunk), naive_ssd, x, dt, a, b, c)


def test_ssd_survives_strong_decay():
    x, b = normal(0, 1, 64, 1, 2), normal(1, 1, 64, 1, 2)
    dt, a = jnp.full((1, 64, 1), 50.0), jnp.array([-16.0])
    gradient = jax.grad(lambda *v: jnp.sum(ssd(*v, 32) ** 2), argnums=(0, 1, 2, 3, 4))
    gradients = jax.jit(gradient)(x, dt, a, b, b)
    assert all(bool(jnp.all(jnp.isfinite(g))) for g in gradients)


def naive_selective_scan(x, dt, a, b, c):
    state, ys = jnp.zeros((x.shape[0], *a.shape)), []
    for t in range(x.shape[1]):
        gain = (dt[:, t] * x[:, t])[..., None] * b[:, t, None]
        state = state * jnp.exp(dt[:, t, :, None] * a[None]) + gain
        ys.append(jnp.einsum("ben,bn->be", state, c[:, t]))
    return jnp.stack(ys, axis=1)


@pytest.mark.parametrize(("length", "chunk"), [(11, 3), (5, 16)])
def test_selective_scan_is_its_recurrence(length, chunk):
    x, dt = normal(0, 2, length, 6), jax.nn.softplus(normal(1, 2, length, 6))
    b, c = normal(2, 2, length, 3), normal(3, 2, length, 3)
    a = -jnp.exp(normal(4, 6, 3))
    assert_same_with_gradients(
        lambda *v: selective_scan(*v, chunk), naive_selective_scan, x, dt, a, b, c
    )


def naive_delta_rule(q, k, v, decay, beta):
    state, outs = jnp.zeros((q.shape[0], q.shape[2], q.shape[3], v.shape[3])), []
    for t in range(q.shape[1]):
        state = state * jnp.exp(decay[:, t])[..., None, None]
        missing = v[:, t] - jnp.einsum("bhkv,bhk->bhv", state, k[:, t])
        state = state + jnp.einsum("bhk,bhv->bhkv", k[:, t], missing * beta[:, t, :, None])
        outs.append(jnp.einsum("bhkv,bhk->bhv", state, q[:, t]))
    return jnp.stack(outs, axis=1)


def test_the_delta_rule_is_its_recurrence():
    q, k, v = normal(0, 2, 8, 2, 3), normal(1, 2, 8, 2, 3) / 2, normal(2, 2, 8, 2, 4)
    decay, beta = -jax.nn.softplus(normal(3, 2, 8, 2)), jax.nn.sigmoid(normal(4, 2, 8, 2))
    assert_same_with_gradients(
        lambda *x: delta_rule(*x, 3), naive_delta_rule, q, k, v, decay, beta, tolerance=5e-5
    )


def test_convolution_sees_the_past_alone():
    x, weight, bias = normal(0, 2, 9, 3), normal(1, 4, 3), normal(2, 3)
    expected = np.zeros(x.shape)
    for t in range(9):
        for k in range(4):
            if t - 3 + k >= 0:
                expected[:, t] += np.asarray(x[:, t - 3 + k] * weight[k][None])
    expected += np.asarray(bias)
    np.testing.assert_allclose(causal_conv(x, weight, bias), expected, rtol=1e-5, atol=1e-6)


def test_norm_and_activations_differentiate_as_written():
    x, scale = normal(0, 2, 3, 8), normal(1, 8)

    def plain(x, scale):
        rms = jnp.sqrt(jnp.mean(x**2, axis=-1, keepdims=True) + 1e-5)
        return x / rms * jnp.broadcast_to(scale, x.shape)

    assert_same_with_gradients(lambda *v: rms_norm(*v, F32), plain, x, scale)
    assert_same_with_gradients(
        ACTIVATIONS["squared_relu"][1], lambda h: jnp.where(h > 0, h * h, 0.0), x
    )
    assert_same_with_gradients(
        ACTIVATIONS["swiglu"][1], lambda h: jax.nn.silu(h[..., :4]) * h[..., 4:], x
    )


def naive_experts(layer: MoE, x: np.ndarray, places: int) -> np.ndarray:
    """Token by token, in order of time, skipping experts that are full."""
    config = layer.config
    up, down, router = map(
        np.asarray, (layer.up_EDF[...], layer.down_EFD[...], layer.router.weight[...])
    )
    logits = x @ router
    exp = np.exp(logits)
    scores = exp / exp.sum(-1, keepdims=True) if config.router == "softmax" else exp / (1 + exp)

    def activation(h):
        if config.activation == "squared_relu":
            return np.maximum(h, 0) ** 2
        gate, value = np.split(h, 2, axis=-1)
        return gate / (1 + np.exp(-gate)) * value

    out = np.zeros_like(x)
    for i in range(x.shape[0]):
        used = np.zeros(config.experts, int)
        for t in range(x.shape[1]):
            best = np.argsort(-scores[i, t], kind="stable")[: config.chosen]
            weights = scores[i, t, best]
            if config.normalize:
                weights = weights / weights.sum()
            for expert, weight in zip(best, weights * config.weight_scale, strict=True):
                used[expert] += 1
                if used[expert] <= places:
                    out[i, t] += weight * (activation(x[i, t] @ up[expert]) @ down[expert])
    if layer.shared is not None:
        shared = layer.shared
        out += activation(x @ np.asarray(shared.up.weight[...])) @ np.asarray(
            shared.down.weight[...]
        )
    return out


@pytest.mark.parametrize(
    "config",
    [
        MoEConfig(experts=4, chosen=2, hidden=6),
        MoEConfig(experts=4, chosen=2, hidden=6, capacity_factor=0.6),
        MoEConfig(
            experts=5,
            chosen=3,
            hidden=4,
            shared_hidden=3,
            activation="squared_relu",
            router="sigmoid",
            normalize=True,
            weight_scale=2.5,
        ),
    ],
    ids=["dropless", "full experts drop", "sigmoid, shared"],
)
def test_experts_equal_a_loop_over_tokens(config):
    layer = MoE(8, config, std=0.5, out_std=0.5, dtype=F32, param_dtype=F32, rngs=nnx.Rngs(0))
    x = np.asarray(normal(1, 3, 7, 8))
    y, balance = nnx.jit(lambda layer, x: layer(x))(layer, jnp.asarray(x))
    np.testing.assert_allclose(y, naive_experts(layer, x, config.places(7)), rtol=1e-4, atol=1e-5)
    assert balance.shape == ()


def test_balance_is_one_when_even_and_more_when_not():
    config = MoEConfig(experts=4, chosen=1, hidden=4)
    even = jnp.tile(10.0 * jnp.eye(4), (2, 2, 1))  # each expert is chosen equally often
    np.testing.assert_allclose(route(even, config).balance, 1.0, rtol=1e-4)
    skewed = jnp.zeros((2, 8, 4)).at[..., 0].set(10.0)
    np.testing.assert_allclose(route(skewed, config).balance, 4.0, rtol=1e-3)


def test_experts_refuse_impossible_sizes():
    with pytest.raises(ValueError, match="cannot choose 5 of 4 experts"):
        MoEConfig(experts=4, chosen=5, hidden=8)
    with pytest.raises(ValueError, match="unknown router 'cosine'"):
        MoEConfig(experts=4, chosen=1, hidden=8, router="cosine")


def plain_choice(scores: np.ndarray, bias: np.ndarray, config: MoEConfig) -> np.ndarray:
    """The experts of one token, best first: of the best groups, by score and bias."""
    choice = scores + bias
    size = config.experts // config.groups
    by_group = np.sort(choice.reshape(config.groups, size), axis=1)[:, -2:].sum(1)
    best = np.argsort(-by_group, kind="stable")[: config.chosen_groups]
    closed = ~np.isin(np.arange(config.experts) // size, best)
    return np.argsort(-np.where(closed, -np.inf, choice), kind="stable")[: config.chosen]


def test_a_bias_and_groups_change_the_choice_and_not_the_weights():
    config = MoEConfig(
        experts=6, chosen=2, hidden=4, router="sigmoid", router_bias=True, groups=3, chosen_groups=2
    )
    logits, bias = normal(0, 2, 9, 6), 0.5 * normal(1, 6)
    routes = jax.jit(lambda logits, bias: route(logits, config, bias))(logits, bias)
    scores = 1 / (1 + np.exp(-np.asarray(logits)))
    changed = 0
    for i, t in np.ndindex(2, 9):
        expected = plain_choice(scores[i, t], np.asarray(bias), config)
        np.testing.assert_array_equal(routes.expert_BTK[i, t], expected)
        np.testing.assert_allclose(routes.weight_BTK[i, t], scores[i, t, expected], rtol=1e-5)
        changed += set(expected) != set(np.argsort(-scores[i, t])[:2])
    assert changed > 3


def dense_experts(params, routes, x, config):
    """Every expert on every token, then the weights of those chosen that had a place."""
    up, down = params
    hidden = ACTIVATIONS[config.activation][1](jnp.einsum("btd,edf->btef", x, up))
    every = jnp.einsum("btef,efd->bted", hidden, down)
    taken = routes.place_BTK < config.places(x.shape[1])
    hot = jax.nn.one_hot(routes.expert_BTK, config.experts)
    weight = jnp.einsum("btk,btke->bte", routes.weight_BTK * taken, hot)
    return jnp.einsum("bte,bted->btd", weight, every)


@pytest.mark.parametrize(
    ("method", "capacity"),
    [
        pytest.param("ragged", None, id="ragged-dropless"),
        pytest.param("places", 0.6, id="places-full experts drop"),
        pytest.param("places", None, id="places-dropless", marks=pytest.mark.slow),
        pytest.param("ragged", 0.6, id="ragged-full experts drop", marks=pytest.mark.slow),
    ],
)
def test_both_methods_are_the_dense_formulation_with_its_gradients(method, capacity):
    config = MoEConfig(experts=4, chosen=2, hidden=3, capacity_factor=capacity, method=method)
    layer = nnx.eval_shape(
        lambda: MoE(5, config, std=1, out_std=1, dtype=F32, param_dtype=F32, rngs=nnx.Rngs(0))
    )
    graph, state = nnx.split(layer)

    def ours(x, router, up, down):
        layer = nnx.merge(graph, state)
        layer.router.weight = nnx.Param(router)
        layer.up_EDF, layer.down_EFD = nnx.Param(up), nnx.Param(down)
        return layer(x)[0]

    def dense(x, router, up, down):
        routes = route(x @ router, config)
        return dense_experts((up, down), routes, x, config)

    shapes = (2, 7, 5), (5, 4), (4, 5, 6), (4, 3, 5)
    assert_same_with_gradients(ours, dense, *(normal(k, *s) for k, s in enumerate(shapes)))


def test_ragged_products_build_nothing_of_experts_times_places():
    """Of every value between the tokens and the sum, rows are the choices, not E times as many."""
    config = MoEConfig(experts=16, chosen=2, hidden=8, method="ragged")
    layer = nnx.eval_shape(
        lambda: MoE(8, config, std=1, out_std=1, dtype=F32, param_dtype=F32, rngs=nnx.Rngs(0))
    )
    graph, state = nnx.split(layer)
    x = jax.ShapeDtypeStruct((1, 64, 8), F32)
    jaxpr = jax.make_jaxpr(lambda s, x: nnx.merge(graph, s)(x))(state, x)
    (scan,) = [eqn for eqn in jaxpr.eqns if eqn.primitive.name == "scan"]
    inner = scan.params["jaxpr"].eqns
    largest = max(v.aval.size for eqn in (*inner, *jaxpr.eqns) for v in eqn.outvars)
    assert largest <= 2 * 64 * 16  # the choices' hidden vectors (gate and up), the routing's own


def test_impossible_groups_and_methods_are_refused():
    with pytest.raises(ValueError, match="unknown method 'loop'; choose places or ragged"):
        MoEConfig(experts=4, chosen=1, hidden=8, method="loop")
    with pytest.raises(ValueError, match="cannot choose 3 of 2 groups of 4 experts"):
        MoEConfig(experts=4, chosen=1, hidden=8, groups=2, chosen_groups=3)
    with pytest.raises(ValueError, match="leave 2 experts for 3 choices"):
        MoEConfig(experts=4, chosen=3, hidden=8, groups=2, chosen_groups=1)
    with pytest.raises(ValueError, match="give shared_hidden"):
        MoEConfig(experts=4, chosen=1, hidden=8, shared_gate=True)
