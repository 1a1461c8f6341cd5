"""One library's step of the model of `peers.py`: loss and gradients, run when the parent says so.

Runs in the library's own environment, next to `turns.py` and `peers_model.py` on its path.
"""

import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from peers_model import (
    MICROBATCHES,
    apply,
    batch,
    cross_entropy,
    loss,
    parameters,
    stages,
)
from turns import answer

Step = Callable[[], Any]


def pieces(size: str) -> tuple[jax.Array, jax.Array]:
    """Returns tokens and targets with a leading axis of microbatches."""
    return tuple(jnp.asarray(x.reshape(MICROBATCHES, -1, x.shape[1])) for x in batch(size))


def plain(size: str, ranks: int, schedule: str) -> Step:
    layers, xs = parameters(size), pieces(size)

    @jax.jit
    def step(layers: Any, xs: Any) -> Any:
        def add(total: Any, piece: Any) -> Any:
            outcome = jax.value_and_grad(loss)(layers, *piece)
            return jax.tree.map(lambda a, b: a + b / MICROBATCHES, total, outcome), None

        return jax.lax.scan(add, (jnp.float32(0), jax.tree.map(jnp.zeros_like, layers)), xs)[0]

    return partial(step, jax.tree.map(jnp.asarray, layers), xs)


def octojax(size: str, ranks: int, schedule: str) -> Step:
    import optax

    import octojax as octopipe

    pair = batch(size)
    step = octopipe.compile(
        parameters(size),
        lambda layers, pair: loss(layers, *pair),
        optax.sgd(0.0),
        pair,
        mesh=jax.sharding.Mesh(np.array(jax.devices()[:ranks]), ("pipe",)),
        microbatches=MICROBATCHES,
        schedule=schedule,
        progress=False,
    )
    states = [step.init()]
    value, _, grads = step.value_and_grad(states[0], pair)

    def run() -> Any:
        states[0], metrics = step(states[0], pair)
        return states[0], metrics

    run.outcome = value, grads  # type: ignore[attr-defined]
    return run


def spectrax(size: str, ranks: int, schedule: str) -> Step:
    from peers_spectrax import Stage
    from spectrax.nn import PipelineSequential
    from spectrax.runtime.mpmd import sxcall
    from spectrax.runtime.schedules import GPipe, Std1F1B, ZeroBubbleH1
    from spectrax.runtime.types import MpMdMesh

    kinds = {"gpipe": GPipe, "1f1b": Std1F1B, "zb-h1": ZeroBubbleH1}
    devices = np.array(jax.devices()[:ranks])
    mesh = MpMdMesh(jax.sharding.Mesh(devices, ("pp",)), "pp")
    parts = []
    for rank, part in enumerate(stages(parameters(size), ranks)):
        parts.append(Stage(jax.device_put(part, devices[rank])))
    model = PipelineSequential(*parts)
    rule = kinds[schedule](microbatches=MICROBATCHES)
    xs = batch(size)  # arrays on a device would belong to that stage
    return lambda: sxcall(model, xs, mesh=mesh, schedule=rule, loss_fn=cross_entropy)[:2]


def jaxpp(size: str, ranks: int, schedule: str) -> Step:
    import jaxpp.api as peer
    from jaxpp.schedules import GPipe, ZeroBubble

    kinds = {"gpipe": GPipe, "1f1b": peer.Std1F1B, "zb-h1": ZeroBubble}
    devices = np.array(jax.devices()[:ranks]).reshape(ranks, 1)
    mesh = peer.MpmdMesh(jax.sharding.Mesh(devices, ("stages", "data")), "stages")

    def marked(layers: Any, piece: Any) -> jax.Array:
        x, targets = piece
        parts = stages(layers, ranks)
        for part in parts:
            for block in part:
                x = apply(block, x)
            if part is not parts[-1]:
                x = peer.mark_stage_end(x)
        return peer.mark_stage_end(cross_entropy(x, targets) / MICROBATCHES)

    @partial(peer.mpmd_jit_with_loop, mpmd_mesh=mesh)
    def step(layers: Any, xs: Any) -> Any:
        return peer.treduce(
            partial(jax.value_and_grad(marked), layers), xs, schedule=kinds[schedule](ranks)
        )

    return partial(step, jax.tree.map(jnp.asarray, parameters(size)), pieces(size))


def main() -> None:
    library, size, ranks, schedule = sys.argv[1:5]
    start = time.perf_counter()
    step = globals()[library](size, int(ranks), schedule)
    outcome = step()
    jax.block_until_ready(outcome)
    first_s = time.perf_counter() - start
    answer(
        lambda: jax.block_until_ready(step()),
        first_s=first_s,
        jax=jax.__version__,
        check=outcome_of(getattr(step, "outcome", outcome)),
    )


def outcome_of(outcome: Any) -> list[float]:
    """Returns the loss and the sum of the gradients' squares, to see that all do the same."""
    value, grads = outcome
    leaves = [np.asarray(_local(x), np.float64) for x in jax.tree.leaves(grads)]
    return [float(np.sum(np.asarray(_local(value)))), float(sum(np.sum(x * x) for x in leaves))]


def _local(x: Any) -> Any:
    """JaxPP's arrays know where they are; all of these are in this process."""
    return getattr(x, "to_mpmd_local_array", x)


if __name__ == "__main__":
    main()
