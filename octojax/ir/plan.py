"""A plan: everything the executor needs to know beside the model itself."""

import json
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from octojax.errors import FormatError, PlanError
from octojax.ir.files import other_version, read_json
from octojax.ir.partition import Partition
from octojax.ir.placement import Placement
from octojax.ir.prediction import Prediction
from octojax.ir.schedule import Schedule
from octojax.ir.shown import count, duration, line, picture, short
from octojax.ir.wiring import Wiring

VERSION = 1
_FIELDS = (
    "version",
    "name",
    "partition",
    "placement",
    "ranks",
    "recompute",
    "prediction",
    "wiring",
    "schedule",
)


@dataclass(frozen=True)
class Plan:
    """Partition, placement, schedule, and per stage whether its forward is recomputed.

    `recompute` is empty (nothing is) or has one entry per stage. `name` is for people.
    `prediction` says which profile the plan was made for and what its step takes then; it is no
    part of what the plan is, so plans are equal without it. Nor is `wiring`, what the stages of the
    model exchange, which the plan of a compiled step has: `octojax.passes` lower the plan by it.
    """

    partition: Partition
    placement: Placement
    schedule: Schedule
    recompute: tuple[bool, ...] = ()
    name: str = ""
    prediction: Prediction | None = field(default=None, compare=False)
    wiring: Wiring | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        stages = self.partition.num_stages
        if self.placement.num_stages != stages:
            raise PlanError(
                f"the partition has {stages} stages [{self.partition}], "
                f"the placement {self.placement.num_stages} [{self.placement}]"
            )
        homeless = [s for s, ranks in enumerate(self.placement.stages) if not ranks]
        if homeless:
            raise PlanError(
                f"stage {', '.join(map(str, homeless))} is placed on no rank; give every stage "
                f"one of the {self.placement.num_ranks} ranks"
            )
        if self.schedule.num_stages > stages:
            raise PlanError(
                f"the schedule runs stage {self.schedule.num_stages - 1}, but the partition "
                f"has only {stages} stages [{self.partition}]"
            )
        if self.schedule.num_ranks != self.placement.num_ranks:
            raise PlanError(
                f"the schedule has {self.schedule.num_ranks} rows, the placement "
                f"{self.placement.num_ranks} ranks; a schedule has one row per rank"
            )
        if self.recompute and len(self.recompute) != stages:
            raise PlanError(f"recompute has {len(self.recompute)} entries for {stages} stages")
        if self.wiring is not None and self.wiring.num_stages != stages:
            raise PlanError(
                f"the wiring is that of {self.wiring.num_stages} stages, the partition has {stages}"
            )

    @property
    def num_stages(self) -> int:
        return self.partition.num_stages

    @property
    def num_ranks(self) -> int:
        return self.placement.num_ranks

    @property
    def num_microbatches(self) -> int:
        return self.schedule.num_microbatches

    @cached_property
    def recomputes(self) -> tuple[bool, ...]:
        """One entry per stage."""
        return self.recompute or (False,) * self.num_stages

    def with_schedule(self, schedule: Schedule) -> "Plan":
        """Returns the plan with another order of work, whose time nobody has predicted yet."""
        kept = self.prediction if schedule == self.schedule else None
        return replace(self, schedule=schedule, prediction=kept)

    def __repr__(self) -> str:
        recomputed, predicted = sum(self.recompute), self.prediction
        return line("Plan", self.name, (
            count(self.num_ranks, "rank"),
            f"{count(self.num_stages, 'stage')} of {short(str(self.partition))} layers on ranks "
            f"{short(str(self.placement))}",
            count(self.num_microbatches, "microbatch"),
            f"{recomputed} recomputed" if recomputed else "",
            f"{duration(predicted.makespan_s)} under profile {short(predicted.profile)!r}"
            if predicted else "",
        ))  # fmt: skip

    def _repr_html_(self) -> str | None:
        return picture(self)

    def __str__(self) -> str:
        head = f"plan {self.name}".strip()
        recompute = "".join("x" if r else "." for r in self.recomputes)
        return (
            f"{head}\npartition {self.partition}\nplacement {self.placement}\n"
            f"recompute {recompute}\n{self.schedule}"
        )

    @classmethod
    def parse(cls, text: str) -> "Plan":
        """Returns the plan that `str(plan)` wrote."""
        lines = text.strip("\n").split("\n")
        heads = ("plan", "partition", "placement", "recompute")
        words = tuple(line.split(" ", 1)[0] for line in lines[:4])
        if words != heads:
            raise FormatError(f"a plan's text begins with lines {heads}, found {words}")
        name, partition, placement, recompute = (line.partition(" ")[2] for line in lines[:4])
        schedule = Schedule.parse("\n".join(lines[4:]))
        return cls(
            Partition.parse(partition),
            Placement.parse(placement, schedule.num_ranks),
            schedule,
            tuple(c == "x" for c in recompute) if "x" in recompute else (),
            name,
        )

    def to_json(self) -> dict[str, Any]:
        return {
            "version": VERSION,
            "name": self.name,
            "partition": list(self.partition.sizes),
            "placement": [list(ranks) for ranks in self.placement.stages],
            "ranks": self.num_ranks,
            "recompute": list(self.recompute),
            **({"prediction": self.prediction.to_json()} if self.prediction else {}),
            **({"wiring": self.wiring.to_json()} if self.wiring else {}),
            "schedule": [" ".join(map(str, rank)) for rank in self.schedule.ranks],
        }

    @classmethod
    def from_json(cls, data: Any, name: str = "plan") -> "Plan":
        """Returns the plan in parsed JSON. Raises `FormatError` naming the field."""
        if not isinstance(data, dict):
            raise FormatError(f"{name}: a plan is a JSON object, found {type(data).__name__}")
        if data.get("version") != VERSION:
            raise FormatError(other_version(name, "plan", data.get("version"), VERSION))
        missing = [k for k in ("partition", "placement", "schedule") if k not in data]
        if missing:
            raise FormatError(f"{name}: plan lacks {', '.join(missing)}")
        unknown = [k for k in data if k not in _FIELDS]
        if unknown:  # a misspelt "recompute" must not pass for none
            raise FormatError(
                f"{name}: unknown {', '.join(map(repr, unknown))}; fields of a plan are "
                f"{', '.join(_FIELDS)}"
            )
        forms = (
            ("partition", "a list of layers per stage", _is_ints(data["partition"])),
            (
                "placement",
                "a list of lists of ranks, one per stage",
                _is_list(data["placement"]) and all(map(_is_ints, data["placement"])),
            ),
            (
                "schedule",
                "a list of text, one line per rank",
                _is_list(data["schedule"]) and all(isinstance(x, str) for x in data["schedule"]),
            ),
            (
                "recompute",
                "a list of true or false, one per stage",
                _is_list(data.get("recompute", []))
                and all(isinstance(x, bool) for x in data.get("recompute", [])),
            ),
            (
                "ranks",
                "a whole number >= 1",
                _is_ints([data.get("ranks", 1)]) and data.get("ranks", 1) >= 1,
            ),
            ("name", "text", isinstance(data.get("name", ""), str)),
        )
        wrong = [f"{field!r} must be {form}" for field, form, holds in forms if not holds]
        if wrong:
            raise FormatError(f"{name}: {'; '.join(wrong)}")
        lines = (" ".join(line.split()) or "-" for line in data["schedule"])
        schedule = Schedule.parse("\n".join(lines), f"{name}: schedule")
        return cls(
            Partition(tuple(data["partition"])),
            Placement(
                tuple(tuple(r) for r in data["placement"]), data.get("ranks", schedule.num_ranks)
            ),
            schedule,
            tuple(data.get("recompute", ())),
            data.get("name", ""),
            Prediction.from_json(data["prediction"], name) if "prediction" in data else None,
            Wiring.from_json(data["wiring"], f"{name}: wiring") if "wiring" in data else None,
        )

    def save(self, path: str | Path) -> None:
        Path(path).write_text(json.dumps(self.to_json(), indent=1) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: str | Path) -> "Plan":
        return cls.from_json(read_json(path), str(path))


def _is_list(value: Any) -> bool:
    return isinstance(value, list)


def _is_ints(value: Any) -> bool:
    return _is_list(value) and all(type(x) is int for x in value)
