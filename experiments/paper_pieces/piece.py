"""What a table or figure of the paper is here: how it is run, shown and drawn."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from paper_pieces.cells import Cell
from paper_pieces.study import Settings, Study

Run = Callable[[Study], list[Cell]]
Draw = Callable[[Sequence[Cell], Path], None]


@dataclass(frozen=True)
class Piece:
    """A table or figure: `table4` or `fig8`.

    `text` says on the page what was done and what cannot be had from public facts. `across` is
    the field of a cell that names the columns of its table ("method" or "quantity"). `draw(cells,
    path)` writes its picture; what it draws beside the cells lies in files next to it, written
    by `run`.
    """

    name: str
    title: str
    text: str
    run: Run
    estimate_s: Callable[[Settings], float]
    across: str = "method"
    draw: Draw | None = None


def searches(settings: Settings, sizes: str, times: float = 1.0) -> float:
    """Returns the seconds that a search on every size takes, with its baselines."""
    return times * sum(settings.search_s(size) + BASELINES_S[size] for size in sizes)


BASELINES_S = {"s": 2.0, "m": 6.0, "l": 15.0}
"""How long the baselines of a configuration take, mostly Tessel's repetend."""
