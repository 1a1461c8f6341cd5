"""What the stages of a model read, hand on and have nothing to do for: all that lowering needs."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from octojax.errors import FormatError
from octojax.ir.action import Kind, parse_action
from octojax.ir.transfer import Cargo


@dataclass(frozen=True)
class Unit:
    """One parameter: the stages that read it, and those that add to its gradient."""

    readers: tuple[int, ...]
    summers: tuple[int, ...]

    def __str__(self) -> str:
        text = "+".join(map(str, self.readers)) or "-"
        if self.summers == self.readers:
            return text
        return f"{text}/{'+'.join(map(str, self.summers))}"


@dataclass(frozen=True)
class Wiring:
    """How a model's stages depend on each other, without the model.

    `units[u]` are the stages of parameter u, `results[e]` those that make result e of the loss.
    `silent` boundaries carry nothing: `(Cargo.GRADIENT, 2)` if stage 1 wants no gradient from
    stage 2. `idle` actions have nothing to compute, as the W of a stage without parameters.

    Text: `units 0*3 0+2 2/ | results 2 | silent 1B | idle 0I`; three parameters of stage 0, one
    of stages 0 and 2, and one of stage 2 that is not trained.
    """

    num_stages: int
    units: tuple[Unit, ...]
    results: tuple[tuple[int, ...], ...]
    silent: frozenset[tuple[Cargo, int]] = frozenset()
    idle: frozenset[tuple[int, Kind]] = frozenset()

    @classmethod
    def chain(cls, num_stages: int) -> "Wiring":
        """Returns the wiring of a model of which nothing is known: one parameter per stage, a
        gradient across every boundary, and the loss made by the last stage."""
        units = tuple(Unit((s,), (s,)) for s in range(num_stages))
        return cls(num_stages, units, ((num_stages - 1,),) if num_stages else ())

    def carries(self, kind: Cargo, stage: int) -> bool:
        """Whether a stage hands its output to the next, or its input's gradient to the last."""
        end = self.num_stages - 1 if kind is Cargo.OUTPUT else 0
        return stage != end and 0 <= stage < self.num_stages and (kind, stage) not in self.silent

    def __str__(self) -> str:
        parts = [
            f"units {' '.join(_counted(map(str, self.units)))}",
            f"results {' '.join('+'.join(map(str, stages)) for stages in self.results)}",
            f"silent {' '.join(f'{s}{k}' for k, s in sorted(self.silent))}",
            f"idle {' '.join(f'{s}{k}' for s, k in sorted(self.idle))}",
        ]
        return " | ".join(part for part in parts if not part.endswith(" "))

    @classmethod
    def parse(cls, text: str, num_stages: int) -> "Wiring":
        """Returns the wiring that `str` wrote. Raises `FormatError` for anything else."""
        fields: dict[str, list[str]] = {"units": [], "results": [], "silent": [], "idle": []}
        for part in filter(str.strip, text.split("|")):
            name, *words = part.split()
            if name not in fields:
                raise FormatError(
                    f"cannot read {text!r} as a wiring: expected {', '.join(fields)}, "
                    f"found {name!r}"
                )
            fields[name] = words
        try:
            units: list[Unit] = []
            for word in fields["units"]:
                stages, _, times = word.partition("*")
                units += [_unit(stages)] * int(times or 1)
            return cls(
                num_stages,
                tuple(units),
                tuple(_stages(word) for word in fields["results"]),
                frozenset((Cargo(word[-1]), int(word[:-1])) for word in fields["silent"]),
                frozenset(
                    (action.stage, action.kind)
                    for action in (parse_action(f"{word}0") for word in fields["idle"])
                ),
            )
        except ValueError as error:
            raise FormatError(f"cannot read {text!r} as a wiring: {error}") from None

    def to_json(self) -> dict[str, Any]:
        return {"stages": self.num_stages, "text": str(self)}

    @classmethod
    def from_json(cls, data: Any, name: str = "wiring") -> "Wiring":
        """Returns the wiring in parsed JSON. Raises `FormatError` naming the field."""
        fits = (
            isinstance(data, dict)
            and type(data.get("stages")) is int
            and isinstance(data.get("text"), str)
        )
        if not fits:
            raise FormatError(f"{name}: a wiring is an object with 'stages' and 'text'")
        return cls.parse(data["text"], data["stages"])


def _unit(text: str) -> Unit:
    readers, slash, summers = text.partition("/")
    reading = _stages(readers)
    return Unit(reading, _stages(summers) if slash else reading)


def _stages(text: str) -> tuple[int, ...]:
    return tuple(int(word) for word in text.split("+")) if text not in ("", "-") else ()


def _counted(words: Iterable[str]) -> list[str]:
    runs = [(word, len(list(same))) for word, same in groupby(words)]
    return [word if n == 1 else f"{word}*{n}" for word, n in runs]


def owner_of(unit: Unit, ranks_of: Sequence[Iterable[int]]) -> int:
    """Returns the rank that updates a parameter: that of its lowest stage; -1: none reads it."""
    homes = [(stage, rank) for stage in unit.readers for rank in ranks_of[stage]]
    return min(homes)[1] if homes else -1


def holders_of(unit: Unit, ranks_of: Sequence[Iterable[int]]) -> tuple[int, ...]:
    """Returns the ranks that keep a parameter, ascending."""
    return tuple(sorted({rank for stage in unit.readers for rank in ranks_of[stage]}))
