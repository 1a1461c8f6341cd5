"""Stacks of layers in one scan, by hand and by Flax, and scans over time that stay."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen, nnx

from tests.zoo.case import Case, D, V, cross_entropy, mse, tokens, vectors, weights


def scan_stack(reverse: bool = False) -> Case:
    """lax.scan over four stacked layers; each also returns its mean."""
    params = {**weights(200, w=(4, D, D), b=(4, 1, D)), "head": weights(201, w=(D, D))["w"]}

    def loss(params: Any, batch: Any) -> tuple[jax.Array, Any]:
        def layer(h: jax.Array, p: Any) -> tuple[jax.Array, jax.Array]:
            h = h + jnp.tanh(h @ p["w"] + p["b"])
            return h, jnp.mean(h)

        stack = {k: params[k] for k in ("w", "b")}
        h, means = jax.lax.scan(layer, batch["x"], stack, reverse=reverse)
        return mse(h @ params["head"], batch["y"]), {"means": means}

    return Case("scan-reverse" if reverse else "scan", params, loss, vectors, layers=5)


def scan_cast() -> Case:
    """The stack is cast before the scan, and the layers are checkpointed."""
    params = weights(210, w=(4, D, D))

    def loss(params: Any, batch: Any) -> jax.Array:
        stack = params["w"].astype(jnp.bfloat16) * 2

        @jax.checkpoint
        def layer(h: jax.Array, w: jax.Array) -> tuple[jax.Array, None]:
            return h + jnp.tanh(h.astype(jnp.bfloat16) @ w).astype(jnp.float32), None

        return mse(jax.lax.scan(layer, batch["x"], stack)[0], batch["y"])

    return Case("scan-cast", params, loss, vectors, layers=4)


def scan_unet() -> Case:
    """One scan stacks the skips that a second, reversed one reads."""
    params = weights(220, down=(3, D, D), up=(3, D, D))

    def loss(params: Any, batch: Any) -> jax.Array:
        def down(h: jax.Array, w: jax.Array) -> tuple[jax.Array, jax.Array]:
            h = jnp.tanh(h @ w)
            return h, h

        def up(h: jax.Array, xs: Any) -> tuple[jax.Array, None]:
            w, skip = xs
            return jnp.tanh(h @ w) + skip, None

        h, skips = jax.lax.scan(down, batch["x"], params["down"])
        h, _ = jax.lax.scan(up, h, (params["up"], skips), reverse=True)
        return mse(h, batch["y"])

    return Case("scan-unet", params, loss, vectors, layers=6)


def fori_stack() -> Case:
    """fori_loop over layers that index a stack, which the loop closes over."""
    params = weights(230, w=(4, D, D))

    def loss(params: Any, batch: Any) -> jax.Array:
        def layer(i: jax.Array, h: jax.Array) -> jax.Array:
            return jnp.tanh(h @ params["w"][i])

        return mse(jax.lax.fori_loop(0, 4, layer, batch["x"]), batch["y"])

    return Case("fori", params, loss, vectors, layers=4)


def hand_stack() -> Case:
    """A Python loop over slices of stacked weights, written w[i]."""
    params = weights(240, w=(4, D, D))

    def loss(params: Any, batch: Any) -> jax.Array:
        h = batch["x"]
        for i in range(4):
            h = jnp.tanh(h @ params["w"][i])
        return mse(h, batch["y"])

    return Case("hand-stack", params, loss, vectors, layers=4)


def scan_time() -> Case:
    """Recurrent layers over time, whose weights are read inside the scan: scans stay."""
    params = {
        "embed": weights(250, w=(V, D))["w"],
        "cells": [weights(251 + i, u=(D, D), w=(D, D)) for i in range(3)],
        "head": weights(259, w=(D, V))["w"],
    }

    def loss(params: Any, batch: Any) -> jax.Array:
        x = params["embed"][batch["inputs"]]
        for p in params["cells"]:

            def cell(h: jax.Array, x_BD: jax.Array, p: Any = p) -> tuple[jax.Array, jax.Array]:
                h = jnp.tanh(x_BD @ p["u"] + h @ p["w"])
                return h, h

            start = jnp.zeros_like(x[:, 0])
            x = x + jnp.moveaxis(jax.lax.scan(cell, start, jnp.moveaxis(x, 1, 0))[1], 0, 1)
        return cross_entropy(x @ params["head"], batch["targets"])

    return Case("scan-time", params, loss, tokens, layers=5)


class LinenLayer(linen.Module):
    @linen.compact
    def __call__(self, h: jax.Array, _: Any) -> tuple[jax.Array, None]:
        return h + jnp.tanh(linen.Dense(D, name="dense")(h)), None


class LinenStack(linen.Module):
    @linen.compact
    def __call__(self, h: jax.Array) -> jax.Array:
        stack = linen.scan(
            LinenLayer, variable_axes={"params": 0}, split_rngs={"params": True}, length=4
        )
        return linen.Dense(D, name="head")(stack(name="layers")(h, None)[0])


def linen_scan() -> Case:
    """flax.linen.scan over four layers."""
    model = LinenStack()
    variables = model.init(jax.random.key(0), jnp.ones((1, D)))

    def loss(variables: Any, batch: Any) -> jax.Array:
        return mse(model.apply(variables, batch["x"]), batch["y"])

    return Case("linen-scan", model, loss, vectors, layers=5, params=variables)


class NnxLayer(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.dense = nnx.Linear(D, D, rngs=rngs)

    def __call__(self, h: jax.Array) -> jax.Array:
        return h + jnp.tanh(self.dense(h))


class NnxStack(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        @nnx.split_rngs(splits=4)
        @nnx.vmap(in_axes=(0,), out_axes=0)
        def make(rngs: nnx.Rngs) -> NnxLayer:
            return NnxLayer(rngs)

        self.layers = make(rngs)
        self.head = nnx.Linear(D, D, rngs=rngs)

    def __call__(self, h: jax.Array) -> jax.Array:
        @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
        def run(h: jax.Array, layer: NnxLayer) -> jax.Array:
            return layer(h)

        return self.head(run(h, self.layers))


def nnx_scan() -> Case:
    """flax.nnx.scan over four layers made by nnx.vmap."""

    def loss(model: NnxStack, batch: Any) -> jax.Array:
        return mse(model(batch["x"]), batch["y"])

    return Case("nnx-scan", NnxStack(nnx.Rngs(0)), loss, vectors, layers=5)


class NnxDropLayer(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.dense = nnx.Linear(D, D, rngs=rngs)
        self.drop = nnx.Dropout(0.25, rngs=rngs)

    def __call__(self, h: jax.Array) -> jax.Array:
        return h + self.drop(jnp.tanh(self.dense(h)))


class NnxDropStack(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        @nnx.split_rngs(splits=4)
        @nnx.vmap(in_axes=(0,), out_axes=0)
        def make(rngs: nnx.Rngs) -> NnxDropLayer:
            return NnxDropLayer(rngs)

        self.layers = make(rngs)

    def __call__(self, h: jax.Array) -> jax.Array:
        @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
        @nnx.remat
        def run(h: jax.Array, layer: NnxDropLayer) -> jax.Array:
            return layer(h)

        return run(h, self.layers)


def nnx_scan_dropout() -> Case:
    """nnx.scan over checkpointed layers, each with a dropout stream that passes through both."""

    def loss(model: NnxDropStack, batch: Any) -> jax.Array:
        return mse(model(batch["x"]), batch["y"])

    model = NnxDropStack(nnx.Rngs(0, dropout=1))
    return Case("nnx-scan-dropout", model, loss, vectors, layers=4, per_sample=False)


class NnxNormLayer(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.dense = nnx.Linear(D, D, rngs=rngs)
        self.norm = nnx.BatchNorm(D, momentum=0.9, epsilon=0.1, rngs=rngs)  # of two rows, too

    def __call__(self, h: jax.Array) -> jax.Array:
        return h + jnp.tanh(self.norm(self.dense(h)))


class NnxNormStack(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        @nnx.split_rngs(splits=4)
        @nnx.vmap(in_axes=(0,), out_axes=0)
        def make(rngs: nnx.Rngs) -> NnxNormLayer:
            return NnxNormLayer(rngs)

        self.layers = make(rngs)

    def __call__(self, h: jax.Array) -> jax.Array:
        @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
        def run(h: jax.Array, layer: NnxNormLayer) -> jax.Array:
            return layer(h)

        return run(h, self.layers)


def nnx_scan_stats() -> Case:
    """nnx.scan over layers that each hold batch statistics."""

    def loss(model: NnxNormStack, batch: Any) -> jax.Array:
        return mse(model(batch["x"]), batch["y"])

    model = NnxNormStack(nnx.Rngs(0))
    options: Any = {"per_sample": False, "mixes_rows": True}
    return Case("nnx-scan-stats", model, loss, vectors, layers=4, **options)


class LinenNormLayer(linen.Module):
    @linen.compact
    def __call__(self, h: jax.Array, _: Any) -> tuple[jax.Array, None]:
        norm = linen.BatchNorm(False, momentum=0.9, epsilon=0.1, name="norm")
        return h + jnp.tanh(norm(linen.Dense(D, name="dense")(h))), None


class LinenNormStack(linen.Module):
    @linen.compact
    def __call__(self, h: jax.Array) -> jax.Array:
        stack = linen.scan(
            linen.remat(LinenNormLayer),
            variable_axes={"params": 0, "batch_stats": 0},
            split_rngs={"params": True},
            length=4,
        )
        return stack(name="layers")(h, None)[0]


def linen_scan_stats() -> Case:
    """flax.linen.scan over checkpointed layers with batch statistics, returned within aux."""
    model = LinenNormStack()
    variables = model.init(jax.random.key(0), jnp.ones((2, D)))

    def loss(variables: Any, batch: Any) -> Any:
        y, updates = model.apply(variables, batch["x"], mutable=["batch_stats"])
        return mse(y, batch["y"]), (updates, {"mean": jnp.mean(y)})

    options: Any = {"params": variables, "per_sample": False, "mixes_rows": True}
    return Case("linen-scan-stats", model, loss, vectors, layers=4, **options)


def scan_stats(how: str = "stack") -> Case:
    """A running mean and a count per layer in stacked state: by lax.scan, or set row by row."""
    params = weights(260, w=(4, D, D))
    state = {"mean": jnp.zeros((4, 1, D)), "count": jnp.zeros(4, jnp.int32)}

    def layer(h: jax.Array, w: jax.Array, mean: jax.Array) -> tuple[jax.Array, jax.Array]:
        h = h @ w
        mean = 0.9 * mean + 0.1 * jnp.mean(h, axis=0, keepdims=True)
        return jnp.tanh(h - jax.lax.stop_gradient(mean)) * (1 + mean), mean

    def scanned(params: Any, state: Any, batch: Any) -> tuple[Any, Any, Any]:
        def step(h: jax.Array, row: Any) -> tuple[jax.Array, Any]:
            h, mean = layer(h, row[0], row[1]["mean"])
            return h, {"mean": mean, "count": row[1]["count"] + 1}

        h, new = jax.lax.scan(step, batch["x"], (params["w"], state))
        return mse(h, batch["y"]), None, new

    def set_in_turn(params: Any, state: Any, batch: Any) -> tuple[Any, Any, Any]:
        h, mean = batch["x"], state["mean"]
        for i in range(4):
            h, row = layer(h, params["w"][i], mean[i])
            mean = mean.at[i].set(row)
        return mse(h, batch["y"]), None, {"mean": mean, "count": state["count"] + 1}

    def carried(params: Any, state: Any, batch: Any) -> tuple[Any, Any, Any]:
        def step(i: jax.Array, carry: Any) -> Any:
            h, mean = carry
            h, row = layer(h, params["w"][i], mean[i])
            return h, jax.lax.dynamic_update_index_in_dim(mean, row, i, 0)

        h, mean = jax.lax.fori_loop(0, 4, step, (batch["x"], state["mean"]))
        return mse(h, batch["y"]), None, {"mean": mean, "count": state["count"] + 1}

    loss = {"stack": scanned, "set": set_in_turn, "carry": carried}[how]
    options: Any = {"options": {"state": state}, "per_sample": False, "mixes_rows": True}
    return Case(f"scan-stats-{how}", params, loss, vectors, 4, **options)


SCAN_CASES: dict[str, Callable[[], Case]] = {
    "scan": scan_stack,
    "scan-reverse": lambda: scan_stack(reverse=True),
    "scan-cast": scan_cast,
    "scan-unet": scan_unet,
    "fori": fori_stack,
    "hand-stack": hand_stack,
    "scan-time": scan_time,
    "linen-scan": linen_scan,
    "nnx-scan": nnx_scan,
    "nnx-scan-dropout": nnx_scan_dropout,
    "nnx-scan-stats": nnx_scan_stats,
    "linen-scan-stats": linen_scan_stats,
    "scan-stats": scan_stats,
    "scan-stats-set": lambda: scan_stats("set"),
    "scan-stats-carry": lambda: scan_stats("carry"),
}
