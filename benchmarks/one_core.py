"""A step cut into stages on one core, against the plain accumulating step on the same.

    python benchmarks/one_core.py                      three of them, in turns
    python benchmarks/one_core.py --rounds 9 --steps 3 --core 0
    python benchmarks/one_core.py --variants plain,whole-2,whole-8,split-2,split-8
    python benchmarks/one_core.py --forget             without kept memory

    plain      one jitted step, `lax.scan` over the microbatches
    kept       the same, its allocator told to keep memory as a pipelined step's is
    whole-8    one rank with eight stages, F and B of each in turn; any number of stages
    split-8    the same with B split: I of all stages, then W of all

Each is a process of its own, pinned to the core; its Eigen has one thread. In each round every
variant runs a few steps while the others wait, so that a busy machine slows all alike. Printed are
medians over all steps, the ratios to plain, processor time, page faults, and the most memory that a
process has had. All have huge pages, as processes of `octopipe launch` do, but with `--forget`. Two
cores: `two_cores.py`.
"""

import argparse
import os
import statistics
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "experiments"))

from turns import Program, answer

from octojax.launch_environment import with_huge_pages

MICROBATCHES = 8
VARIANTS = ("plain", "kept", "whole-8")


def child(arguments: argparse.Namespace) -> None:
    """Compiles one variant, then runs steps whenever a line says how many."""
    os.sched_setaffinity(0, {arguments.core})
    os.environ["XLA_FLAGS"] = "--xla_cpu_multi_thread_eigen=false"
    os.environ["JAX_PLATFORMS"] = "cpu"
    import jax
    import optax
    from hybrid import mid
    from pair import pipelined_step, plain_step

    import octojax as octopipe
    from octojax.executor.kept_memory import keep_memory

    model, loss, microbatch = mid(arguments.width, arguments.layers)
    batch = jax.tree.map(lambda x: jax.numpy.concatenate([x] * MICROBATCHES), microbatch)
    if arguments.child == "kept":
        keep_memory()
    if "-" in arguments.child:
        compiled = octopipe.compile(
            model,
            loss,
            optax.adamw(1e-3),
            batch,
            microbatches=MICROBATCHES,
            schedule=octopipe.Schedule.parse(row(arguments.child)),
            keep_memory=not arguments.forget,
            progress=False,
        )
        step = pipelined_step(compiled, batch)
    else:
        step = plain_step(model, loss, optax.adamw(1e-3), batch, MICROBATCHES)
    step()
    step()
    answer(step)


def row(variant: str) -> str:
    """Returns the actions of one rank that runs forward and backward of every stage in turn."""
    kind, count = variant.split("-")
    stages, backward = range(int(count)), {"whole": "B", "split": "IW"}[kind]
    return " ".join(
        f"{s}{action}{k}"
        for k in range(MICROBATCHES)
        for action in f"F{backward}"
        for s in (stages if action == "F" else reversed(stages))
    )


def figures(variant: Program) -> dict[str, float]:
    """Returns medians of all steps, and the most memory."""
    answers = variant.answers
    return {
        "ms": 1e3 * variant.step_s,
        "processor ms": 1e3 * statistics.median(a["processor"] for a in answers),
        "faults": statistics.median(a["faults"] for a in answers),
        "peak MiB": max(a["peak_mib"] for a in answers),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--core", type=int, default=min(os.sched_getaffinity(0)))
    parser.add_argument("--variants", default=",".join(VARIANTS))
    parser.add_argument("--forget", action="store_true", help="do not keep memory between steps")
    parser.add_argument("--width", type=int, default=192)
    parser.add_argument("--layers", type=int, default=14)
    parser.add_argument("--child")
    arguments = parser.parse_args()
    if arguments.child:
        child(arguments)
        return
    names, variants = arguments.variants.split(","), []
    environment = dict(os.environ) if arguments.forget else with_huge_pages(os.environ)
    try:
        for name in names:
            command = [sys.executable, __file__, "--child", name, *sys.argv[1:]]
            variants.append(Program(name, command, environment))
        for _ in range(arguments.rounds):
            for variant in variants:
                variant.run(arguments.steps)
    finally:
        for variant in variants:
            variant.end()
    base = variants[0].step_s
    print(f"load {os.getloadavg()[0]:.1f}; {arguments.rounds} rounds of {arguments.steps} steps")
    for variant in variants:
        cells = "".join(f"{value:12.0f} {name}" for name, value in figures(variant).items())
        print(f"{variant.name:8}{cells}   {variant.step_s / base:.3f} of {names[0]}")


if __name__ == "__main__":
    main()
