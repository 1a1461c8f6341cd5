"""How fast one evaluation of a fixed plan is, against networkx on the same graph.

    python benchmarks/simulate.py

The large case is that of the paper's Nemotron-H (Large): 226 layers, a stage each, round robin
over 16 ranks, 32 microbatches: 21,696 actions and 14,400 transfers. All times are processor
time of one thread, the median of several runs after warm-up; the last rows are that of fresh
processes, the first of them with an empty cache of compiled code.
"""

import argparse
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable

import networkx as nx
import numpy as np

from octojax.ir import LayerCost, Machine, Profile, Schedule
from octojax.ir.action import Action, Kind
from octojax.ir.verify import verify
from octojax.passes import PlaceTransfers, ReorderComm
from octojax.simulate import LayerCosts, Links, Table, build_dag, evaluate, simulate

SIZES = {"large": (226, 16, 32), "small": (58, 4, 8)}
_KINDS = (Kind.INPUT_GRAD, Kind.WEIGHT_GRAD)


def profile(layers: int) -> Profile:
    """Returns layers of two alternating kinds with a heavy head, on links like a cluster's."""
    costs = [
        LayerCost(
            "M-"[i % 2],
            forward_s=2e-3 + 1e-3 * (i % 2),
            input_grad_s=2.5e-3,
            weight_grad_s=4e-4 + 8e-4 * (i % 2),
            state_bytes=19 << 20,
            residual_bytes=10 << 20,
            weight_residual_bytes=10 << 20,
            output_bytes=1 << 20,
        )
        for i in range(layers - 1)
    ]
    head = LayerCost("head", 5.6e-3, 4e-3, 1.1e-3, state_bytes=300 << 20, residual_bytes=1 << 28)
    machine = Machine(latency_s=2e-5, bandwidth_bytes_per_s=2e10)
    return Profile("benchmark", (*costs, head), machine)


def breadth_first(stages: int, ranks: int, microbatches: int) -> Schedule:
    """Returns all forwards stage by stage, then all split backwards, stages round robin."""
    rows = []
    for rank in range(ranks):
        own = range(rank, stages, ranks)
        forward = [Action(s, Kind.FORWARD, m) for s in own for m in range(microbatches)]
        backward = [
            Action(s, kind, m)
            for s in reversed(own)
            for m in range(microbatches)
            for kind in _KINDS
        ]
        rows.append((*forward, *backward))
    return Schedule(tuple(rows))


def milliseconds(call: Callable[[], object], seconds: float) -> float:
    """Returns the median time of a call, repeated for about `seconds` (at least 3 times)."""
    call()
    taken = []
    stop = time.perf_counter() + seconds
    while time.perf_counter() < stop or len(taken) < 3:
        begin = time.process_time()
        call()
        taken.append(time.process_time() - begin)
    return 1e3 * statistics.median(taken)


def first_use_s(cache: str) -> float:
    """Returns the processor time of a fresh process that imports and simulates compiled."""
    code = (
        "from octojax.ir import Schedule\n"
        "from octojax.simulate import StageCosts, Table, Links, evaluate, simulate\n"
        "s = Schedule.parse('0F0 0B0\\n1F0 1B0')\n"
        "simulate(s, StageCosts.unit(2), compiled=True)\n"
        "evaluate(Table.of(s), StageCosts.unit(2), Links.of(None, 2))\n"
    )
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    environment = {**os.environ, "NUMBA_CACHE_DIR": cache}
    subprocess.run([sys.executable, "-c", code], check=True, env=environment)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=2.0, help="time per row")
    budget = parser.parse_args().seconds
    print("| case | what | median |\n|---|---|---|")
    for name, size in SIZES.items():
        stages, ranks, _ = size
        given, schedule = profile(stages), breadth_first(*size)
        table, layers = Table.of(schedule), LayerCosts(given)
        links = Links.of(given.machine, ranks)
        costs = layers.cut([1] * stages)
        transfers = len(simulate(schedule, costs, given.machine).transfers)
        case = f"{name}: {len(table.items)} actions, {transfers} transfers"

        def row(what: str, value: str, case: str = case) -> None:
            print(f"| {case} | {what} | {value} |", flush=True)

        graph = build_dag(schedule, costs, given.machine)
        graph.remove_nodes_from([n for n, d in graph.nodes(data=True) if d["kind"] == "memory"])
        path = nx.dag_longest_path_length(graph, weight="delay_s")
        fast = milliseconds(lambda: evaluate(table, costs, links, False), budget)  # noqa: B023
        assert np.isclose(evaluate(table, costs, links).makespan_s, path, rtol=1e-12)
        full = milliseconds(lambda: evaluate(table, costs, links), budget)  # noqa: B023
        slow = milliseconds(lambda: nx.dag_longest_path_length(graph, weight="delay_s"), 0)  # noqa: B023
        row("evaluate: makespan, busy times", f"{fast:.2f} ms ({1e3 / fast:.0f}/s)")
        row("evaluate: and peak bytes of every rank", f"{full:.2f} ms ({1e3 / full:.0f}/s)")
        row("networkx longest path", f"{slow:.0f} ms ({slow / fast:.0f} times as long)")
        cut = milliseconds(lambda: layers.cut([1] * stages), budget / 4)  # noqa: B023
        row("costs of stages from a partition", f"{cut:.3f} ms")
        whole = milliseconds(lambda: simulate(schedule, costs, given.machine), 0)  # noqa: B023
        row("simulate: check and whole timeline", f"{whole:.0f} ms")
        row("verify", f"{milliseconds(lambda: verify(schedule), 0):.0f} ms")  # noqa: B023
        naive = PlaceTransfers()(schedule)
        reorder = ReorderComm(costs=costs, machine=given.machine)
        lower = milliseconds(lambda: reorder(naive), 0)  # noqa: B023
        row("ReorderComm with its proof", f"{lower:.0f} ms")
    with tempfile.TemporaryDirectory() as cache:
        print(f"| first use | fresh process, nothing cached | {first_use_s(cache):.1f} s |")
        print(f"| first use | fresh process, cached | {first_use_s(cache):.1f} s |")


if __name__ == "__main__":
    main()
