"""What recording costs: recorded and unrecorded steps in turns, in two processes bound to a core.

python experiments/fidelity_recording.py

Eight dense layers of 512 x 512 under zb-h1, 8 microbatches of 256 rows. A step is timed from a
barrier until all that it returns is there; the exchange of what the processes recorded is part
of a recorded one.
"""

import argparse
import statistics
import time
from collections.abc import Sequence

from fidelity_common import in_processes

import octojax as octopipe


def options(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--turns", type=int, default=60)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--rows", type=int, default=256, help="of one microbatch")
    return parser.parse_args(arguments)


def run(arguments: Sequence[str]) -> None:
    octopipe.initialize()
    import jax
    import jax.numpy as jnp
    import optax

    from octojax.mesh import pipeline_mesh
    from octojax.processes import barrier

    wanted = options(arguments)
    keys = jax.random.split(jax.random.key(0), 8)
    params = [jax.random.normal(k, (wanted.width, wanted.width)) / wanted.width**0.5 for k in keys]

    def loss(params: list[jax.Array], batch: jax.Array) -> jax.Array:
        h = batch
        for w in params:
            h = jnp.tanh(h @ w)
        return jnp.mean(h**2)

    batch = jnp.ones((8 * wanted.rows, wanted.width))
    step = octopipe.compile(
        params,
        loss,
        optax.adamw(1e-3),
        batch,
        mesh=pipeline_mesh().mesh,
        microbatches=8,
        schedule="zb-h1",
        progress=False,
        timeout_s=120.0,
    )
    state = step.init()
    seconds: dict[bool, list[float]] = {False: [], True: []}
    for turn in range(wanted.turns + 2):
        for record in (False, True) if turn % 2 else (True, False):
            barrier("turn")
            begin = time.monotonic()
            state, metrics, *_ = step(state, batch, record=record)
            jax.block_until_ready((state, metrics))
            seconds[record].append(time.monotonic() - begin)
    plain, recorded = (sorted(seconds[record][2:]) for record in (False, True))
    ratios = sorted(r / p for p, r in zip(seconds[False][2:], seconds[True][2:], strict=True))
    if jax.process_index() == 0:
        print(
            f"{wanted.turns} turns: unrecorded {1e3 * statistics.median(plain):.4g} ms (quickest "
            f"{1e3 * plain[0]:.4g}), recorded {1e3 * statistics.median(recorded):.4g} (quickest "
            f"{1e3 * recorded[0]:.4g}); median ratio of a turn {statistics.median(ratios):.4f}"
        )
    barrier("done")


if __name__ == "__main__":
    in_processes(run, 2, pin=True, timeout_s=120.0)
