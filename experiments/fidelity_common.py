"""What the two fidelity studies share: the plans that race, and their comparison."""

import json
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))


from octojax.ir import Kind, Overlap, Plan, Profile, Timeline
from octojax.launch import launch
from octojax.processes import everyone
from octojax.tune import tune
from octojax.tune.baselines import published
from octojax.tune.problem import Problem


def in_processes(
    main: Callable[[Sequence[str]], None], count: int, pin: bool, timeout_s: float
) -> None:
    """Runs `main(arguments)` in `count` processes: starts this script once more in each."""
    if "OCTOPIPE_PROCESS_ID" in os.environ:
        main(sys.argv[1:])
        return
    exits = launch(sys.argv, count, timeout_s=timeout_s, pin=pin, echo=_first_only)
    bad = [str(e) for e in exits if e.code != 0]
    if bad:
        raise SystemExit("\n".join(bad))


def _first_only(process: int, line: str) -> None:
    if "[Gloo]" not in line:
        print(line if process == 0 else f"[{process}] {line}", flush=True)


def plans(profile: Profile, ranks: int, microbatches: int, seconds: float) -> dict[str, Plan]:
    """Returns the plans to race, the same in every process: chosen by process 0 on `profile`.

    `1F1B` and `interleaved` cut the layers uniformly, `partition-only` is the best 1F1B on any
    partition, backward split where that is better.
    """
    from jax import process_index

    texts = {}
    if process_index() == 0:
        problem = Problem.of(profile, ranks, microbatches, None)
        every = sorted(published(problem), key=lambda x: x[2].makespan_s)
        kinds = {
            "1F1B": lambda n: n == "1f1b-split/uniform",
            "interleaved": lambda n: n.startswith("interleaved") and n.endswith("/uniform"),
            "zb-h1": lambda n: n == "zb-h1/uniform",
            "partition-only": lambda n: n.startswith(("1f1b/", "1f1b-split/", "1f1b-fill/")),
        }
        for kind, keep in kinds.items():
            found = next((plan for name, plan, _ in every if keep(name)), None)
            if found is not None:
                texts[kind] = found.to_json()
        best = tune(profile, ranks, microbatches, seconds=seconds, replicated=False)
        texts["tuned"] = replace(best.plan, name=best.plan.name or "tuned").to_json()
    told = json.loads(everyone(json.dumps(texts), "plans", 10 * seconds)[0])
    return {name: Plan.from_json(data) for name, data in told.items()}


def row(name: str, plan: Plan, simulated: Timeline, measured: Timeline) -> dict[str, Any]:
    """Returns one line of results: simulated against measured, and TABLE III's columns."""
    pairs = list(zip(measured.ranks, simulated.ranks, strict=True))
    return {
        "plan": name,
        "stages": plan.num_stages,
        "measured_s": measured.makespan_s,
        "simulated_s": simulated.makespan_s,
        "error": simulated.makespan_s / measured.makespan_s - 1,
        "comm": len(measured.transfers),
        "overlap": measured.sender_overlapped,
        "overlap_both": measured.overlapped,
        "rate": measured.sender_overlapped / max(1, len(measured.transfers)),
        "peak_bytes": [m.peak_bytes for m, _ in pairs],
        "simulated_peak_bytes": [s.peak_bytes for _, s in pairs],
        "overhead": overhead(measured),
        "ms_by_item": {
            rank: {
                text: [round(ms, 3), round(predicted.get(text, 0.0), 3)]
                for text, ms in means(measured, rank).items()
            }
            for rank, predicted in enumerate(means(simulated, r) for r in range(len(pairs)))
        },
        "busy_error": [s.busy_s / m.busy_s - 1 for m, s in pairs],
    }


def means(timeline: Timeline, rank: int) -> dict[str, float]:
    """Returns the mean milliseconds of a rank's actions, by stage and kind such as `3F`."""
    spans: dict[str, list[float]] = {}
    for span in timeline.actions:
        if span.rank == rank:
            actions = span.item.actions if isinstance(span.item, Overlap) else (span.item,)
            text = "+".join(f"{a.stage}{a.kind.value}" for a in actions)
            spans.setdefault(text, []).append(1e3 * (span.end_s - span.start_s))
    return {text: sum(found) / len(found) for text, found in sorted(spans.items())}


def overhead(timeline: Timeline) -> float:
    """Returns the largest share of the step that a rank spends between actions without need.

    A gap counts if what the next action reads had come before the one before it ended.
    """
    came = {(t.target, t.kind, t.stage, t.microbatch): t.end_s for t in timeline.transfers}
    worst = 0.0
    for rank in range(len(timeline.ranks)):
        own = sorted((s for s in timeline.actions if s.rank == rank), key=lambda s: s.start_s)
        idle = 0.0
        for before, span in pairwise(own):
            reads = [
                (rank, "F", a.stage - 1, a.microbatch)
                if a.kind is Kind.FORWARD
                else (rank, "B", a.stage + 1, a.microbatch)
                for a in (span.item.actions if isinstance(span.item, Overlap) else (span.item,))
                if a.kind is not Kind.WEIGHT_GRAD
            ]
            if all(came.get(read, 0.0) <= before.end_s for read in reads):
                idle += span.start_s - before.end_s
        worst = max(worst, idle / timeline.makespan_s)
    return worst


def scaled(profile: Profile, factor: float) -> Profile:
    """Returns the profile with every layer's times multiplied."""
    names = ("forward_s", "input_grad_s", "weight_grad_s", "backward_s")
    layers = tuple(
        replace(x, **{n: factor * getattr(x, n) for n in names if getattr(x, n) is not None})
        for x in profile.layers
    )
    return replace(profile, layers=layers)


def table(rows: Sequence[dict[str, Any]], baseline: str = "1F1B") -> str:
    """Returns the rows as a Markdown table with speedups over `baseline`."""
    base = next(r for r in rows if r["plan"] == baseline)
    lines = [
        "| plan | #stages | measured s | simulated s | error | speedup over 1F1B measured / "
        "simulated | #comm | #overlap | rate | overhead |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for r in rows:
        speedups = (
            base["measured_s"] / r["measured_s"],
            base["simulated_s"] / r["simulated_s"],
        )
        lines.append(
            f"| {r['plan']} | {r['stages']} | {r['measured_s']:.4g} | {r['simulated_s']:.4g} | "
            f"{r['error']:+.2%} | {speedups[0]:.3f} / {speedups[1]:.3f} | {r['comm']} | "
            f"{r['overlap']} | {r['rate']:.0%} | {r['overhead']:.2%} |"
        )
    mean = sum(abs(r["error"]) for r in rows) / len(rows)
    lines.append(f"\nmean error of the simulated step time {mean:.2%}")
    return "\n".join(lines)
