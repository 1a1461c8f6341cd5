"""What a named schedule is: its source, its rule, its options, and how it is laid out."""

import difflib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Literal

from octojax.ir.placement import Placement
from octojax.ir.schedule import Schedule

PlacementKind = Literal["sequential", "loop", "wave", "bidirectional", "given"]
MOST_CELLS = 2_000_000
"""Forward actions of the largest table: a mistyped number shall not fill the memory."""
SEARCH_SPAN = 4096
"""How far from the microbatch count asked for a valid one is looked for."""


@dataclass(frozen=True)
class Option:
    """One option of a schedule. `read` turns a Python value or command-line text into its value.

    `read` raises `ValueError` with what it expects; `default` is already a read value.
    """

    name: str
    default: Any
    help: str
    read: Callable[[Any], Any]


def _any_microbatches(ranks: int, microbatches: int, chunks: int, **options: Any) -> bool:
    return True


def _any_ranks(ranks: int) -> bool:
    return True


@dataclass(frozen=True)
class Family:
    """A published schedule under its name. `generate` checks the arguments and lays it out.

    `layout(ranks, microbatches, chunks, **options)` returns the table for arguments that
    `allows_ranks`, `chunk_range` and `allows` accept; `constraints` says the same in words.
    `chunks` are stages per rank: a bidirectional schedule has `ranks` stages, each on two.
    """

    name: str
    summary: str
    source: str
    layout: Callable[..., Schedule]
    constraints: str = "any number of microbatches"
    bubble: str = ""
    peak: str = ""
    chunks: int = 1
    chunk_range: tuple[int, int | None] = (1, 1)
    placement: PlacementKind = "sequential"
    splits_backward: bool = False
    options: tuple[Option, ...] = ()
    allows: Callable[..., bool] = field(default=_any_microbatches)
    allows_ranks: Callable[[int], bool] = field(default=_any_ranks)
    aliases: tuple[str, ...] = ()
    least_order: Callable[[int], int] = field(default=lambda ranks: 1)
    """Microbatches of the order that is cut down where fewer are asked for."""

    @property
    def bidirectional(self) -> bool:
        return self.placement == "bidirectional"

    @property
    def defaults(self) -> dict[str, Any]:
        return {option.name: option.default for option in self.options}

    def stages(self, ranks: int, chunks: int | None = None) -> int:
        """Returns the number of stages on `ranks` ranks (of a given placement: its default)."""
        return ranks if self.bidirectional else ranks * (chunks or self.chunks)

    def place(self, ranks: int, chunks: int | None = None) -> Placement:
        """Returns where this schedule holds its stages (of a given placement: its default)."""
        chunks = chunks or self.chunks
        if self.bidirectional:
            return Placement.bidirectional(ranks)
        if self.placement == "wave":
            return Placement.wave(ranks, max(1, chunks // 2))
        return Placement.loop(ranks, chunks)

    def generate(
        self, ranks: int, microbatches: int, chunks: int | None = None, **options: Any
    ) -> Schedule:
        """Returns the table. Raises `ValueError` naming the rule and the nearest valid m."""
        _positive(self.name, ranks=ranks, microbatches=microbatches)
        chunks = self._check_chunks(chunks)
        values = self._read_options(options)
        ordered = max(microbatches, self.least_order(ranks))
        cells = self.stages(ranks, chunks) * ordered
        if cells > MOST_CELLS:
            raise ValueError(
                f"{self.name}: {self.stages(ranks, chunks)} stages x {ordered} microbatches "
                f"are {cells} forward actions, more than the {MOST_CELLS} that a table may have"
                + (
                    f" (on {ranks} ranks the order of {ordered} microbatches is made first)"
                    if ordered > microbatches
                    else ""
                )
            )
        if not self.allows_ranks(ranks):
            near = _nearest(ranks, self.allows_ranks)
            raise ValueError(
                f"{self.name} cannot run on {ranks} ranks. Its rule: {self.constraints}. "
                f"{_offer('rank count', near)}"
            )
        if not self.allows(ranks, microbatches, chunks, **values):
            near = _nearest(microbatches, lambda m: self.allows(ranks, m, chunks, **values))
            shown = "".join(f", {k}={v}" for k, v in values.items() if v is not None)
            raise ValueError(
                f"{self.name} cannot run {microbatches} microbatches on {ranks} ranks "
                f"(p={ranks}, m={microbatches}, chunks={chunks}{shown}). "
                f"Its rule: {self.constraints}. {_offer('microbatch count', near)}"
            )
        return self.layout(ranks, microbatches, chunks, **values)

    def _check_chunks(self, chunks: int | None) -> int:
        if chunks is None:
            return self.chunks
        _positive(self.name, chunks=chunks)
        least, most = self.chunk_range
        if chunks < least or (most is not None and chunks > most):
            expected = f"{least}" if least == most else f"at least {least}"
            if most is not None and most != least:
                expected = f"{least} to {most}"
            raise ValueError(
                f"{self.name} takes {expected} chunks per rank, asked for {chunks}. "
                f"Its rule: {self.constraints}"
            )
        return chunks

    def _read_options(self, asked: dict[str, Any]) -> dict[str, Any]:
        known = {option.name: option for option in self.options}
        unknown = [name for name in asked if name not in known]
        if unknown:
            raise ValueError(
                f"{self.name} has no option {', '.join(map(repr, unknown))}"
                f"{suggestion(unknown[0], known)}. "
                f"Its options: {', '.join(known) if known else 'none'}"
            )
        values = self.defaults
        for name, value in asked.items():
            try:
                values[name] = known[name].read(value)
            except (ValueError, TypeError) as error:
                raise ValueError(
                    f"{self.name}: option {name}={value!r}: {error} ({known[name].help})"
                ) from None
        return values


def suggestion(name: str, known: Iterable[str]) -> str:
    """Returns `; did you mean 'x'` for the nearest known name, or nothing."""
    near = difflib.get_close_matches(name, list(known), n=1, cutoff=0.4)
    return f"; did you mean {near[0]!r}" if near else ""


def _positive(name: str, **numbers: int) -> None:
    for what, value in numbers.items():
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ValueError(f"{name}: {what} must be a whole number >= 1, found {value!r}")


def _nearest(asked: int, allowed: Callable[[int], bool]) -> list[int]:
    """Returns the nearest allowed number below and above what was asked, nearest first."""
    below = next((n for n in range(asked - 1, 0, -1) if allowed(n)), None)
    above = next((n for n in range(asked + 1, asked + SEARCH_SPAN) if allowed(n)), None)
    sizes = [n for n in (below, above) if n is not None]
    return sorted(sizes, key=lambda n: (abs(n - asked), n))


def _offer(what: str, near: list[int]) -> str:
    if not near:
        return f"No {what} is valid with these arguments"
    return f"The nearest valid {what} is {near[0]}" + (f" (or {near[1]})" if near[1:] else "")
