"""One core against two: how much faster a pipelined step is, beside what simulator and bound say.

    python benchmarks/two_cores.py
    python benchmarks/two_cores.py --rounds 9 --steps 3 --width 192 --layers 14 -o result.json

    plain              one process on one core: one jitted step, `lax.scan` over the microbatches
    both at once       that step in two processes that share nothing, a core and a batch each: what
                       the machine's second core adds where there is neither bubble nor message
    1f1b               two processes, a core each: uniform stages, whole backwards
    zb-h1              the same with backwards split into I and W
    zb-h1-balanced     the same on stages of nearly equal time
    tuned              the tuner's plan

Two processes, each bound to one core of those that this one may use. Both time all layers at the
same time, by processor time, which other work on the machine hardly changes; on that profile and
the measured link plans are made and simulated. Then all steps take turns. The second table says
what separates the measured step from half of the plain one, part by part, and the third where the
extra work comes from; see `gap.py` for how each part is measured.
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "experiments"))

from gap import Work, time_parts  # noqa: E402

PROCESSES = 2
PLANS = ("1f1b", "zb-h1", "zb-h1-balanced", "tuned")
SHARES = ("fill and drain", "waiting for computation", "waiting for transfers")
HOST = "waiting for the host"


@dataclass(frozen=True)
class Row:
    """One plan: seconds of a step, processor seconds of each rank and cause, simulated parts."""

    name: str
    stages: int
    step_s: float
    by_rank_s: tuple[float, ...]
    queued_s: float
    faults: float
    idle_s: dict[str, float]
    bubbles: float
    simulated_s: float
    simulated_parts: dict[str, float]
    simulated_bubbles: float
    operations: float
    work: Work


@dataclass(frozen=True)
class Outcome:
    """All that the tables are made of. `one_core_s` and `bound_s` are of the measured profile."""

    tokens: int
    plain_s: float
    both_s: float
    plain_processor_s: float
    plain_operations: float
    one_core_s: float
    bound_s: float
    rows: tuple[Row, ...]


# ------------------------------------------------------------------------------ tables


def speeds(x: Outcome) -> list[str]:
    """Returns the first table: speed and speedups over one core."""
    lines = [
        "| | stages | step | tokens/s | over one core | simulated | bubbles | simulated | "
        "processor time | extra work |",
        "|---|---|---|---|---|---|---|---|---|---|",
        f"| plain, one core | | {_ms(x.plain_s)} | {x.tokens / x.plain_s:,.0f} | 1.00 | 1.00 "
        f"| | | {_ms(x.plain_processor_s)} | |",
        f"| plain, both at once | | {_ms(x.both_s)} | {2 * x.tokens / x.both_s:,.0f} "
        f"| **{2 * x.plain_s / x.both_s:.2f}** | 2.00 | | | | |",
    ]
    for row in x.rows:
        lines.append(
            f"| {row.name} | {row.stages} | {_ms(row.step_s)} | {x.tokens / row.step_s:,.0f} "
            f"| **{x.plain_s / row.step_s:.2f}** | {x.one_core_s / row.simulated_s:.2f} "
            f"| {row.bubbles:.1%} | {row.simulated_bubbles:.1%} | {_ms(sum(row.by_rank_s))} "
            f"| {sum(row.by_rank_s) / x.plain_processor_s - 1:+.1%} |"
        )
    bound = f"| bound | | | | | {x.one_core_s / x.bound_s:.2f} | | | | |"
    return [*lines, bound]


def gaps(x: Outcome) -> list[str]:
    """Returns the second table: the parts of a step, measured and simulated."""
    names = [row.name for row in x.rows]
    parts = [
        time_parts(row.step_s, x.plain_processor_s, row.by_rank_s, row.idle_s) for row in x.rows
    ]
    lines = _header("ms of a step: measured (simulated)", names)
    for part in parts[0]:
        cells = [
            f"{1e3 * own[part]:.0f}"
            + (f" ({1e3 * row.simulated_parts[part]:.0f})" if part in row.simulated_parts else "")
            for own, row in zip(parts, x.rows, strict=True)
        ]
        lines.append(f"| {part} | {' | '.join(cells)} |")
    whole = (f"{1e3 * row.step_s:.0f} ({1e3 * row.simulated_s:.0f})" for row in x.rows)
    queued = (f"{1e3 * row.queued_s:.0f}" for row in x.rows)
    return [
        *lines,
        f"| the step | {' | '.join(whole)} |",
        f"| its threads waited for a core that others had | {' | '.join(queued)} |",
    ]


def causes(x: Outcome) -> list[str]:
    """Returns the third table: where the extra work comes from, in processor time."""
    lines = _header("extra ms of processor time, both ranks", [row.name for row in x.rows])
    for cause in x.rows[0].work.causes():
        cells = (f"{1e3 * row.work.causes()[cause]:+.0f}" for row in x.rows)
        lines.append(f"| {cause} | {' | '.join(cells)} |")
    plain = (f"{1e3 * row.work.plain_s:.0f}" for row in x.rows)
    shares = (f"{row.work.extra_s / row.work.plain_s:+.1%}" for row in x.rows)
    counted = (f"{row.operations / x.plain_operations - 1:+.1%}" for row in x.rows)
    return [
        *lines,
        f"| together, of the plain step's work | {' | '.join(shares)} |",
        f"| the plain step's, in the same rounds | {' | '.join(plain)} |",
        f"| operations as counted, beyond the plain step's | {' | '.join(counted)} |",
    ]


def _header(first: str, names: Sequence[str]) -> list[str]:
    return [f"| {first} | {' | '.join(names)} |", "|---" * (1 + len(names)) + "|"]


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.0f} ms"


# ------------------------------------------------------------------------------ the two processes


def plans_of(profile: Any, ranks: int, microbatches: int, seconds: float) -> tuple[dict, float]:
    """Returns the plans by name, and the lower bound of any."""
    from octojax.ir import Placement, Plan, uniform_partition
    from octojax.partitioners import partition
    from octojax.schedules import generate
    from octojax.tune import tune

    alike = profile.on(replace(profile.machine, speeds=()))  # two cores of one kind
    uniform = uniform_partition(profile.kinds, ranks)
    balanced = partition("balanced", alike, ranks, microbatches)
    in_order = Placement.sequential(ranks)
    result = tune(alike, ranks, microbatches, seconds=seconds, replicated=False)
    plans = {
        "1f1b": Plan(uniform, in_order, generate("1f1b", ranks, microbatches)),
        "zb-h1": Plan(uniform, in_order, generate("zb-h1", ranks, microbatches)),
        "zb-h1-balanced": Plan(balanced, in_order, generate("zb-h1", ranks, microbatches)),
        "tuned": result.plan,
    }
    return {name: replace(plan, name=name) for name, plan in plans.items()}, result.lower_bound_s


def run(arguments: argparse.Namespace) -> Outcome:
    """Returns what was measured, the same in both processes."""
    import octojax as octopipe

    octopipe.initialize()
    import jax
    import optax
    from apart import plain_operations, plain_update
    from hybrid import mid
    from pair import pipelined_step, plain_step, take_turns

    from octojax.ir import Plan
    from octojax.mesh import pipeline_mesh
    from octojax.processes import everyone
    from octojax.profiling.together import Together

    count = arguments.microbatches
    model, loss, microbatch = mid(arguments.width, arguments.layers)
    batch = jax.tree.map(lambda x: jax.numpy.concatenate([x] * count), microbatch)
    mesh, optimizer = pipeline_mesh(), optax.adamw(1e-3)
    say = (lambda line: print(line, flush=True)) if jax.process_index() == 0 else (lambda _: None)
    timer = Together(octopipe.adapt(model, loss), microbatch, mesh, optimizer)
    profile = timer.profile(9, microbatches=count, target_s=0.0, clock=time.process_time)
    say(f"profiled: {profile.num_layers} layers, link {profile.machine.latency_s * 1e3:.3g} ms")
    told = ""
    plain_run = plain_step(model, loss, optimizer, batch, count)
    steps: dict[str, Any] = {
        "plain": plain_run if jax.process_index() == 1 else None,
        "both at once": plain_run,
    }
    if jax.process_index() == 0:
        every, bound_s = plans_of(profile, mesh.num_ranks, count, arguments.seconds)
        plans = {name: every[name] for name in arguments.plans}
        told = json.dumps({"plans": {n: p.to_json() for n, p in plans.items()}, "bound": bound_s})
    else:
        plain_run()
    answer = json.loads(everyone(told, "plans")[0])
    plans = {name: Plan.from_json(data) for name, data in answer["plans"].items()}
    compiled = {}
    for name, plan in plans.items():
        compiled[name] = octopipe.compile(
            model, loss, optimizer, batch, mesh=mesh.mesh, plan=plan, microbatches=count,
            progress=False,
        )  # fmt: skip
        steps[name] = pipelined_step(compiled[name], batch)
        say(f"compiled {name}: {plan.num_stages} stages")
    figures = take_turns(steps, arguments.rounds, arguments.steps)
    plain = figures["plain"]
    alone: dict[str, Any] = {"plain": steps["plain"], "update": None}
    if alone["plain"] is not None:
        alone["update"] = plain_update(model, optimizer)
    rows = []
    for name, plan in plans.items():
        say(f"taking {name} apart")
        rows.append(
            _row(name, plan, compiled[name], batch, profile, figures[name], alone,
                 arguments.rounds)
        )  # fmt: skip
    return Outcome(
        tokens=microbatch["tokens"].shape[0] * (microbatch["tokens"].shape[1] - 1) * count,
        plain_s=plain.step_s,
        both_s=figures["both at once"].step_s,
        plain_processor_s=plain.processor_s,
        plain_operations=plain_operations(model, loss, microbatch) * count,
        one_core_s=count * sum(x.compute_s for x in profile.layers),
        bound_s=answer["bound"],
        rows=tuple(rows),
    )


def _row(
    name: str,
    plan: Any,
    step: Any,
    batch: Any,
    profile: Any,
    figures: Any,
    alone: Mapping[str, Any],
    rounds: int,
) -> Row:
    """Returns the parts of one plan's step; both processes call this alike."""
    import jax
    from apart import operations, pieces_s, split_s

    from octojax.diagnosis.accounts import parts_of
    from octojax.simulate import simulate

    state, timelines = step.init(), []
    for _ in range(rounds + 1):
        state, metrics, timeline = step(state, batch, record=True)
        jax.block_until_ready((state, metrics))
        timelines.append(timeline)
    usual = sorted(timelines[1:], key=lambda t: t.makespan_s)[rounds // 2]
    simulated = simulate(plan, profile)
    idle = {part.name: part.seconds for part in parts_of(usual)}
    expected = {part.name: part.seconds for part in parts_of(simulated)}
    pieces = pieces_s(step, state, batch, alone, rounds)
    work = Work(
        step_s=pieces["step"],
        gradients_s=pieces["gradients"],
        together_s=pieces["together"],
        apart_s=pieces["apart"],
        split_s=split_s(plan, profile),
        transfers_s=2 * profile.machine.host_cost_s * len(usual.transfers),
        plain_s=pieces["plain"],
        plain_update_s=pieces["update"],
    )
    return Row(
        name=name,
        stages=plan.num_stages,
        step_s=figures.step_s,
        by_rank_s=figures.by_process_s,
        queued_s=figures.queued_s,
        faults=figures.faults,
        idle_s={part: idle[part] for part in SHARES} | {HOST: idle.get(HOST, 0.0)},
        bubbles=_bubbles(usual),
        simulated_s=simulated.makespan_s,
        simulated_parts={
            "plain step's work, evenly spread": expected["work, evenly spread"],
            **{part: expected[part] for part in ("imbalance", *SHARES)},
        },
        simulated_bubbles=_bubbles(simulated),
        operations=operations(step),
        work=work,
    )


def _bubbles(timeline: Any) -> float:
    busy = sum(rank.busy_s for rank in timeline.ranks)
    return 1 - busy / (len(timeline.ranks) * timeline.makespan_s)


# ------------------------------------------------------------------------------ start


def parsed(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=3, help="of each kind in a round")
    parser.add_argument("--seconds", type=float, default=20.0, help="that the tuner searches")
    parser.add_argument("--plans", default=",".join(PLANS), help="some of them, by name and comma")
    parser.add_argument("--width", type=int, default=192)
    parser.add_argument("--layers", type=int, default=14)
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--timeout", type=float, default=900.0, help="of a process that waits")
    parser.add_argument("-o", "--output", type=Path, help="write the figures here (JSON)")
    options = parser.parse_args(arguments)
    options.plans = options.plans.split(",")
    unknown = [name for name in options.plans if name not in PLANS]
    if unknown:
        parser.error(f"--plans {', '.join(unknown)}: expected some of {', '.join(PLANS)}")
    return options


def main() -> None:
    arguments = parsed(sys.argv[1:])
    if "OCTOPIPE_PROCESS_ID" not in os.environ:
        start(arguments.timeout)
        return
    outcome = run(arguments)
    import jax

    from octojax.processes import barrier

    if jax.process_index() == 0:
        print(
            f"\nload {os.getloadavg()[0]:.1f}; {arguments.rounds} rounds, {arguments.steps} steps"
        )
        for table in (speeds, gaps, causes):
            print("\n" + "\n".join(table(outcome)))
        if arguments.output:
            arguments.output.write_text(json.dumps(asdict(outcome), indent=1) + "\n")
    barrier("done")


def start(timeout_s: float) -> None:
    """Runs this script once more in two processes, a core each; ends as they do."""
    from race import why_not

    from octojax.launch import launch

    problem = why_not()
    if problem is not None:
        raise SystemExit(f"two_cores: {problem}")
    os.environ["XLA_FLAGS"] = "--xla_cpu_multi_thread_eigen=false"
    os.environ["JAX_PLATFORMS"] = "cpu"

    def echo(process: int, line: str) -> None:
        if "[Gloo]" not in line:
            print(line if process == 0 else f"[{process}] {line}", flush=True)

    exits = launch(sys.argv, PROCESSES, pin=True, timeout_s=timeout_s, echo=echo)
    bad = [str(e) for e in exits if e.code != 0]
    if bad:
        raise SystemExit("\n".join(bad))


if __name__ == "__main__":
    main()
