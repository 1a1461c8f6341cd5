"""Where a search is asked to begin: a partition, a placement, both, or a whole plan.

partition:2,4                      layers per stage; stage s on rank s modulo the ranks
placement:0,1,1,0                  the rank of each stage; uniform layers
partition:1,2,2,1 placement:0,1,1,0
plan.json                          a plan, as `octopipe tune -o` writes it
"""

import difflib
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import numpy as np

from octojax.errors import PlanError, ScheduleError
from octojax.ir.action import Item, Kind
from octojax.ir.lowering import actions_of
from octojax.ir.partition import Partition, uniform_partition
from octojax.ir.placement import Placement
from octojax.ir.plan import Plan
from octojax.ir.schedule import Schedule
from octojax.ir.verify import verify
from octojax.tune.problem import Problem

FORMS = "a plan's file, partition:2,4 (layers per stage) or placement:0,1,1,0 (rank per stage)"
WORDS = ("partition", "placement")


@dataclass(frozen=True)
class Start:
    """What a search begins from; what is not said is that of 1F1B: uniform layers, stage s on
    rank s modulo the number of ranks.
    """

    partition: Partition | None = None
    placement: Placement | None = None
    plan: Plan | None = None

    @classmethod
    def of(cls, value: "Start | Plan | Partition | Placement | str") -> "Start":
        """Returns the start that a record or text (see the module) means.

        Raises `ValueError` for text of another form, `FormatError` for a broken file.
        """
        if isinstance(value, Start):
            return value
        if isinstance(value, Partition):
            return cls(partition=value)
        if isinstance(value, Placement):
            return cls(placement=value)
        if isinstance(value, str):
            return _read(value)
        if not isinstance(value, Plan):
            raise TypeError(
                f"start = {value!r:.80}: expected a Plan, a Partition, a Placement or text: {FORMS}"
            )
        return cls(plan=value)

    def fitted(self, problem: Problem) -> "Beginning":
        """Returns the start on the problem's layers and ranks.

        Raises `PlanError` or `ScheduleError` where it has others, saying what was asked and what
        is there, `ScheduleError` for a plan that cannot run.
        """
        if self.plan is not None:
            return _of_plan(self.plan, problem)
        p, placement = problem, self.placement
        partition = self.partition
        if partition is not None and partition.num_layers != p.num_layers:
            raise PlanError(_other("layers", partition.num_layers, p.num_layers, p, "partition"))
        if placement is None:
            stages = partition.num_stages if partition is not None else p.ranks
            placement = Placement.of([s % p.ranks for s in range(stages)], p.ranks)
        elif placement.num_ranks > p.ranks:
            raise PlanError(_other("ranks", placement.num_ranks, p.ranks, p, "placement"))
        placement = Placement(placement.stages, p.ranks)
        _one_rank_each(placement)
        if partition is None:
            if placement.num_stages > p.num_layers:
                raise PlanError(
                    f"start: a placement of {placement.num_stages} stages for {p.num_layers} "
                    f"layers of profile {p.profile.name!r}: every stage needs a layer. Give at "
                    f"most {p.num_layers} stages"
                )
            partition = uniform_partition(p.profile.kinds, placement.num_stages)
        if partition.num_stages != placement.num_stages:
            raise PlanError(
                f"start: the partition [{partition}] has {partition.num_stages} stages, the "
                f"placement [{placement}] {placement.num_stages}; give as many ranks as sizes"
            )
        return Beginning(partition, placement, None)


@dataclass(frozen=True)
class Beginning:
    """A start that fits a problem. `plan` is there if an order of work was given."""

    partition: Partition
    placement: Placement
    plan: Plan | None

    @cached_property
    def rank_S(self) -> np.ndarray:
        return np.array([ranks[0] for ranks in self.placement.stages], np.int64)

    @cached_property
    def rank_L(self) -> np.ndarray:
        return np.repeat(self.rank_S, self.partition.sizes)

    @cached_property
    def layers_P(self) -> np.ndarray:
        return np.bincount(self.rank_L, minlength=self.placement.num_ranks).astype(np.int64)


def _read(text: str) -> Start:
    words = text.replace(";", " ").split()
    if words and not any(":" in word for word in words) and text.strip().endswith(".json"):
        return Start(plan=Plan.load(Path(text.strip())))
    values: dict[str, str] = {}
    for word in words:
        name, colon, value = word.partition(":")
        if not colon or name not in WORDS or name in values:
            near = difflib.get_close_matches(name.lower(), WORDS, n=1, cutoff=0.5)
            hint = f"; did you mean {near[0]!r}" if near and name not in WORDS else ""
            raise ValueError(f"start {text!r}: cannot read {word!r}{hint}. Expected {FORMS}")
        values[name] = value.replace(",", " ")
    if not values:
        raise ValueError(f"start {text!r}: expected {FORMS}")
    return Start(
        Partition.parse(values["partition"]) if "partition" in values else None,
        Placement.parse(values["placement"]) if "placement" in values else None,
    )


def _of_plan(plan: Plan, p: Problem) -> Beginning:
    name = f"plan {plan.name!r}" if plan.name else "plan"
    for what, there, wanted in (
        ("layers", plan.partition.num_layers, p.num_layers),
        ("ranks", plan.num_ranks, p.ranks),
        ("microbatches", plan.num_microbatches, p.microbatches),
    ):
        if there != wanted:
            raise PlanError(_other(what, there, wanted, p, name))
    _one_rank_each(plan.placement)
    if plan.schedule.has_transfers:
        raise ScheduleError(
            f"start: {name} has SEND and RECV in its table; a search moves computing actions "
            f"alone. Give the plan as it was before it was lowered"
        )
    try:
        verify(plan)
    except ScheduleError as error:
        raise ScheduleError(f"start: {name} cannot run. {error}") from None
    return Beginning(plan.partition, plan.placement, with_rule(plan, p))


def with_rule(plan: Plan, problem: Problem) -> Plan:
    """Returns the plan with the problem's recompute; its R leave with what is kept now."""
    flags = problem.recompute.flags(plan.num_stages, plan.recompute)
    if flags == plan.recompute:
        return plan
    again = flags or (False,) * plan.num_stages

    def stays(item: Item) -> bool:
        return all(again[a.stage] or a.kind is not Kind.RECOMPUTE for a in actions_of(item))

    rows = tuple(tuple(item for item in row if stays(item)) for row in plan.schedule.ranks)
    return replace(plan.with_schedule(Schedule(rows)), recompute=flags, prediction=None)


def _one_rank_each(placement: Placement) -> None:
    if placement.replicated:
        raise PlanError(
            f"start: stages of [{placement}] are held by two ranks; a search moves layers that "
            f"one rank holds. Start from a plan with one rank per stage, or without a start"
        )
    if empty := placement.empty_ranks:
        raise PlanError(
            f"start: rank {', '.join(map(str, empty))} of {placement.num_ranks} has no stage in "
            f"[{placement}]; every rank needs one"
        )


def _other(what: str, there: int, wanted: int, problem: Problem, name: str) -> str:
    remedy = {
        "layers": "give the profile that the start was made for, or another start",
        "ranks": f"ask for {there} ranks (--ranks {there}), or give another start",
        "microbatches": f"ask for {there} microbatches (--microbatches {there}), or start from "
        f"its partition and placement alone",
    }[what]
    return (
        f"start: the {name} has {there} {what}, asked are {wanted} for profile "
        f"{problem.profile.name!r}; {remedy}"
    )
