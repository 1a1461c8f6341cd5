# ruff: noqa: E402  (processes join before JAX touches a device)
"""Ranks of several processes: what `test_wide_ranks.py` runs."""

import os
import sys

from scripts import model, worst  # joins

print(f"pid {os.getpid()}", flush=True)

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import octojax as octopipe
from octojax.processes import everyone

LAYERS = 8
CLIPPED = optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(1e-2))


def mesh_of(shape: str) -> Mesh:
    """Such as 2x2x1: pipe x data x tensor, over the devices of one process after another."""
    devices = sorted(jax.devices(), key=lambda d: (d.process_index, d.id))
    sizes = tuple(map(int, shape.split("x")))
    return Mesh(np.array(devices[: int(np.prod(sizes))]).reshape(sizes), ("pipe", "data", "tensor"))


def specs(path: str, shape: tuple[int, ...]) -> P:
    """Every second matrix by columns, the others by rows."""
    return P(None, "tensor") if int(path.strip("['w]")) % 2 == 0 else P("tensor", None)


def compiled(shape: str, schedule: str = "1f1b", zero: int = 0, **options):
    params, loss, batch = model(LAYERS, options.pop("tied", False))
    mesh = mesh_of(shape)
    table = "auto" if schedule == "tuned" else schedule
    step = octopipe.compile(
        params,
        loss,
        CLIPPED,
        batch,
        mesh=mesh,
        param_specs=specs if mesh.shape["tensor"] > 1 else None,
        schedule=table,
        chunks=2 if schedule == "interleaved" else None,
        tune_seconds=1.0,
        microbatches=3 if schedule != "interleaved" else 2,
        zero=zero,
        progress=False,
        **options,
    )
    return step, params, loss, batch


def trains(shape: str, *cases: str) -> None:
    """Gradients, and three steps of an optimizer that clips, are those of the plain model; what a
    step returns is the same in every process."""
    for case in cases:
        schedule, zero, *transport = case.split(":")
        step, params, loss, batch = compiled(
            shape, schedule, int(zero), transport=transport[0] if transport else "auto"
        )
        state, opt_state = step.init(), CLIPPED.init(params)
        for _ in range(3):
            value, aux, found = step.value_and_grad(state, batch)
            (wanted, more), grads = jax.value_and_grad(loss, has_aux=True)(params, batch)
            assert worst(found, grads) <= 1e-5, worst(found, grads)
            evaluated = step.evaluate(state, batch)
            state, metrics = step(state, batch)
            for a in (value, evaluated["loss"], metrics["loss"]):
                np.testing.assert_allclose(a, wanted, rtol=1e-5)
            for a in (aux, evaluated["aux"], metrics["aux"]):
                np.testing.assert_allclose(a["largest"], more["largest"], rtol=1e-5)
            norm = optax.global_norm(grads)
            np.testing.assert_allclose(metrics["grad_norm"], norm, rtol=1e-5)
            updates, opt_state = CLIPPED.update(grads, opt_state, params)
            params = optax.apply_updates(params, updates)
            assert worst(step.params(state), params) <= 1e-5
            assert worst(step.opt_state(state), opt_state) <= 1e-5
            everything = jax.tree.map(np.asarray, (metrics, step.params(state)))
            assert len(set(everyone(str(jax.tree.map(lambda x: x.tobytes().hex(), everything))))) == 1
        step.close()
        print(case, "exact", flush=True)
    print("all equal")


if __name__ == "__main__":
    globals()[sys.argv[1]](*sys.argv[2:])
