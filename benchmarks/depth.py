"""Processor seconds from a deep model to its first step, against the plain accumulating step.

    python benchmarks/depth.py --layers 200 400
    python benchmarks/depth.py --layers 50 --kind block

    chain    `tanh(h @ w)`: a layer is two operations
    block    a normalized MLP with a residual: a layer is some fifteen
    stack    the same blocks as one `lax.scan` over stacked weights, which the plain step keeps

Each measurement is a process of its own: tracing, compiling and running the first step of AdamW on
four ranks with 1F1B and four microbatches, or of the plain step (one `lax.scan` over microbatches).
"""

import argparse
import os
import subprocess
import sys
import time
from typing import Any

RANKS, MICROBATCHES, WIDTH = 4, 4, 64


def parts(kind: str, layers: int) -> tuple[Any, Any, Any]:
    """Returns parameters, loss and batch."""
    import jax
    import jax.numpy as jnp

    def leaf(number: int, *shape: int) -> jax.Array:
        return jax.random.normal(jax.random.key(number), shape) / shape[-2] ** 0.5

    def block(p: Any, h: jax.Array) -> jax.Array:
        centred = h - h.mean(-1, keepdims=True)
        scale = jax.lax.rsqrt((centred**2).mean(-1, keepdims=True) + 1e-5)
        return h + jax.nn.gelu((centred * scale) @ p["up"]) @ p["down"]

    if kind == "chain":
        params: Any = [leaf(i, WIDTH, WIDTH) for i in range(layers)]
    elif kind == "block":
        params = [
            {"up": leaf(i, WIDTH, 2 * WIDTH), "down": leaf(i, 2 * WIDTH, WIDTH)}
            for i in range(layers)
        ]
    else:
        params = {
            "up": leaf(0, layers, WIDTH, 2 * WIDTH),
            "down": leaf(1, layers, 2 * WIDTH, WIDTH),
        }

    def loss(params: Any, batch: jax.Array) -> jax.Array:
        h = batch
        if kind == "stack":
            h, _ = jax.lax.scan(lambda h, p: (block(p, h), None), h, params)
        else:
            for p in params:
                h = block(p, h) if kind == "block" else jnp.tanh(h @ p)
        return jnp.mean((h - 1) ** 2)

    return params, loss, jnp.ones((16 * MICROBATCHES, WIDTH))


def child(kind: str, layers: int, variant: str) -> None:
    os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={RANKS}"
    os.environ["JAX_PLATFORMS"] = "cpu"
    import jax
    import jax.numpy as jnp
    import optax

    import octojax as octopipe

    params, loss, batch = parts(kind, layers)
    optimizer = optax.adamw(1e-3)
    begin = time.process_time()
    if variant == "octojax":
        step = octopipe.compile(
            params, loss, optimizer, batch, microbatches=MICROBATCHES, progress=False
        )
        jax.block_until_ready(step(step.init(), batch))
    else:

        def plain(params: Any, state: Any, batch: Any) -> Any:
            def add(total: Any, piece: Any) -> tuple[Any, None]:
                return jax.tree.map(jnp.add, total, jax.value_and_grad(loss)(params, piece)), None

            zeros = (jnp.float32(0), jax.tree.map(jnp.zeros_like, params))
            pieces = batch.reshape(MICROBATCHES, -1, WIDTH)
            (value, grads), _ = jax.lax.scan(add, zeros, pieces)
            updates, state = optimizer.update(grads, state, params)
            return optax.apply_updates(params, updates), state, value

        jax.block_until_ready(jax.jit(plain)(params, optimizer.init(params), batch))
    print(time.process_time() - begin)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--layers", type=int, nargs="+", default=[200])
    parser.add_argument("--kind", choices=["chain", "block", "stack"], default="chain")
    parser.add_argument("--variant", choices=["plain", "octojax"])
    arguments = parser.parse_args()
    if arguments.variant:
        child(arguments.kind, arguments.layers[0], arguments.variant)
        return
    for layers in arguments.layers:
        seconds = {}
        for variant in ("plain", "octojax"):
            command = [sys.executable, __file__, "--kind", arguments.kind, "--layers", str(layers)]
            run = subprocess.run(
                [*command, "--variant", variant],
                check=True,
                stdout=subprocess.PIPE,
                text=True,
                timeout=600,
            )
            seconds[variant] = float(run.stdout.split()[-1])
        ratio = seconds["octojax"] / seconds["plain"]
        print(
            f"{layers} layers ({arguments.kind}): plain {seconds['plain']:.1f} s, octojax "
            f"{seconds['octojax']:.1f} s of processor time, {ratio:.1f} times"
        )


if __name__ == "__main__":
    main()
