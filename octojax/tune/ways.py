"""Published ways to train a pipeline, by name: who partitions, who places, who orders, what is
recomputed. Each yields its plans with whole backwards (or its own split); bases come on top.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import numpy as np

from octojax.errors import CapacityError
from octojax.ir.partition import Partition, uniform_partition
from octojax.ir.placement import Placement
from octojax.ir.plan import Plan
from octojax.ir.schedule import Schedule
from octojax.partitioners import divide
from octojax.schedules import SCHEDULES, generate
from octojax.simulate.costs import StageCosts
from octojax.tune.co_tuning import chain_of, with_recompute
from octojax.tune.problem import Problem

Plans = Iterator[Plan]


@dataclass(frozen=True)
class Way:
    """A published way. `plans(problem)` yields its plans, of which the quickest that fits counts.

    `splits`: its own tables split the backward, so that it has no other base. `rule` says in
    words what it decides; `source` where it is published.
    """

    name: str
    rule: str
    source: str
    plans: Callable[[Problem], Plans]
    splits: bool = False


def plan_of(problem: Problem, table: Schedule, partition: Partition, name: str) -> Plan:
    """Returns the plan of a table on a partition, recomputing what the problem asks for."""
    again = problem.recompute.flags(partition.num_stages)
    return Plan(partition, table.placement, table, again, name)


def _uniform(name: str, *chunks: int | None, **options: Any) -> Callable[[Problem], Plans]:
    """Returns the maker of a schedule's tables on uniform partitions; chunks None: its own."""

    def plans(problem: Problem) -> Plans:
        refusal: ValueError | None = None
        count = 0
        for each in chunks or (None,):
            stages = SCHEDULES[name].stages(problem.ranks, each)
            if stages > problem.num_layers and count:
                continue
            try:
                partition = uniform_partition(problem.profile.kinds, stages)
                table = generate(name, problem.ranks, problem.microbatches, each, **options)
            except ValueError as error:
                refusal = refusal or error
                continue
            count += 1
            yield plan_of(problem, table, partition, name)
        if not count and refusal is not None:
            raise refusal

    return plans


