"""python -m tests.api.sharded_models MODEL MESH SCHEDULE ZERO ...   (on eight devices)

Trains a model three steps on a mesh such as 2x2x2 (pipe x data x tensor), its parameters spread
over tensor, and compares gradients and parameters with those of the plain model.
"""

import sys
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from flax import nnx
from jax.sharding import AxisType

import octojax as octopipe
from octojax.models import jamba, llama, nemotron_h
from octojax.models.mamba2 import Mamba2Config
from octojax.models.sharding import partition_specs
from tests.pipelines import FAST

TOKENS = {"tokens": np.random.default_rng(0).integers(0, 32, (8, 9)).astype(np.int32)}
SIZES = {"heads": 4, "kv_heads": 2, "head_dim": 4, "hidden": 32, "std": 0.2}
MAMBA = Mamba2Config(heads=4, head_dim=4, groups=2, state=4, chunk=4)
RULES = (("embed", None), ("mlp", "tensor"), ("vocabulary", "tensor"))


class Block(nn.Module):
    @nn.compact
    def __call__(self, x):
        init, wrap = nn.initializers.lecun_normal(), nn.with_logical_partitioning
        h = nn.LayerNorm()(x)
        up = nn.Dense(32, use_bias=False, kernel_init=wrap(init, ("embed", "mlp")))
        down = nn.Dense(16, use_bias=False, kernel_init=wrap(init, ("mlp", "embed")))
        scores = jnp.einsum("btd,bsd->bts", h, h) / 4
        seen = jnp.tril(jnp.ones(scores.shape[1:], bool))[None]
        mixed = jnp.einsum("bts,bsd->btd", nn.softmax(jnp.where(seen, scores, -1e9)), h)
        return x + down(nn.gelu(up(mixed)))


class Linen(nn.Module):
    blocks: int = 8

    @nn.compact
    def __call__(self, tokens):
        init = nn.with_logical_partitioning(nn.initializers.normal(), ("vocabulary", "embed"))
        x = nn.Embed(32, 16, embedding_init=init)(tokens)
        for _ in range(self.blocks):
            x = Block()(x)
        return nn.Dense(32)(x)


def linen_loss(model, variables, batch):
    tokens = batch["tokens"]
    logits = model.apply(variables, tokens[:, :-1])
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()


def build(name):
    """Returns model, loss, options, and the plain parameters with their loss."""
    if name.startswith("linen"):
        model = Linen(2 if name == "linen-small" else 8)
        variables = model.init(jax.random.key(0), TOKENS["tokens"])

        def loss(variables, batch):
            return linen_loss(model, variables, batch)

        return model, loss, {"params": variables}, nn.unbox(variables), loss
    if name == "nemotron":
        sizes = replace(nemotron_h.tiny(16, 4, 32), pattern="M-*-", mamba=MAMBA, **SIZES)
        model, loss = nemotron_h.NemotronH(sizes, rngs=nnx.Rngs(0)), nemotron_h.loss
        specs = partition_specs()
    elif name == "jamba":
        more = {"attention_every": 2, "attention_at": 1, "mamba": MAMBA}
        sizes = replace(jamba.tiny(16, 2, 32), **more, **SIZES)
        model, loss = jamba.Jamba(sizes, rngs=nnx.Rngs(0)), jamba.loss
        specs = partition_specs(tensor=None, expert="tensor")
    else:
        sizes = replace(llama.tiny(16, 3, 32), tied=True, **SIZES)
        model, loss = llama.Llama(sizes, rngs=nnx.Rngs(0)), llama.loss
        specs = partition_specs()
    graph, params, rest = nnx.split(model, nnx.Param, ...)

    def plain(params, batch):
        return loss(nnx.merge(graph, params, rest), batch)

    return model, loss, {"param_specs": specs}, params, plain


def assert_close(found, expected):
    """Every leaf to a relative 1e-5, in norm."""
    pairs = zip(jax.tree.leaves(found), jax.tree_util.tree_leaves_with_path(expected), strict=True)
    for a, (path, b) in pairs:
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        error = np.linalg.norm(a - b) / (np.linalg.norm(b) + 1e-12)
        assert error < 1e-5, f"{jax.tree_util.keystr(path)} differs by {error:.2e}"


def assert_exact(name, shape, schedule, zero=0):
    """Three steps of AdamW against the plain model; returns the step's report."""
    axes = ("pipe", "data", "tensor")
    devices = jax.devices()[: int(np.prod(shape))]
    mesh = jax.make_mesh(shape, axes, devices=devices, axis_types=(AxisType.Auto,) * 3)
    model, loss, options, params, plain = build(name)
    options |= {"schedule": "auto" if schedule == "tuned" else schedule, "tune_seconds": 2.0}
    options |= {"chunks": 2} if schedule == "interleaved" else {}
    options |= {"microbatches": 4, "progress": False, "compiler_options": FAST, "zero": zero}
    optimizer = optax.adamw(1e-2)
    with nn.logical_axis_rules(RULES), jax.set_mesh(mesh):
        step = octopipe.compile(model, loss, optimizer, TOKENS, mesh=mesh, **options)
    gradient = jax.jit(jax.value_and_grad(plain))
    with step:
        state, slots = step.init(), optimizer.init(params)
        for _ in range(3):
            value, grads = gradient(params, TOKENS)
            assert_close(step.value_and_grad(state, TOKENS)[2], grads)
            state, metrics = step(state, TOKENS)
            np.testing.assert_allclose(metrics["loss"], value, rtol=1e-5)
            updates, slots = optimizer.update(grads, slots, params)
            params = optax.apply_updates(params, updates)
            assert_close(step.params(state), params)
        spread = sum(any(spec) for spec in step.loss.unit_specs)
        assert spread >= 2 or shape[2] == 1
        return step.report


if __name__ == "__main__":
    which, *cases = sys.argv[1:]
    assert jax.device_count() == 8
    for mesh, table, level in zip(*(cases[k::3] for k in range(3)), strict=True):
        assert_exact(which, tuple(map(int, mesh.split("x"))), table, int(level))
        print(which, mesh, table, level, "exact", flush=True)
