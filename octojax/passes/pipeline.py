"""The road from a plan to what every rank executes: passes in a row, checked between.

    split,recompute(stages=0-3),transfers,reorder(window=64),join

`split`, `merge` and `recompute` rewrite a plan's schedule; `transfers` turns the plan into a
lowered one; `reorder`, `ownership` and `join` rewrite that. A pass may be any callable that takes
what the one before it returned.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from pathlib import Path
from typing import Any

from octojax.errors import PlanError, ScheduleError
from octojax.ir import (
    LoweredPlan,
    Machine,
    Partition,
    Plan,
    Profile,
    Schedule,
    Wiring,
    uniform_partition,
)
from octojax.ir.exchange import exchanges
from octojax.ir.lowering import without_transfers
from octojax.ir.transfer import Cargo
from octojax.ir.verify import verify
from octojax.passes.one_order import blocks
from octojax.passes.spec import Pass, name_of, parse_passes
from octojax.simulate.costs import StageCosts

DEFAULT = "transfers,join,reorder,ownership"
"""The passes of a plan without transfers of its own."""

BLOCKING = "transfers,reorder,join,ownership"
"""The same where a transfer occupies both its ranks: it may have to stand between two actions that
could be joined."""

AS_WRITTEN = "join,ownership"
"""Those of a table that spells out its SEND and RECV actions: their order is kept."""

Subject = Plan | LoweredPlan
_ON_PLANS = ("split", "merge", "recompute")
_ON_LOWERED = ("reorder", "ownership", "join")


@dataclass(frozen=True)
class Pipeline:
    """Passes in order. `Pipeline.parse` reads a textual one.

    `run(plan)` returns the lowered plan; `on_plan(plan)` and `lower(plan, wiring)` are its two
    halves, for who builds the stages in between. `costs` and `machine` go to the passes that ask
    for them and have none of their own. With `dump`, a folder, the table is written there before
    the first pass and after each.
    """

    passes: tuple[Pass, ...]
    costs: StageCosts | Profile | None = None
    machine: Machine | None = None
    dump: Path | None = None

    @classmethod
    def of(
        cls, passes: str | Pass | Sequence[Pass | str] | None, plan: Plan, **more: Any
    ) -> "Pipeline":
        """Returns the pipeline of a spec, of passes, or (None) the default one for `plan`.

        Raises `ValueError` for unknown passes and options, and `PlanError` for an order that
        cannot work.
        """
        if passes is None:
            usual = BLOCKING if blocks(more.get("costs"), more.get("machine")) else DEFAULT
            passes = AS_WRITTEN if plan.schedule.has_transfers else usual
        pipeline = cls(parse_passes(passes), **more)
        _check_order(pipeline.passes, plan.schedule.has_transfers)
        return pipeline

    def run(self, plan: Plan, wiring: Wiring | None = None) -> LoweredPlan:
        """Returns what every rank executes; raises naming the pass that broke an invariant."""
        return self.lower(self.on_plan(plan), wiring)

    def on_plan(self, plan: Plan) -> Plan:
        """Returns the plan after the passes that rewrite its schedule.

        Its own transfers are dropped if the pipeline places new ones.
        """
        if any(name_of(each) == "transfers" for each in self.passes):
            plan = plan.with_schedule(without_transfers(plan.schedule))
        verify(plan)
        self._note(0, "plan", plan)
        subject: Subject = plan
        for number, each in enumerate(self.passes[: self._lowering], 1):
            subject = self._applied(number, each, subject)
        assert isinstance(subject, Plan)
        return subject

    def lower(self, plan: Plan, wiring: Wiring | None = None) -> LoweredPlan:
        """Returns the lowered plan of what `on_plan` returned, for stages of this wiring; by
        default the plan's own, else that of a model of which nothing is known.
        """
        wiring = wiring or plan.wiring or Wiring.chain(plan.num_stages)
        subject: Subject = plan
        proven = plan.schedule.has_transfers
        for number, each in enumerate(self.passes[self._lowering :], self._lowering + 1):
            if isinstance(subject, Plan) and name_of(each) != "transfers":
                subject = LoweredPlan.of(subject, wiring)
            if name_of(each) == "transfers":
                each, proven = _completed(each, wiring=wiring), False
            proven |= name_of(each) == "reorder"
            subject = self._applied(number, each, subject, proven)
        if isinstance(subject, Plan):
            subject = LoweredPlan.of(subject, wiring)
        _check_whole(subject, self.passes)
        return subject

    @property
    def _lowering(self) -> int:
        """How many passes come before the plan is lowered."""
        names = [name_of(each) for each in self.passes]
        stops = [n for n, name in enumerate(names) if name in ("transfers", *_ON_LOWERED)]
        return min(stops, default=len(names))

    def _applied(
        self, number: int, each: Pass, subject: Subject, delivers: bool = False
    ) -> Subject:
        name = name_of(each)
        bound = _completed(each, costs=self.costs, machine=self.machine)
        result = bound(subject)
        wanted = LoweredPlan if name == "transfers" else type(subject)
        if not isinstance(result, wanted):
            raise TypeError(
                f"pass {number} ({name}) returned {type(result).__name__}, expected "
                f"{wanted.__name__}, as it was given"
            )
        try:
            self._check(result, subject, delivers)
        except PlanError as error:
            raise type(error)(f"pass {number} ({name}) broke the table: {error}") from None
        self._note(number, name, result)
        return result

    def _check(self, result: Subject, before: Subject, delivers: bool) -> None:
        counts = result.num_stages, result.num_microbatches
        expected = before.num_stages, before.num_microbatches
        if counts != expected:
            raise PlanError(
                f"it has {counts[0]} stages and {counts[1]} microbatches now, and had "
                f"{expected[0]} and {expected[1]}"
            )
        if isinstance(result, Plan):
            verify(result)
            return
        if isinstance(before, LoweredPlan):
            _check_kept(result, before)
        if result.schedule == without_transfers(before.schedule):
            result.note(complete=True)  # as the plan was
        verify(result, delivers=delivers)

    def _note(self, number: int, name: str, subject: Subject) -> None:
        if self.dump is not None:
            self.dump.mkdir(parents=True, exist_ok=True)
            (self.dump / f"{number:02d}-{name}.txt").write_text(f"{subject}\n", encoding="utf-8")


def lowered(
    plan: Plan | Schedule,
    passes: str | Pass | Sequence[Pass | str] | None = None,
    *,
    wiring: Wiring | None = None,
    costs: StageCosts | Profile | None = None,
    machine: Machine | None = None,
    dump: Path | None = None,
) -> LoweredPlan:
    """Returns what every rank executes in a step of `plan`; see `Pipeline`.

    The layers of a profile are cut uniformly for a bare schedule; without one, a stage is a layer.
    """
    if isinstance(plan, Schedule):
        verify(without_transfers(plan))  # before anything as large as the table claims to be
        cut = Partition((1,) * plan.num_stages)
        if isinstance(costs, Profile):
            cut = uniform_partition(costs.kinds, plan.num_stages)
        plan = Plan(cut, plan.placement, plan)
    pipeline = Pipeline.of(passes, plan, costs=costs, machine=machine, dump=dump)
    return pipeline.run(plan, wiring)


def _completed(each: Pass, **values: Any) -> Pass:
    """Returns the pass with those of `values` that it has a field for and lacks."""
    names = {f.name for f in fields(each)} if is_dataclass(each) else set()
    missing = {
        name: value
        for name, value in values.items()
        if name in names and value is not None and getattr(each, name) is None
    }
    return replace(each, **missing) if missing else each  # type: ignore[type-var]


def _check_order(passes: Sequence[Pass], written: bool) -> None:
    """Raises `PlanError` for named passes in an order that cannot work."""
    placed: str | None = None  # the pass after which the table is lowered
    for each in passes:
        name = name_of(each)
        if name in _ON_PLANS and placed is not None:
            raise PlanError(
                f"{name} cannot come after {placed}: it rewrites the schedule, and {placed} "
                f"works on the transfers around its actions. Put {name} before transfers"
            )
        if name == "transfers" and placed is not None:
            raise PlanError(
                f"transfers cannot come after {placed}: the table is lowered by then. Name it "
                f"once, before {', '.join(_ON_LOWERED)}"
            )
        if name in _ON_LOWERED and placed is None and not written:
            raise PlanError(
                f"{name} needs transfers before it: the plan has no SEND and RECV yet. Write "
                f"transfers,{name}"
            )
        if name in (*_ON_LOWERED, "transfers"):
            placed = name
    if placed is None and not written:
        raise PlanError(
            f"the passes {', '.join(map(name_of, passes)) or '(none)'} end with a schedule, which "
            f"is not lowered: add transfers,reorder"
        )


def _check_kept(result: LoweredPlan, before: LoweredPlan) -> None:
    """Raises `PlanError` if a pass on lowered plans changed what runs where."""
    lost = []
    for rank, (row, old) in enumerate(
        zip(result.schedule.ranks, before.schedule.ranks, strict=True)
    ):
        actions, expected = set(map(str, row)), set(map(str, old))
        if actions != expected:
            changed = sorted(actions ^ expected)
            lost.append(f"rank {rank}: {' '.join(changed[:8])}")
    if lost:
        raise PlanError(
            f"it changed which actions run on {'; '.join(lost)}. Passes on lowered plans may "
            f"only move and join them"
        )


def _check_whole(plan: LoweredPlan, passes: Sequence[Pass]) -> None:
    """Raises unless the lowered plan is all that a step needs, and delivers."""
    there = set(plan.transfers)
    missing = [t for t in exchanges(plan) if t not in there]
    if missing:
        names = ", ".join(map(str, missing[:4])) + (", ..." if len(missing) > 4 else "")
        what = {Cargo.RESULTS: "results"}.get(missing[0].kind, "parameters")
        raise PlanError(
            f"the lowered plan lacks {len(missing)} transfers of {what} that several ranks keep "
            f"or make ({names}). Add ownership to the passes {', '.join(map(name_of, passes))}"
        )
    try:
        verify(plan)
    except ScheduleError as error:
        names = [name_of(each) for each in passes]
        if "reorder" in names:
            raise
        raise ScheduleError(
            f"the passes {', '.join(names)} leave a table that is not deliverable: the naive rule "
            f"needs reorder after transfers. {error}"
        ) from None
