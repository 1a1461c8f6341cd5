"""One figure of ours beside the paper's: the record that every piece stores, and its CSV."""

import csv
import dataclasses
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

SPEEDUP = "speedup over 1F1B"
TGS = "tokens per GPU and second"
ROUNDING = 0.005
"""The paper prints speedups with two digits: half of the last one is no difference."""


@dataclass(frozen=True)
class Cell:
    """A figure of one method in one case.

    `paper` is the paper's figure as it prints it, "1.23-1.33" where it states a range and "" where
    it states none. `measurement` is one of exact, simulated, emulated, real. `ceiling` is what
    the best whole-layer balance would give without any fill or drain, `bound` what no plan can
    exceed, proven; both in the unit of `ours`. `aim` says how ours is judged by the paper's: more,
    less, equal, or none (nothing follows from the comparison). `search_s` is how long the tuner
    searched for the plan.
    """

    case: str
    method: str
    quantity: str
    measurement: str
    ours: float | None
    paper: str = ""
    ceiling: float | None = None
    bound: float | None = None
    aim: str = "none"
    makespan_ms: float | None = None
    search_s: float | None = None
    load_average: float | None = None
    note: str = ""

    @property
    def paper_most(self) -> float | None:
        """The paper's figure; the upper end of a range."""
        return float(self.paper.rpartition("-")[2].rstrip("%")) if self.paper else None

    @property
    def mark(self) -> str:
        """ "below" where ours falls short of the paper's though the ceiling allows as much,
        "ceiling" where it does not, "differs" where both should be equal, else "".
        """
        theirs = self.paper_most
        if theirs is None or self.ours is None or self.aim == "none":
            return ""
        if self.aim == "equal":
            return "" if self.ours == theirs else "differs"
        if self.aim == "less":
            return "below" if self.ours > theirs + ROUNDING else ""
        slack = ROUNDING if theirs < 10 else 0.5
        if self.ours >= theirs - slack:
            return ""
        limits = [limit for limit in (self.ceiling, self.bound) if limit is not None]
        return "ceiling" if min(limits, default=theirs) < theirs else "below"


FIELDS = tuple(field.name for field in dataclasses.fields(Cell))
_NUMBERS = frozenset({"ours", "ceiling", "bound", "makespan_ms", "search_s", "load_average"})


def rounded(value: float | None, digits: int = 5) -> float | None:
    """Returns the value with so many significant digits, as it is stored."""
    return None if value is None else float(f"{value:.{digits}g}")


def write_cells(path: Path, cells: Iterable[Cell]) -> None:
    """Writes the cells as CSV, a line each."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(FIELDS)
        for cell in cells:
            values = (getattr(cell, name) for name in FIELDS)
            writer.writerow(
                f"{v:.12g}" if isinstance(v, float) else "" if v is None else v for v in values
            )


def read_cells(path: Path) -> list[Cell]:
    """Returns the cells that `write_cells` stored, none if there is no such file.

    Raises `ValueError` for a file with other columns.
    """
    if not path.exists():
        return []
    with path.open(encoding="utf-8") as file:
        reader = csv.DictReader(file)
        if tuple(reader.fieldnames or ()) != FIELDS:
            raise ValueError(
                f"{path}: expected the columns {', '.join(FIELDS)}, found "
                f"{', '.join(reader.fieldnames or ())}. Run its piece again"
            )
        return [Cell(**{name: _value(name, row[name]) for name in FIELDS}) for row in reader]


def _value(name: str, text: str) -> object:
    if name not in _NUMBERS:
        return text
    return float(text) if text else None


def distinct(values: Iterable[str]) -> Sequence[str]:
    """Returns the values in the order of their first appearance."""
    return [*dict.fromkeys(values)]