def _interleaved(problem: Problem) -> Plans:
    """Yields every number of chunks up to one layer a stage, as Megatron's users choose it."""
    most = max(2, (problem.num_layers - 2) // problem.ranks)
    chunks = sorted({c for c in (2, 3, 4, 6, 8, most) if 2 <= c <= most})
    yield from _uniform("interleaved", *chunks)(problem)


def _stage_costs(problem: Problem, partition: Partition) -> dict[str, Any]:
    """Returns the options of a zero-bubble search: costs per stage and a transfer's latency."""
    again = problem.recompute.flags(partition.num_stages)
    costs = StageCosts.of(problem.profile, partition, again)
    grads = costs.input_grad_s + np.where(costs.recompute, costs.forward_s, 0.0)
    latency, bandwidth = problem.profile.machine.link(0, 1) if problem.ranks > 1 else (0.0, 1.0)
    hop = latency + float(costs.output_bytes[:-1].max(initial=0.0)) / bandwidth
    return {
        "forward": tuple(costs.forward_s.tolist()),
        "input_grad": tuple(grads.tolist()),
        "weight_grad": tuple(costs.weight_grad_s.tolist()),
        "comm": hop,
    }


def _zero_bubble_auto(problem: Problem) -> Plans:
    """Yields the orders searched under the profile's costs for one and two times 1F1B's memory."""
    partition = uniform_partition(problem.profile.kinds, problem.ranks)
    costs = _stage_costs(problem, partition)
    for memory in dict.fromkeys((problem.ranks, 2 * problem.ranks)):
        table = generate("zb-auto", problem.ranks, problem.microbatches, memory=(memory,), **costs)
        yield plan_of(problem, table, partition, "zb-auto")


def _zero_bubble_v(problem: Problem) -> Plans:
    partition = uniform_partition(problem.profile.kinds, 2 * problem.ranks)
    costs = _stage_costs(problem, partition)
    table = generate("zb-v", problem.ranks, problem.microbatches, **costs)
    yield plan_of(problem, table, partition, "zb-v")


SLOTS = 3
"""Tessel's slots of time in the mean forward of a stage."""


def _tessel(problem: Problem) -> Plans:
    """Yields a repetend for each shape of a chain (a stage per rank, and V), at unit costs and at
    the profile's in whole slots."""
    p = problem
    shapes = [Placement.sequential(p.ranks)]
    if 2 * p.ranks <= p.num_layers:
        shapes.append(Placement.wave(p.ranks))
    for placement in shapes:
        partition = uniform_partition(p.profile.kinds, placement.num_stages)
        again = p.recompute.flags(partition.num_stages)
        costs = StageCosts.of(p.profile, partition, again)
        slot = float(costs.forward_s.mean()) / SLOTS
        back = costs.backward_s + np.where(costs.recompute, costs.forward_s, 0.0)
        whole = {
            "forward": np.maximum(1, np.rint(costs.forward_s / slot)).astype(int).tolist(),
            "backward": np.maximum(1, np.rint(back / slot)).astype(int).tolist(),
        }
        for options in ({}, whole):
            table = generate("tessel", p.ranks, p.microbatches, placement=placement, **options)
            yield plan_of(p, table, partition, "tessel")


def _planned(partitioner: str, *schedules: str) -> Callable[[Problem], Plans]:
    """Returns the maker of 1F1B's tables on a partitioner's partition."""

    def plans(problem: Problem) -> Plans:
        p = problem
        division = divide(partitioner, chain_of(p), p.ranks, p.microbatches)
        for schedule in schedules or ("1f1b",):
            table = generate(schedule, p.ranks, p.microbatches)
            yield plan_of(p, table, division.partition, partitioner)

    return plans


def _metis(problem: Problem) -> Plans:
    """Yields 1F1B with layers by the ranks' speeds, stages on the ranks in Metis's order."""
    p = problem
    speeds = tuple(p.speeds.tolist())
    division = divide("metis", chain_of(p), p.ranks, p.microbatches, speeds=speeds)
    order = Placement.of(list(division.order), p.ranks)
    table = generate("1f1b", p.ranks, p.microbatches, placement=order)
    yield plan_of(p, table, division.partition, "metis")


def _mist(problem: Problem) -> Plans:
    if problem.recompute.mode in ("auto", "none"):
        with suppress(CapacityError):
            yield from _planned("mist")(problem)
    yield from with_recompute(problem, "mist", window=2, borders=True)


def _adapipe(problem: Problem) -> Plans:
    """Yields the partition of stages that are kept or recomputed whole, as a plan has it; where
    memory makes one recompute, also AdaPipe's own, which saves layers one by one."""
    p = problem
    plans = list(with_recompute(p, "adapipe"))
    yield from plans
    if p.recompute.forced or not any(any(plan.recompute) for plan in plans):
        return
    with suppress(CapacityError):
        division = divide("adapipe", chain_of(p), p.ranks, p.microbatches)
        flags = division.stage_recompute
        yield replace(plans[0], partition=division.partition, recompute=flags)


def _mario(problem: Problem) -> Plans:
    """Yields 1F1B with stages recomputed ahead of their backward, hidden where ranks wait."""
    from octojax.passes import Recompute

    p = problem
    partition = uniform_partition(p.profile.kinds, p.ranks)
    table = generate("1f1b", p.ranks, p.microbatches)
    plan = Plan(partition, table.placement, table, name="mario")
    if p.recompute.mode == "none":
        yield plan
        return
    stages = None
    if p.recompute.mode == "stages":
        stages = tuple(s for s in range(p.ranks) if s in p.recompute.stages)
    every = Recompute(stages=stages, costs=p.profile, drop_redundant=not p.recompute.forced)
    yield every(plan)
    yield replace(every, overlap=False, prepose=False)(plan)  # in the least memory


EVEN = "layers evenly by count"
WAYS: Mapping[str, Way] = MappingProxyType(
    {
        way.name: way
        for way in (
            Way(
                "1f1b", f"{EVEN}, a stage per rank", "PipeDream-Flush, ICML 2021", _uniform("1f1b")
            ),
            Way(
                "interleaved",
                f"{EVEN}, a loop of 2 to all chunks per rank",
                "Megatron-LM, SC 2021",
                _interleaved,
            ),
            Way(
                "zb-h1", f"{EVEN}, 1F1B's memory", "Zero Bubble, ICLR 2024", _uniform("zb-h1"), True
            ),
            Way(
                "zb-h2",
                f"{EVEN}, twice 1F1B's memory",
                "Zero Bubble, ICLR 2024",
                _uniform("zb-h2"),
                True,
            ),
            Way(
                "zb-auto",
                f"{EVEN}, order searched under the profile's costs, 1F1B's memory or twice that",
                "Zero Bubble, ICLR 2024",
                _zero_bubble_auto,
                True,
            ),
            Way(
                "zb-v",
                f"{EVEN}, two chunks in a V, order searched under the profile's costs",
                "Zero Bubble, ICLR 2024",
                _zero_bubble_v,
                True,
            ),
            Way(
                "tessel",
                f"{EVEN}, searched repetend on a stage per rank and on a V",
                "Tessel, HPCA 2024",
                _tessel,
            ),
            Way(
                "mist",
                "layers and recompute of each stage together, layers near the mean; 1F1B",
                "Mist, EuroSys 2025",
                _mist,
            ),
            Way(
                "adapipe",
                "layers and recompute of each stage together; 1F1B",
                "AdaPipe, ASPLOS 2024",
                _adapipe,
            ),
            Way(
                "dapple",
                "least warm-up + steady + ending; 1F1B with one or two warm-ups",
                "DAPPLE, PPoPP 2021",
                _planned("dapple", "1f1b", "1f1b-overlap"),
            ),
            Way(
                "metis",
                "layers by the ranks' speeds, and the order of the ranks; 1F1B",
                "Metis, ATC 2024",
                _metis,
            ),
            Way(
                "hanayo",
                f"{EVEN}, one or two waves over the ranks",
                "Hanayo, SC 2023",
                _uniform("hanayo", 2, 4),
            ),
            Way(
                "dualpipe-v",
                f"{EVEN}, two chunks in a V, F and B in pairs",
                "DualPipeV, 2025, after DeepSeek-V3",
                _uniform("dualpipe-v"),
                True,
            ),
            Way(
                "mario",
                f"{EVEN}, 1F1B, everything recomputed, in bubbles where memory allows",
                "Mario, PPoPP 2025",
                _mario,
            ),
        )
    }
)
"""Every published way by name, oldest idea first."""
