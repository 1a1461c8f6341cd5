"""A lowered plan: everything that every rank executes in one step, in order.

    rank 0   0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 ...
    rank 1   1RECV_F0 1RECV_F1 1F0+1B0 1SEND_B0 ...

The text is PyTorch's pipelining CSV, and more: actions joined into one program (`1F0+1B0`), sums
of gradients on their way to the owner of a shared parameter (`SEND_G(1->0;3)`), results of the
loss (`SEND_E`), phases of the optimizer's update (`UPDATE0`) and what they hand on
(`SEND_U(1->0;0)`), and new parameters for those who keep a copy (`SEND_P`).
"""

import json
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from octojax.errors import FormatError, PlanError
from octojax.ir.action import Action, Kind, Overlap
from octojax.ir.cells import IDLE, busy_part, instruction_of, rows_of
from octojax.ir.files import csv_cells, csv_text, other_version, read_json, read_text
from octojax.ir.instruction import Instruction, Rows, Run, Send, Update
from octojax.ir.lowering import Crossings, Needs, without_transfers
from octojax.ir.partition import Partition
from octojax.ir.placement import Placement
from octojax.ir.plan import Plan
from octojax.ir.schedule import Schedule
from octojax.ir.shown import count, line
from octojax.ir.transfer import Cargo, Transfer
from octojax.ir.wiring import Wiring

_ENDS = {Cargo.UPDATE: 1, Cargo.PARAMETERS: 2}
_HEADS = ("lowered", "partition", "placement", "recompute", "wiring")
VERSION = 1


