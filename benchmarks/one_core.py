"""A step cut into stages on one core, against the plain accumulating step on the same.

    python benchmarks/one_core.py                      all three, in turns
    python benchmarks/one_core.py --rounds 9 --steps 3 --core 0
    python benchmarks/one_core.py --forget             without kept memory

    plain    one jitted step, `lax.scan` over the microbatches
    kept     the same, its allocator told to keep memory as a pipelined step's is
    stages   one rank with eight stages, F and B of each in turn

Each is a process of its own, pinned to the core; its Eigen has one thread. In each round every
variant runs a few steps while the others wait, so that a busy machine slows all alike. Printed are
medians over all steps, the ratios to plain, processor time, page faults, and the most memory that a
process has had. Two cores: `two_cores.py`.
"""

import argparse
import json
import os
import resource
import socket
import statistics
import subprocess
import sys
import time
from typing import Any

MICROBATCHES, STAGES = 8, 8


def child(arguments: argparse.Namespace) -> None:
    """Compiles one variant, then runs steps whenever a line says how many."""
    os.sched_setaffinity(0, {arguments.core})
    os.environ["XLA_FLAGS"] = "--xla_cpu_multi_thread_eigen=false"
    os.environ["JAX_PLATFORMS"] = "cpu"
    import jax

    import octojax as octopipe
    from octojax.executor.kept_memory import keep_memory

    if arguments.child == "pair":
        octopipe.initialize(
            timeout=600,
            coordinator_address=f"localhost:{arguments.port}",
            num_processes=2,
            process_id=arguments.process,
        )
    if arguments.child == "kept":
        keep_memory()
    run = plain() if arguments.child in ("plain", "kept") else pipelined(arguments)
    run()
    run()
    print(json.dumps({"ready": True, "devices": jax.device_count()}), flush=True)
    for line in sys.stdin:
        before, seconds = resource.getrusage(resource.RUSAGE_SELF), []
        for _ in range(int(line)):
            start = time.perf_counter()
            run()
            seconds.append(time.perf_counter() - start)
        after = resource.getrusage(resource.RUSAGE_SELF)
        answer = {
            "seconds": seconds,
            "processor": (after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
            / len(seconds),
            "faults": (after.ru_minflt - before.ru_minflt) / len(seconds),
            "peak_mib": after.ru_maxrss / 1024,
        }
        print(json.dumps(answer), flush=True)
    sys.stdout.flush()
    os._exit(0)  # the peers of a pair end together: nothing is left to say


def parts() -> tuple[Any, Any, Any, Any]:
    """Returns the hybrid of width 192 and 14 layers, its loss, an optimizer and a batch."""
    import jax
    import jax.numpy as jnp
    import optax
    from flax import nnx

    from octojax.models import nemotron_h

    model = nemotron_h.NemotronH(nemotron_h.tiny(width=192, layers=14), rngs=nnx.Rngs(0))
    tokens = jax.random.randint(jax.random.key(1), (MICROBATCHES * 4, 65), 0, 256, jnp.int32)
    return model, nemotron_h.loss, optax.adamw(1e-3), {"tokens": tokens}


def plain() -> Any:
    import jax
    import jax.numpy as jnp
    import optax
    from flax import nnx

    model, loss_fn, optimizer, batch = parts()
    graphdef, params = nnx.split(model, nnx.Param)

    def loss(params: Any, batch: Any) -> jax.Array:
        return loss_fn(nnx.merge(graphdef, params), batch)

    def step(params: Any, opt_state: Any, batch: Any) -> Any:
        pieces = jax.tree.map(lambda x: x.reshape(MICROBATCHES, -1, *x.shape[1:]), batch)

        def add(total: Any, piece: Any) -> tuple[Any, None]:
            found = jax.value_and_grad(loss)(params, piece)
            return jax.tree.map(lambda a, b: a + b / MICROBATCHES, total, found), None

        zeros = (jnp.float32(0), jax.tree.map(jnp.zeros_like, params))
        (value, grads), _ = jax.lax.scan(add, zeros, pieces)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, value

    jitted = jax.jit(step, donate_argnums=(0, 1))
    held = [jax.tree.map(jnp.copy, params), optimizer.init(params)]

    def run() -> None:
        *held[:], value = jitted(*held, batch)
        jax.block_until_ready((held, value))

    return run


def pipelined(arguments: argparse.Namespace) -> Any:
    import jax

    import octojax as octopipe

    model, loss_fn, optimizer, batch = parts()
    options: dict[str, Any] = {"schedule": "auto", "tune_seconds": arguments.seconds}
    if arguments.child == "stages":
        row = [
            item
            for k in range(MICROBATCHES)
            for item in (
                *(f"{s}F{k}" for s in range(STAGES)),
                *(f"{s}B{k}" for s in reversed(range(STAGES))),
            )
        ]
        options = {"schedule": octopipe.Schedule.parse(" ".join(row))}
    step = octopipe.compile(
        model,
        loss_fn,
        optimizer,
        batch,
        microbatches=MICROBATCHES,
        keep_memory=not arguments.forget,
        progress=False,
        **options,
    )
    held = [step.init()]

    def run() -> None:
        held[0], metrics = step(held[0], batch)
        jax.block_until_ready((held[0], metrics))

    return run


class Variant:
    """One or two pinned processes that run steps when told."""

    def __init__(self, name: str, arguments: argparse.Namespace, cores: list[int]) -> None:
        self.name, self.answers = name, []
        with socket.socket() as probe:
            probe.bind(("localhost", 0))
            port = probe.getsockname()[1]
        self.processes = [
            subprocess.Popen(
                [
                    *(sys.executable, __file__, "--child", name, "--core", str(core)),
                    *("--process", str(k), "--port", str(port)),
                    *("--seconds", str(arguments.seconds)),
                    *(["--forget"] if arguments.forget else []),
                ],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            for k, core in enumerate(cores)
        ]
        self.heard()

    def heard(self) -> list[dict[str, Any]]:
        """Returns the next record of each process."""
        answers = []
        for process in self.processes:
            assert process.stdout is not None
            for line in process.stdout:
                if line.startswith("{"):
                    answers.append(json.loads(line))
                    break
            else:
                raise SystemExit(f"a process of {self.name} ended with {process.wait()}")
        return answers

    def run(self, steps: int) -> None:
        for process in self.processes:
            assert process.stdin is not None
            process.stdin.write(f"{steps}\n")
            process.stdin.flush()
        self.answers.append(self.heard())

    def figures(self) -> dict[str, float]:
        """Returns medians: of a pair, of its slower process in time, and of both together else."""
        seconds = [
            max(of_each)
            for answer in self.answers
            for of_each in zip(*(a["seconds"] for a in answer), strict=True)
        ]
        return {
            "ms": 1e3 * statistics.median(seconds),
            "processor ms": 1e3
            * statistics.median(sum(a["processor"] for a in answer) for answer in self.answers),
            "faults": statistics.median(
                sum(a["faults"] for a in answer) for answer in self.answers
            ),
            "peak MiB": max(a["peak_mib"] for answer in self.answers for a in answer),
        }

    def end(self) -> None:
        for process in self.processes:
            assert process.stdin is not None
            process.stdin.close()
        for process in self.processes:
            process.wait(60)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--cores", default="0,1")
    parser.add_argument("--seconds", type=float, default=20.0, help="that the tuner searches")
    parser.add_argument("--variants", default="plain,kept,stages,pair")
    parser.add_argument("--forget", action="store_true", help="do not keep memory between steps")
    parser.add_argument("--child")
    parser.add_argument("--core", type=int)
    parser.add_argument("--process", type=int)
    parser.add_argument("--port", type=int)
    arguments = parser.parse_args()
    if arguments.child:
        child(arguments)
        return
    cores = [int(core) for core in arguments.cores.split(",")]
    variants = [
        Variant(name, arguments, cores[:2] if name == "pair" else cores[:1])
        for name in arguments.variants.split(",")
    ]
    for _ in range(arguments.rounds):
        for variant in variants:
            variant.run(arguments.steps)
    base = variants[0].figures()["ms"]
    print(f"load {os.getloadavg()[0]:.1f}; {arguments.rounds} rounds of {arguments.steps} steps")
    for variant in variants:
        figures = variant.figures()
        cells = "".join(f"{value:12.0f} {name}" for name, value in figures.items())
        ratio = figures["ms"] / base
        print(f"{variant.name:8}{cells}   {ratio:.3f} of plain, {1 / ratio:.2f} times as fast")
        variant.end()


if __name__ == "__main__":
    main()
