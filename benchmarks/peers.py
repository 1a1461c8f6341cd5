"""A step of the same model by OctoPipe and by other JAX libraries for pipelines, in one run.

    python benchmarks/peers.py                                    SpectraX 0.1.4, from the index
    python benchmarks/peers.py --jaxpp git+https://github.com/NVIDIA/jaxpp
    python benchmarks/peers.py --sizes tiny --ranks 2 --schedules gpipe,1f1b,zb-h1

Each peer is installed into an environment of its own (`--environments`, kept for the next run),
with the newest JAX that it works on. `ranks` CPU devices of one process; loss and gradients of 8
microbatches (ours with an SGD update too). All programs stay, and take turns. The plain step, an
accumulating `lax.scan` on one device, runs in every environment: a library is measured against that
of its own JAX. In one process on shared cores this shows overhead and extra work, and no bubbles.
Loss and gradients of all are compared first.
"""

import argparse
import os
import subprocess
import sys
from pathlib import Path

from turns import Program

HERE = Path(__file__).resolve().parent
REQUIREMENTS = {
    "spectrax": ["spectrax-lib==0.1.4", "jax==0.10.0", "jaxlib==0.10.0"],
    "jaxpp": ["jax==0.9.2", "jaxlib==0.9.2", "portpicker==1.6.0"],
}
"""What a peer needs on a CPU. JaxPP asks for CUDA as well, so its own list is not taken."""


def environment(peer: str, folder: Path, source: str | None) -> str:
    """Returns the Python of the peer's environment, which is made if it is not there."""
    home = folder / peer
    python = home / "bin" / "python"
    if not (home / "complete").exists():
        subprocess.run([sys.executable, "-m", "venv", "--clear", home], check=True)
        install = [python, "-m", "pip", "install", "-q"]
        subprocess.run([*install, *REQUIREMENTS[peer]], check=True)
        if source is not None:
            subprocess.run([*install, "--no-deps", source], check=True)
        (home / "complete").touch()
    return str(python)


def programs(
    pythons: dict[str, str], size: str, ranks: int, schedules: list[str]
) -> dict[str, list[Program]]:
    """Starts the plain step and every schedule of every library, and waits until they are ready."""
    env = dict(os.environ, JAX_PLATFORMS="cpu", PYTHONUNBUFFERED="1")
    env["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={ranks}"
    started: dict[str, list[Program]] = {}
    for library, python in pythons.items():
        cases = [("plain", "plain"), *((library, schedule) for schedule in schedules)]
        for kind, schedule in cases:
            child = [python, str(HERE / "peers_child.py"), kind, size, str(ranks), schedule]
            try:
                program = Program(f"{library} {schedule}", child, env)
            except RuntimeError as error:
                print(f"{error}: left out", file=sys.stderr)
                continue
            started.setdefault(library, []).append(program)
    return started


def check(started: dict[str, list[Program]]) -> None:
    """Says which programs have another loss or other gradients than the plain step."""
    for group in started.values():
        loss, squares = group[0].ready["check"]
        for program in group[1:]:
            other_loss, other_squares = program.ready["check"]
            if abs(other_loss / loss - 1) > 1e-4 or abs(other_squares / squares - 1) > 1e-3:
                print(
                    f"{program.name}: loss {other_loss:.6g} and squares of the gradients "
                    f"{other_squares:.6g}, the plain step has {loss:.6g} and {squares:.6g}"
                )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--sizes", default="tiny,mid")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--schedules", default="gpipe,1f1b,zb-h1")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=3, help="in a turn")
    parser.add_argument("--jaxpp", metavar="SOURCE", help="what pip installs JaxPP from")
    parser.add_argument("--without-spectrax", action="store_true")
    parser.add_argument("--environments", type=Path, default=HERE / ".environments")
    arguments = parser.parse_args()
    pythons = {"octojax": sys.executable}
    if not arguments.without_spectrax:
        pythons["spectrax"] = environment("spectrax", arguments.environments, None)
    if arguments.jaxpp is not None:
        pythons["jaxpp"] = environment("jaxpp", arguments.environments, arguments.jaxpp)
    print("| model | library | JAX | schedule | ms a step | x plain | processor | first call, s |")
    print("|---|---|---|---|---|---|---|---|")
    for size in arguments.sizes.split(","):
        started = programs(pythons, size, arguments.ranks, arguments.schedules.split(","))
        everyone = [program for group in started.values() for program in group]
        try:
            check(started)
            for _ in range(arguments.rounds):
                for program in everyone:
                    program.run(arguments.steps)
            for library, group in started.items():
                base = group[0]
                for program in group:
                    print(
                        f"| {size} | {library} | {program.ready['jax']} | "
                        f"{program.name.split()[1]} | {1e3 * program.step_s:.1f} | "
                        f"{program.step_s / base.step_s:.2f} | "
                        f"{program.processor_s / base.processor_s:.2f} | "
                        f"{program.ready['first_s']:.1f} |",
                        flush=True,
                    )
        finally:
            for program in everyone:
                program.end()
    print(f"load {os.getloadavg()[0]:.1f}, {arguments.ranks} devices of one process")


if __name__ == "__main__":
    main()
