"""Pictures of cells: bars of ours beside the paper's, under the ceiling."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from paper_pieces.cells import Cell, distinct

OURS, PAPER, CEILING = "#3b6fb6", "#c9c9c9", "#b03a2e"


def drawn(path: Path, size: tuple[float, float], draw: Callable[[Any], None]) -> None:
    """Writes the SVG that `draw(axes)` fills; the same figures give the same file.

    Raises `ModuleNotFoundError` naming the extra where matplotlib is missing.
    """
    try:
        import matplotlib
    except ModuleNotFoundError:
        raise ModuleNotFoundError(
            "pictures need matplotlib: pip install 'octojax[pictures]'"
        ) from None
    matplotlib.use("svg")
    import matplotlib.pyplot as plt

    with matplotlib.rc_context({"svg.hashsalt": path.stem, "font.size": 8}):
        figure, axes = plt.subplots(figsize=size, layout="constrained")
        draw(axes)
        figure.savefig(path, metadata={"Date": None})
        plt.close(figure)


def bars(title: str, quantity: str, *, size: tuple[float, float] = (9, 3.4)):
    """Returns a `draw(cells, path)`: a group of bars for every case, a pair for every method (ours,
    and the paper's where it states one), a line for the ceiling.
    """

    def draw(cells: Sequence[Cell], path: Path) -> None:
        chosen = [c for c in cells if c.quantity == quantity and c.ours is not None]
        drawn(path, size, lambda axes: _bars(axes, chosen, title, quantity))

    return draw


def _bars(axes: Any, cells: Sequence[Cell], title: str, quantity: str) -> None:
    cases, methods = distinct(c.case for c in cells), distinct(c.method for c in cells)
    alone = len(cases) == 1  # then the methods stand below their bars
    width = 0.8 / max(1, len(methods))
    named: set[str] = set()

    def label(name: str) -> str:
        fresh = name not in named
        named.add(name)
        return name if fresh else "_"

    def place(cell: Cell) -> float:
        return cases.index(cell.case) + (methods.index(cell.method) + 0.5) * width - 0.4

    for cell in cells:
        at, number = place(cell), methods.index(cell.method) + 1
        shade = 1.0 if alone else 0.35 + 0.65 * number / len(methods)
        name = "ours" if alone else cell.method
        axes.bar(at, cell.ours, 0.9 * width, color=OURS, alpha=shade, label=label(name))
        if cell.paper_most is not None:
            ends = [at - 0.4 * width, at + 0.4 * width]
            axes.plot(ends, [cell.paper_most] * 2, color="black", lw=1.6, label=label("paper"))
    for number, case in enumerate(cases):
        tops = [c.ceiling for c in cells if c.case == case and c.ceiling is not None]
        if tops:
            ends = [number - 0.42, number + 0.42]
            axes.plot(ends, [max(tops)] * 2, color=CEILING, lw=1, ls="--", label=label("ceiling"))
    if alone:
        axes.set_xticks([place(c) for c in cells], [c.method.replace(" ", "\n") for c in cells])
    else:
        axes.set_xticks(range(len(cases)), [c.replace(", ", ",\n") for c in cases])
    axes.set(ylabel=quantity, title=title)
    axes.legend(fontsize=7, ncols=len(named), loc="upper center", bbox_to_anchor=(0.5, -0.2))
