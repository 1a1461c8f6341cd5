"""What layers are called: experts are no layers, and blocks of flat names are blocks."""

import re
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from octojax.layers.find import find_layers
from octojax.trace import trace_loss

D, EXPERTS, DEPTH = 4, 3, 3


def _names(loss: Any, params: Any, batch: Any) -> list[str]:
    graph = find_layers(trace_loss(lambda p, _, b: (loss(p, b), None, None), params, batch)).graph
    return [layer.name for layer in graph.layers]


@pytest.mark.parametrize("scanned", [False, True])
def test_stacked_experts_are_no_layers(scanned):
    """Even where there are as many experts as layers."""
    block = {
        "router": jnp.ones((D, EXPERTS)),
        "experts": {"up": jnp.ones((EXPERTS, D, 2 * D)), "down": jnp.ones((EXPERTS, 2 * D, D))},
    }
    layers: Any = [block] * DEPTH
    if scanned:
        layers = jax.tree.map(lambda *x: jnp.stack(x), *layers)

    def apply(p: Any, x: jax.Array) -> jax.Array:
        gates = jax.nn.softmax(x @ p["router"])
        hidden = jax.nn.silu(jnp.einsum("bd,edf->bef", x, p["experts"]["up"]))
        return x + jnp.einsum("bef,efd,be->bd", hidden, p["experts"]["down"], gates)

    def loss(p: Any, x: jax.Array) -> jax.Array:
        if scanned:
            x = jax.lax.scan(lambda x, layer: (apply(layer, x), None), x, p["layers"])[0]
        else:
            for layer in p["layers"]:
                x = apply(layer, x)
        return jnp.mean(x @ p["head"])

    params = {"layers": layers, "head": jnp.ones((D, D))}
    names = _names(loss, params, jnp.ones((4, D)))
    blocks = list(dict.fromkeys(".".join(name.split(".")[:2]) for name in names))
    assert blocks == [*(f"layers.{i}" for i in range(DEPTH)), "head"]
    assert not [name for name in names if re.search(r"experts.*\d", name)]


def test_layers_of_a_diffusion_model_are_called_after_their_modules():
    """A small network on the timestep feeds all blocks; modules have flat names."""
    parts = ("time_embed_0", "time_embed_1", "proj_in", "proj_out")
    inner = [f"block_{i}_{name}" for i in range(DEPTH) for name in ("scale", "up", "down")]
    params = {name: jnp.ones((D, D)) for name in (*parts, *inner)}

    def loss(p: Any, batch: Any) -> jax.Array:
        features = jnp.sin(batch["t"][:, None] * jnp.arange(1.0, 1 + D)[None])
        c = jax.nn.silu(features @ p["time_embed_0"]) @ p["time_embed_1"]
        h = batch["x"] @ p["proj_in"]
        for i in range(DEPTH):
            inside = h * (1 + jax.nn.silu(c) @ p[f"block_{i}_scale"])
            h = h + jax.nn.gelu(inside @ p[f"block_{i}_up"]) @ p[f"block_{i}_down"]
        return jnp.mean((h @ p["proj_out"]) ** 2)

    names = _names(loss, params, {"x": jnp.ones((4, D)), "t": jnp.ones(4)})
    assert names[:4] == ["time_embed_0", "time_embed_1", "proj_in", "block_0"]
    assert names[-1] == "proj_out"
    assert not [name for name in names if "+" in name]