@dataclass(frozen=True)
class LoweredPlan:
    """`ranks[r][i]` is what rank r does as its i-th instruction of a step.

    Stages, layers and recomputation are those of the plan it was made of; `wiring` says what
    the model's stages exchange. Building one checks its form only; `octojax.ir.verify` proves
    that it is complete and that every transfer is delivered under rendezvous.
    """

    ranks: Rows
    partition: Partition
    placement: Placement
    wiring: Wiring
    recompute: tuple[bool, ...] = ()
    name: str = field(default="", compare=False)

    def __post_init__(self) -> None:
        stages = {self.partition.num_stages, self.placement.num_stages, self.wiring.num_stages}
        if len(stages) > 1:
            raise PlanError(
                f"a lowered plan of {self.partition.num_stages} stages by its partition, "
                f"{self.placement.num_stages} by its placement, {self.wiring.num_stages} by its "
                f"wiring"
            )
        if len(self.ranks) != self.placement.num_ranks:
            raise PlanError(
                f"the lowered plan has {len(self.ranks)} rows, the placement "
                f"{self.placement.num_ranks} ranks; a plan has one row per rank"
            )

    def __repr__(self) -> str:
        rows = [instruction for row in self.ranks for instruction in row]
        sends = sum(isinstance(instruction, Send) for instruction in rows)
        return line("LoweredPlan", self.name, (
            count(len(self.ranks), "rank"),
            count(self.partition.num_stages, "stage"),
            count(len(rows), "instruction"),
            count(sends, "transfer"),
        ))  # fmt: skip

    @classmethod
    def of(cls, plan: Plan | Schedule, wiring: Wiring | None = None) -> "LoweredPlan":
        """Returns a plan's own instructions: those of its schedule, with its transfers if any.

        With a `wiring` it leaves out what has nothing to do by it: idle actions, transfers that
        carry nothing, and PyTorch's FSDP actions. Raises `ScheduleError` for a transfer of a
        value that does not cross ranks.
        """
        if isinstance(plan, Schedule):
            plan = Plan(Partition((1,) * plan.num_stages), plan.placement, plan)
        known = wiring or Wiring.chain(plan.num_stages)
        schedule = plan.schedule if wiring is None else busy_part(plan.schedule, wiring)
        bare = without_transfers(schedule)
        crossings = Crossings.of(bare, known)
        rows = tuple(tuple(instruction_of(x, crossings) for x in row) for row in schedule.ranks)
        lowered = cls(rows, plan.partition, plan.placement, known, plan.recompute, plan.name)
        lowered.__dict__.update(schedule=bare, crossings=crossings)
        return lowered

    @property
    def has_transfers(self) -> bool:
        """Whether any value is sent: `octojax.passes.PlaceTransfers` has been here."""
        return any(isinstance(x, Send) for row in self.ranks for x in row)

    def without_transfers(self) -> "LoweredPlan":
        """Returns the units of computation alone, in their order."""
        return self.with_ranks(self.units)

    def without_update(self) -> "LoweredPlan":
        """Returns everything but the optimizer's update: what `octopipe lower` makes of a plan."""
        return self.with_ranks(tuple(tuple(x for x in r if not _of_update(x)) for r in self.ranks))

    def with_ranks(self, rows: Rows) -> "LoweredPlan":
        """Returns this plan with other rows; what is known of its computations is kept if they
        are the same, in the same order."""
        changed = replace(self, ranks=rows)
        kept: tuple[str, ...] = ()
        if changed.units == self.units:
            kept = ("schedule", "crossings", "ranks_of", "complete", "needs")
        elif changed._actions == self._actions:
            kept = ("schedule", "crossings", "ranks_of", "complete")
        changed.__dict__.update({k: self.__dict__[k] for k in kept if k in self.__dict__})
        return changed

    def note(self, **proofs: bool) -> None:
        """Notes what was proven of this plan, which never changes: `complete`, `delivers`."""
        self.__dict__.update(proofs)

    def proven(self, proof: str) -> bool:
        """Whether `octojax.ir.verify` has proven it before."""
        return self.__dict__.get(proof, False)

    @cached_property
    def units(self) -> tuple[tuple[Run, ...], ...]:
        """What each rank runs, in order."""
        return tuple(tuple(x for x in row if isinstance(x, Run)) for row in self.ranks)

    @cached_property
    def needs(self) -> tuple[tuple[Needs, ...], ...]:
        """What each of `units` needs and leaves behind."""
        needs = self.crossings.needs
        return tuple(tuple(needs(x.actions, x.pair) for x in row) for row in self.units)

    @property
    def _actions(self) -> tuple[tuple[Action, ...], ...]:
        return tuple(tuple(a for x in row for a in x.actions) for row in self.units)

    @property
    def num_ranks(self) -> int:
        return len(self.ranks)

    @property
    def num_stages(self) -> int:
        return self.partition.num_stages

    @cached_property
    def num_microbatches(self) -> int:
        return self.schedule.num_microbatches

    @cached_property
    def schedule(self) -> Schedule:
        """The computing actions alone, in their order; joined ones one by one."""
        return Schedule(
            tuple(
                tuple(
                    item
                    for instruction in row
                    if isinstance(instruction, Run)
                    for item in instruction.items
                    if isinstance(item, Overlap) or item.kind.computes
                )
                for row in self.ranks
            )
        )

    @cached_property
    def crossings(self) -> Crossings:
        """Which values cross ranks, by the actions that make and take them."""
        return Crossings.of(self.schedule, self.wiring)

    @cached_property
    def transfers(self) -> tuple[Transfer, ...]:
        """What is sent, in the senders' order, rank by rank; update and copies last."""
        every = [x.transfer for row in self.ranks for x in row if isinstance(x, Send)]
        return tuple(sorted(every, key=lambda t: _ENDS.get(t.kind, 0)))

    @cached_property
    def ranks_of(self) -> tuple[tuple[int, ...], ...]:
        """The ranks whose rows run each stage, ascending."""
        homes: list[set[int]] = [set() for _ in range(self.num_stages)]
        for rank, _, action in self.schedule.actions():
            homes[action.stage].add(rank)
        return tuple(map(tuple, map(sorted, homes)))

    def forwards_only(self) -> "LoweredPlan":
        """Returns what an evaluation executes: forwards, outputs and results, in their order."""
        rows = []
        for row in self.ranks:
            kept: list[Instruction] = []
            for x in row:
                if isinstance(x, Run):
                    forwards = tuple(a for a in x.actions if a.kind is Kind.FORWARD)
                    kept += [Run(forwards)] if forwards else []
                elif isinstance(x, Update):
                    continue
                elif x.transfer.kind in (Cargo.OUTPUT, Cargo.RESULTS):
                    kept.append(x)
            rows.append(tuple(kept))
        return self.with_ranks(tuple(rows))

    # ------------------------------------------------------------------ text

    def __str__(self) -> str:
        recompute = "".join("x" if r else "." for r in self.recompute)
        heads = (self.name, self.partition, self.placement, recompute, self.wiring)
        lines = [f"{head} {text}".rstrip() for head, text in zip(_HEADS, heads, strict=True)]
        return "\n".join([*lines, *self.lines])

    @property
    def lines(self) -> tuple[str, ...]:
        """One line of text per rank."""
        return tuple(" ".join(map(str, row)) or IDLE for row in self.ranks)

    @classmethod
    def parse(cls, text: str, name: str = "text") -> "LoweredPlan":
        """Returns the lowered plan that `str` wrote, or the rows alone (one line per rank).

        Raises `FormatError` naming the source (`name`), row and cell.
        """
        lines = text.strip("\n").split("\n")
        heads: dict[str, str] = {}
        while lines and lines[0].split(" ", 1)[0] in _HEADS:
            head, _, rest = lines.pop(0).partition(" ")
            heads[head] = rest
        rows = [[cell for cell in line.split() if cell != IDLE] for line in lines]
        if not heads:
            return _bare(rows, name)
        missing = [head for head in _HEADS if head not in heads]
        if missing:
            raise FormatError(f"{name}: the heading lacks {', '.join(missing)}")
        partition = Partition.parse(heads["partition"])
        wiring = Wiring.parse(heads["wiring"], partition.num_stages)
        return cls(
            rows_of(rows, name, wiring),
            partition,
            Placement.parse(heads["placement"], len(rows)),
            wiring,
            tuple(c == "x" for c in heads["recompute"]),
            heads["lowered"],
        )

    def to_csv(self) -> str:
        """Returns the rows as a CSV table: one row per rank, no padding."""
        return csv_text(self.ranks)

    @classmethod
    def from_csv(cls, text: str, name: str = "csv") -> "LoweredPlan":
        """Returns the rows of a CSV table: one layer per stage, and nothing known of the model.

        Raises `FormatError` naming file (`name`), row and cell.
        """
        rows = csv_cells(text, name)
        return _bare([[cell for cell in row if cell.strip()] for row in rows], name)

    def to_json(self) -> dict[str, Any]:
        return {
            "lowered": VERSION,
            "name": self.name,
            "partition": list(self.partition.sizes),
            "placement": [list(ranks) for ranks in self.placement.stages],
            "recompute": list(self.recompute),
            "wiring": self.wiring.to_json(),
            "ranks": list(self.lines),
        }

    @classmethod
    def from_json(cls, data: Any, name: str = "lowered plan") -> "LoweredPlan":
        """Returns the lowered plan in parsed JSON. Raises `FormatError` naming the field."""
        if not isinstance(data, dict) or data.get("lowered") != VERSION:
            version = data.get("lowered") if isinstance(data, dict) else type(data).__name__
            raise FormatError(other_version(name, "lowered plan", version, VERSION))
        lines = data.get("ranks")
        if not isinstance(lines, list) or not all(isinstance(x, str) for x in lines):
            raise FormatError(f"{name}: 'ranks' must be a list of text, one line per rank")
        rows = [[cell for cell in line.split() if cell != IDLE] for line in lines]
        try:
            wiring = Wiring.from_json(data["wiring"], f"{name}: wiring")
            return cls(
                rows_of(rows, name, wiring),
                Partition(tuple(map(int, data["partition"]))),
                Placement(tuple(tuple(map(int, r)) for r in data["placement"]), len(lines)),
                wiring,
                tuple(map(bool, data.get("recompute", ()))),
                str(data.get("name", "")),
            )
        except (KeyError, TypeError) as error:
            raise FormatError(
                f"{name}: a lowered plan has partition, placement, wiring and ranks; {error!r}"
            ) from None

    def save(self, path: str | Path) -> None:
        """Writes the rows to a `.csv` file, else everything as JSON."""
        text = self.to_csv() if str(path).endswith(".csv") else json.dumps(self.to_json(), indent=1)
        Path(path).write_text(text.rstrip("\n") + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: str | Path) -> "LoweredPlan":
        """Returns the lowered plan in a `.csv` or JSON file."""
        if str(path).endswith(".csv"):
            return cls.from_csv(read_text(path), str(path))
        return cls.from_json(read_json(path), str(path))


def _bare(rows: list[list[str]], name: str) -> LoweredPlan:
    """Rows alone: one layer per stage, and the wiring of a model of which nothing is known."""
    ranks = rows_of(rows, name, None)
    stages = 1 + max((a.stage for row in ranks for x in row for a in _actions(x)), default=-1)
    if not stages:
        raise FormatError(f"{name}: no action in {len(rows)} rows; expected some such as 0F0")
    homes: list[set[int]] = [set() for _ in range(stages)]
    for rank, row in enumerate(ranks):
        for action in (a for x in row for a in _actions(x)):
            homes[action.stage].add(rank)
    placement = Placement(tuple(map(tuple, map(sorted, homes))), len(ranks))
    return LoweredPlan(ranks, Partition((1,) * stages), placement, Wiring.chain(stages))


def _actions(instruction: Instruction) -> tuple[Action, ...]:
    return instruction.actions if isinstance(instruction, Run) else ()


def _of_update(x: Instruction) -> bool:
    return isinstance(x, Update) or (not isinstance(x, Run) and x.transfer.kind is Cargo.UPDATE)
