"""Losses of plain pytrees: skips, ties, dtypes, custom rules, keys, marks."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from octojax.layers import boundary
from tests.zoo.case import (
    Case,
    D,
    T,
    V,
    attention,
    causal,
    cross_entropy,
    mse,
    rms_norm,
    tokens,
    vectors,
    weights,
    with_key,
)  # fmt: skip


def toy(n: int = 4) -> Case:
    """toy-L(n): n dense layers with tanh, in nested jits."""
    params = [weights(i, w=(D, D), b=(1, D)) for i in range(n)]

    @jax.jit
    def dense(p: Any, h: jax.Array) -> jax.Array:
        return jnp.tanh(h @ p["w"] + p["b"])

    def loss(params: Any, batch: Any) -> jax.Array:
        h = batch["x"]
        for p in params:
            h = dense(p, h)
        return mse(h, batch["y"])

    return Case("toy", params, jax.jit(loss), vectors, layers=n)


def _block(seed: int) -> dict[str, Any]:
    return {
        "norm1": jnp.ones(D),
        "attn": weights(seed, q=(D, D), k=(D, D), v=(D, D), o=(D, D)),
        "norm2": jnp.ones(D),
        "mlp": weights(seed + 1, up=(D, 2 * D), down=(2 * D, D)),
    }


def apply_block(p: Any, x: jax.Array, mask: jax.Array) -> jax.Array:
    x = x + attention(rms_norm(x, p["norm1"]), p["attn"], mask)
    return x + jax.nn.gelu(rms_norm(x, p["norm2"]) @ p["mlp"]["up"]) @ p["mlp"]["down"]


def tied_lm(uses: int = 2) -> Case:
    """Embedding and head are one weight; with `uses=3` it is read in the middle as well."""
    params = {
        "embed": weights(1, w=(V, D))["w"],
        "blocks": [_block(10), _block(20)],
        "norm": jnp.ones(D),
    }

    def loss(params: Any, batch: Any) -> tuple[jax.Array, Any]:
        x = params["embed"][batch["inputs"]]
        mask = causal(batch["inputs"])
        first, second = params["blocks"]
        x = apply_block(first, x, mask)
        if uses == 3:
            x = x + jax.nn.softmax(x @ params["embed"].T) @ params["embed"]
        x = apply_block(second, x, mask)
        logits = rms_norm(x, params["norm"]) @ params["embed"].T
        return cross_entropy(logits, batch["targets"]), {"norm": jnp.mean(x * x)}

    return Case(f"tied-lm-{uses}", params, loss, tokens, layers=6 if uses == 2 else 8)


def two_ties() -> Case:
    """Two weights, each used in two places across the depth."""
    params = weights(5, a=(D, D), b=(D, D), c=(D, D))

    def loss(p: Any, batch: Any) -> jax.Array:
        h = batch["x"]
        for name in ("a", "b", "c", "a", "b"):
            h = jnp.tanh(h @ p[name])
        return mse(h, batch["y"])

    return Case("two-ties", params, loss, vectors, layers=5)


def moe() -> Case:
    """Experts weighted per token, with an auxiliary loss per sample added up over the depth."""
    params = {
        "embed": weights(1, w=(V, D))["w"],
        "blocks": [
            {
                "norm": jnp.ones(D),
                **weights(s, router=(D, 4), up=(4, D, D), down=(4, D, D)),
            }
            for s in (30, 40, 50)
        ],
        "head": weights(2, w=(D, V))["w"],
    }

    def layer(p: Any, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        h = rms_norm(x, p["norm"])
        gates = jax.nn.softmax(h @ p["router"])
        top = jax.lax.stop_gradient(jnp.max(gates, axis=-1, keepdims=True))
        chosen = jnp.where(gates >= top, gates, 0.0)
        balance = jnp.mean(jnp.mean(chosen > 0, axis=1) * jnp.mean(gates, axis=1))
        hidden = jax.nn.silu(jnp.einsum("btd,edf->btef", h, p["up"]))
        out = jnp.einsum("btef,efd,bte->btd", hidden, p["down"], chosen)
        return x + out, balance

    def loss(params: Any, batch: Any) -> tuple[jax.Array, Any]:
        x = params["embed"][batch["inputs"]]
        aux = jnp.float32(0)
        for p in params["blocks"]:
            x, balance = layer(p, x)
            aux = aux + balance
        main = cross_entropy(x @ params["head"], batch["targets"])
        return main + 0.1 * aux, {"main": main, "balance": aux}

    return Case("moe", params, loss, tokens, layers=5)


def masked() -> Case:
    """A loss over the tokens that count, divided by their number; token 0 is padding."""
    params = {
        "embed": weights(1, w=(V, D))["w"],
        "blocks": [_block(190), _block(200)],
        "head": weights(2, w=(D, V))["w"],
    }

    def padded(size: int) -> dict[str, jax.Array]:
        length = (jnp.arange(size)[:, None] * 5) % (T + 1)  # some rows are all padding
        return {k: jnp.where(jnp.arange(T)[None] < length, x, 0) for k, x in tokens(size).items()}

    def loss(params: Any, batch: Any) -> tuple[jax.Array, Any]:
        x = params["embed"][batch["inputs"]]
        for p in params["blocks"]:
            x = apply_block(p, x, causal(batch["inputs"]))
        logp = jax.nn.log_softmax(x @ params["head"])
        losses = -jnp.take_along_axis(logp, batch["targets"][..., None], axis=-1)[..., 0]
        counts = batch["targets"] != 0
        total = jnp.sum(jnp.where(counts, losses, 0.0))
        return total / jnp.maximum(counts.sum(), 1), {"tokens": counts.sum()}

    return Case("masked", params, loss, padded, layers=6)


def unet() -> Case:
    """Outputs of the first half are added, in reverse, to the inputs of the second."""
    params = [weights(60 + i, w=(D, D)) for i in range(8)]

    def loss(params: Any, batch: Any) -> jax.Array:
        h, skips = batch["x"], []
        for p in params[:4]:
            h = jnp.tanh(h @ p["w"])
            skips.append(h)
        for p in params[4:]:
            h = jnp.tanh(h @ p["w"]) + skips.pop()
        return mse(h, batch["y"])

    return Case("unet", params, loss, vectors, layers=8)


def dropout_key() -> Case:
    """Dropout from a typed key in the batch."""
    params = [weights(70 + i, w=(D, D)) for i in range(4)]

    def loss(params: Any, batch: Any) -> jax.Array:
        h = batch["x"]
        for i, p in enumerate(params):
            key = jax.random.fold_in(batch["key"], i)
            kept = jax.random.bernoulli(key, 0.75, h.shape)
            h = jnp.where(kept, jnp.tanh(h @ p["w"]) / 0.75, 0.0)
        return mse(h, batch["y"])

    return Case("dropout-key", params, loss, with_key(vectors), layers=4, per_sample=False)


def mixed_dtypes() -> Case:
    """A bfloat16 stream, a float32 residual and an integer route are alive at every border."""
    params = [
        {**weights(80 + i, w=(D, D)), "shift": jnp.int32(i)} for i in range(4)
    ]  # the integer leaf has no gradient

    def loss(params: Any, batch: Any) -> tuple[jax.Array, Any]:
        residual = batch["x"]
        h = (residual @ params[0]["w"]).astype(jnp.bfloat16)
        route = jnp.argmax(h, axis=-1) + params[0]["shift"]
        for p in params[1:]:
            route = (route + jnp.argmax(h, axis=-1) + p["shift"]) % D
            picked = jax.nn.one_hot(route, D, dtype=jnp.float32)
            h = jnp.tanh(h @ p["w"].astype(jnp.bfloat16))
            residual = residual + h.astype(jnp.float32) * picked
        return mse(residual + h.astype(jnp.float32), batch["y"]), {"route": route}

    return Case("mixed-dtypes", params, loss, vectors, layers=4)


@jax.custom_vjp
def scaled_backward(x: jax.Array) -> jax.Array:
    """The identity whose gradient is doubled."""
    return x


scaled_backward.defvjp(lambda x: (x, None), lambda _, g: (2 * g,))


@jax.custom_vjp
def dense_custom(x: jax.Array, w: jax.Array) -> jax.Array:
    """A product whose weight gradient is halved by a rule of its own."""
    return x @ w


dense_custom.defvjp(
    lambda x, w: (x @ w, (x, w)),
    lambda kept, g: (g @ kept[1].T, 0.5 * (kept[0].T @ g)),
)


def custom_rules() -> Case:
    """custom_vjp around a product and around nothing; custom_jvp inside jax.nn.silu."""
    params = [weights(90 + i, w=(D, D)) for i in range(4)]

    def loss(params: Any, batch: Any) -> jax.Array:
        h = batch["x"]
        for p in params:
            h = jax.nn.silu(dense_custom(scaled_backward(h), p["w"]))
        return mse(h, batch["y"])

    return Case("custom-rules", params, loss, vectors, layers=4)


@jax.custom_vjp
def observed(x: jax.Array, scale: jax.Array, amax: jax.Array) -> jax.Array:
    """`x` in steps of `scale`; the gradients of scale and amax are new values, not derivatives."""
    return jnp.round(x / scale) * scale


def _observed_gradients(kept: Any, g: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    largest, amax = kept
    history = jnp.roll(amax, -1).at[0].set(largest)
    return g, jnp.max(history) / 127, history


observed.defvjp(
    lambda x, scale, amax: (observed(x, scale, amax), (jnp.max(jnp.abs(x)), amax)),
    _observed_gradients,
)


def fp8_like() -> Case:
    """Quantized products whose scales and histories are parameters, in a stack."""
    params = {
        **weights(270, w=(4, D, D), amax=(4, 2, 3)),
        "scale": jnp.full((4, 2), 1 / 64),
    }

    def loss(params: Any, batch: Any) -> jax.Array:
        def layer(h: jax.Array, p: Any) -> tuple[jax.Array, None]:
            x = observed(h, p["scale"][0], p["amax"][0])
            w = observed(p["w"], p["scale"][1], p["amax"][1])
            return h + jnp.tanh(x @ w), None

        return mse(jax.lax.scan(layer, batch["x"], params)[0], batch["y"])

    return Case("fp8-like", params, loss, vectors, layers=4, per_sample=False, adds_up=True)


def cond() -> Case:
    """A branch per layer, chosen by the batch; weights are read in both branches."""
    params = [weights(100 + i, w=(D, D), u=(D, D)) for i in range(3)]

    def loss(params: Any, batch: Any) -> jax.Array:
        h = batch["x"]
        for i, p in enumerate(params):
            h = jax.lax.cond(
                batch["x"].shape[0] > i,
                lambda h, p=p: jnp.tanh(h @ p["w"]),
                lambda h, p=p: jnp.sin(h @ p["u"]) @ p["w"],
                h,
            )
            h = jax.lax.switch(i % 2 + jnp.int32(h[0, 0] > 1e9), [jnp.sin, jnp.tanh, jnp.cos], h)
        return mse(h, batch["y"])

    return Case("cond", params, loss, vectors, layers=3, mixes_rows=True)  # reads row 0


def checkpoint(whole: bool = False) -> Case:
    """`jax.checkpoint` around every block, or around the whole model as well."""
    params = {
        "embed": weights(1, w=(V, D))["w"],
        "blocks": [_block(110), _block(120), _block(130)],
        "head": weights(2, w=(D, V))["w"],
    }

    def model(params: Any, ids: jax.Array) -> jax.Array:
        x = params["embed"][ids]
        for p in params["blocks"]:
            x = jax.checkpoint(apply_block)(p, x, causal(ids))
        return x @ params["head"]

    def loss(params: Any, batch: Any) -> jax.Array:
        run = jax.checkpoint(model) if whole else model
        return cross_entropy(run(params, batch["inputs"]), batch["targets"])

    return Case("checkpoint-whole" if whole else "checkpoint", params, loss, tokens, layers=5)


def weight_twice() -> Case:
    """Each weight is used twice within its layer, the second time transposed.

    The first layer is no residual block (its input is the batch), so its halves come apart.
    """
    params = [weights(140 + i, w=(D, D)) for i in range(4)]

    def loss(params: Any, batch: Any) -> jax.Array:
        h = batch["x"]
        for p in params:
            h = boundary(h)
            h = h + jnp.tanh(h @ p["w"]) @ p["w"].T
        return mse(h, batch["y"])

    return Case("weight-twice", params, loss, vectors, layers=5)


def parameterless() -> Case:
    """A layer without parameters, alone between two marks."""
    params = [weights(150 + i, w=(D, D)) for i in range(3)]

    def loss(params: Any, batch: Any) -> jax.Array:
        h = jnp.tanh(batch["x"] @ params[0]["w"])
        h = boundary(jnp.sin(boundary(jnp.tanh(h @ params[1]["w"]))))
        return mse(jnp.tanh(h @ params[2]["w"]), batch["y"])

    return Case("parameterless", params, loss, vectors, layers=4)


def constants() -> Case:
    """A closed-over table, rotary angles and a mask from the batch, a metric from the middle."""
    params = {"embed": weights(1, w=(V, D))["w"], "blocks": [_block(160), _block(170)]}
    table = np.asarray(np.random.default_rng(0).normal(size=(T, D)), np.float32)

    def loss(params: Any, batch: Any) -> tuple[jax.Array, Any]:
        ids = batch["inputs"]
        angles = jnp.arange(T, dtype=jnp.float32)[:, None] * jnp.asarray(table)
        mask = causal(ids) & (ids != 0)[:, None, :]
        x = params["embed"][ids] + jnp.asarray(table)[None]
        x = apply_block(params["blocks"][0], x * jnp.cos(angles)[None], mask)
        metrics = {"middle": jnp.max(x), "padded": jnp.sum(ids == 0), "one": 1.0}
        x = apply_block(params["blocks"][1], x * jnp.sin(angles)[None], mask)
        regular = 0.01 * sum(jnp.sum(w * w) for w in jax.tree.leaves(params["embed"]))
        return cross_entropy(x @ params["embed"].T, batch["targets"]) + regular, metrics

    return Case("constants", params, loss, tokens, layers=6)


def carried_state() -> Case:
    """A functional loss with state: a count, a running mean, and a table that stays."""
    params = [weights(180 + i, w=(D, D)) for i in range(3)]
    state = {"count": jnp.int32(0), "mean": jnp.zeros((1, D)), "scale": jnp.full((1, D), 1.5)}

    def loss(params: Any, state: Any, batch: Any) -> tuple[jax.Array, Any, Any]:
        h = jnp.tanh(batch["x"] @ params[0]["w"]) * state["scale"]
        mean = 0.9 * state["mean"] + 0.1 * jnp.mean(h, axis=0, keepdims=True)
        h = jnp.tanh((h - jax.lax.stop_gradient(mean)) @ params[1]["w"])
        h = jnp.tanh(h @ params[2]["w"]) * (1 + 0.1 * state["count"].astype(jnp.float32))
        new_state = {"count": state["count"] + 1, "mean": mean, "scale": state["scale"]}
        return mse(h, batch["y"]), {"count": state["count"]}, new_state

    options = {"state": state}
    more = {"options": options, "per_sample": False, "mixes_rows": True}
    return Case("state", params, loss, vectors, 3, **more)


PLAIN_CASES: dict[str, Callable[[], Case]] = {
    "toy": toy,
    "tied-lm": tied_lm,
    "tied-lm-3": lambda: tied_lm(3),
    "two-ties": two_ties,
    "moe": moe,
    "masked": masked,
    "unet": unet,
    "dropout-key": dropout_key,
    "mixed-dtypes": mixed_dtypes,
    "custom-rules": custom_rules,
    "fp8-like": fp8_like,
    "cond": cond,
    "checkpoint": checkpoint,
    "checkpoint-whole": lambda: checkpoint(whole=True),
    "weight-twice": weight_twice,
    "parameterless": parameterless,
    "constants": constants,
    "state": carried_state,
}
