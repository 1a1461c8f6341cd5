"""The race at the end of a run: one core with the plain step against two with a pipeline.

race                      in the run itself: starts two processes, a core each, and waits for them
python race.py SETTINGS   in each of the two: the same model, text and optimizer for two ranks

The layers' times are those that the run has measured; the link is measured between the two, and
1F1B on uniform stages and the tuned plan are made for it. One process compiles and runs the plain
step alone. The model is trained on for a few steps from its first parameters and then forgotten.
"""

import importlib
import json
import os
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from runner import Settings, Sizes, settings_from_json, settings_json

PROCESSES = 2
ROUNDS, STEPS = 5, 2
TURNS_SHARE = 0.8  # of the time limit: no round begins later, so that the processes end in time
OUT_OF_TIME = 4  # the exit code


@dataclass(frozen=True)
class Race:
    """Seconds of a step by kind (`plain` on one core, the others on two), and speedups over
    `plain`: measured, and simulated from the layers' times; `bound` is the largest that any plan
    could have. `processor_s` is the processor time of all processes for one step.
    """

    cores: tuple[int, ...]
    tokens: int
    step_s: Mapping[str, float]
    processor_s: Mapping[str, float]
    simulated: Mapping[str, float]
    bound: float

    def lines(self) -> list[str]:
        """Returns what to print, the plain step first."""
        plain_s = self.step_s["plain"]
        said = [
            f"on core {self.cores[-1]} alone, the plain step: {plain_s * 1e3:.0f} ms, "
            f"{self.tokens / plain_s:,.0f} tokens/s"
        ]
        for name, step_s in self.step_s.items():
            if name == "plain":
                continue
            work = self.processor_s[name] / self.processor_s["plain"] - 1
            said.append(
                f"on cores {', '.join(map(str, self.cores))}, {name}: {step_s * 1e3:.0f} ms, "
                f"{self.tokens / step_s:,.0f} tokens/s, [bold]{plain_s / step_s:.2f}x[/] "
                f"(simulated {self.simulated[name]:.2f}x; {work:+.0%} processor time)"
            )
        return [*said, f"no plan for these layers can be more than {self.bound:.2f}x as fast"]


def usable_cores() -> tuple[int, ...]:
    """Returns the cores that this process may run on and bind others to; none where it cannot."""
    if not hasattr(os, "sched_setaffinity"):
        return ()
    return tuple(sorted(os.sched_getaffinity(0)))


def why_not() -> str | None:
    """Returns why there can be no race on this machine; None if there can."""
    cores = usable_cores()
    if len(cores) >= PROCESSES:
        return None
    if not cores:
        return "this system does not bind processes to cores"
    return f"it takes {PROCESSES} cores, and this process may use core {cores[0]} alone"


def race(settings: Settings, limit_s: float) -> Race:
    """Returns the outcome of a race of two processes, which have ended when this returns.

    `settings.out` holds the run's `profile.json`. Raises `RuntimeError` that names the process
    which failed and what it said last, or that `limit_s` was not enough.
    """
    from octojax.launch import launch

    result = settings.out / "race.json"
    result.unlink(missing_ok=True)
    said: list[list[str]] = [[] for _ in range(PROCESSES)]
    told = json.dumps({"settings": settings_json(settings), "limit_s": limit_s})
    exits = launch(
        [str(Path(__file__).resolve()), told],
        PROCESSES,
        pin=True,
        timeout_s=limit_s,
        grace_s=5.0,
        echo=lambda process, line: said[process].append(line),
        notice=lambda line: None,
    )
    if any(e.code == OUT_OF_TIME for e in exits):
        raise RuntimeError(f"not done within {limit_s:.0f} s")
    bad = [e for e in sorted(exits, key=lambda e: e.at_s) if e.code != 0]
    if bad:
        lines = [line for line in said[bad[0].process_id] if line.strip()]
        raise RuntimeError(f"{bad[0]}, it said last: {lines[-1] if lines else 'nothing'}")
    return Race(**json.loads(result.read_text(encoding="utf-8")))


# ---------------------------------------------------------------------- in the two processes


def run(settings: Settings, until_s: float) -> Race:
    """Returns the outcome, the same in both processes; no round begins after `until_s`."""
    import octojax as octopipe

    octopipe.initialize()
    import corpus
    import jax
    from optimizers import warmed_up
    from pair import pipelined_step, plain_step, take_turns
    from planning import one_f_one_b

    from octojax.ir import Plan, Profile
    from octojax.mesh import pipeline_mesh
    from octojax.processes import everyone
    from octojax.profiling.together import measure_links
    from octojax.simulate import simulate
    from octojax.tune import tune

    sizes = Sizes(corpus.VOCABULARY, settings.width, settings.layers, settings.seed)
    model, loss = importlib.import_module(settings.name).build(sizes)
    text = corpus.load(settings.data, settings.length)
    batch = text.batch(0, settings.batch, settings.length, settings.seed)
    mesh, optimizer = pipeline_mesh(), warmed_up(settings)
    profile = Profile.load(settings.out / "profile.json")
    settings = replace(settings, ranks=mesh.num_ranks)
    profile = profile.on(measure_links(mesh, rounds=5))
    steps: dict[str, Any] = {"plain": None}
    mine: dict[str, Any] = {}
    if jax.process_index() == 0:
        result = tune(
            profile, mesh.num_ranks, seconds=settings.tune_seconds, seed=settings.seed,
            replicated=False,
        )  # fmt: skip
        plans = {"1f1b": one_f_one_b(profile, settings), "tuned": result.plan}
        mine = {
            "plans": {n: p.to_json() for n, p in plans.items()},
            "bound_s": result.lower_bound_s,
        }
    else:
        plain = plain_step(model, loss, optimizer, batch, settings.microbatches)
        plain()  # compiles
        steps["plain"] = plain
    told = json.loads(everyone(json.dumps(mine), "plans")[0])
    plans = {name: Plan.from_json(data) for name, data in told["plans"].items()}
    for name, plan in plans.items():
        step = octopipe.compile(
            model,
            loss,
            optimizer,
            batch,
            mesh=mesh.mesh,
            microbatches=settings.microbatches,
            plan=plan,
            progress=False,
        )
        steps[name] = pipelined_step(step, batch)
    figures = take_turns(steps, ROUNDS, STEPS, until_s)
    one_core_s = settings.microbatches * sum(x.compute_s for x in profile.layers)
    return Race(
        cores=tuple(int(c) for c in everyone(str(usable_cores()[0]), "cores")),
        tokens=settings.batch * settings.length,
        step_s={name: f.step_s for name, f in figures.items()},
        processor_s={name: f.processor_s for name, f in figures.items()},
        simulated={n: one_core_s / simulate(p, profile).makespan_s for n, p in plans.items()},
        bound=one_core_s / told["bound_s"],
    )


def main(text: str) -> None:
    begin = time.monotonic()
    told = json.loads(text)
    settings, limit_s = settings_from_json(told["settings"]), told["limit_s"]
    alarm = threading.Timer(limit_s, os._exit, (OUT_OF_TIME,))
    alarm.daemon = True
    alarm.start()
    outcome = run(settings, begin + TURNS_SHARE * limit_s)
    import jax

    if jax.process_index() == 0:
        draft = settings.out / "race.json"
        draft.write_text(json.dumps(asdict(outcome), indent=1) + "\n", encoding="utf-8")
    from octojax.processes import barrier

    barrier("done")


if __name__ == "__main__":
    main(sys.argv[1])
