"""docs/results/paper.md, written from the stored CSVs alone."""

from collections.abc import Iterable, Sequence
from pathlib import Path

from paper_pieces.cells import Cell, distinct, read_cells
from paper_pieces.piece import Piece

HEAD = """# The paper, table by table

What the OctoPipe paper reports in its section VIII, and in Figures 2 and 3, beside what this
project gets. `python experiments/paper.py all` runs everything (within 45 minutes on two free
cores), `python experiments/paper.py table4 fig8` some of it; this page is written from the CSVs
in `docs/results/paper/` (`python experiments/paper.py page`).

How a figure was had stands in each table. *exact*: counted or computed, the same on every
machine. *simulated*: the simulator on the profiles in `experiments/profiles/`. *emulated*: the
executor, its processes and its transfers in real time, every action a sleep of its profiled
time. *real*: computation on two cores.

A cell reads **ours / the paper's**. The base of every speedup is 1F1B on uniform stages with W
right after I. *ceiling* is what the best balance of whole layers that we find would give
without any fill or drain, *bound* is what no plan can exceed, proven
([derivation](../lower_bound.md)); both hold for every method in the row. **▼** marks a cell of
ours that is below the paper's although ceiling and bound allow as much, **(c)** one where
ceiling or bound themselves are below the paper's, **≠** counts that should be equal and are
not. At a baseline it says that our model of that system is slower than what the paper measured.
*search* is how long the tuner searched, *load* the machine's load average over one minute when
a row was stored (a search keeps two cores busy: about 2).

Absolute times of H800 GPUs cannot be had from public facts: the calibrated profiles scale an
analytic model by six constants fitted to the paper's TABLE IV and Fig. 10, so agreement there
is no evidence; everything else was fitted to nothing.

"""
MARKS = {"": "", "below": " ▼", "ceiling": " (c)", "differs": " ≠"}


def page(pieces: Iterable[Piece], folder: Path) -> str:
    """Returns the page of all pieces that have stored cells in `folder`, and names the others."""
    sections, missing = [HEAD], []
    for piece in pieces:
        cells = read_cells(folder / f"{piece.name}.csv")
        if cells:
            sections.append(section(piece, cells, (folder / f"{piece.name}.svg").exists()))
        else:
            missing.append(f"`{piece.name}`")
    if missing:
        sections.append(f"Not run yet: {', '.join(missing)}.\n")
    return "\n".join(sections)


def section(piece: Piece, cells: Sequence[Cell], picture: bool) -> str:
    """Returns one piece's heading, text, tables and picture."""
    parts = [f"## {piece.title}", f"`python experiments/paper.py {piece.name}`"]
    if piece.text:
        parts.append(piece.text.strip())
    if piece.across == "method":
        for quantity in distinct(c.quantity for c in cells):
            chosen = [c for c in cells if c.quantity == quantity]
            parts.append(f"{quantity[0].upper()}{quantity[1:]}:")
            parts.append(table(chosen, "case", "method"))
    else:
        for case in distinct(c.case for c in cells):
            parts.append(f"{case}:")
            parts.append(table([c for c in cells if c.case == case], "method", "quantity"))
    notes = distinct(f"- {c.case}, {c.method}: {c.note}" for c in cells if c.note)
    if notes:
        parts.append("\n".join(notes))
    if picture:
        parts.append(f"![{piece.title}](paper/{piece.name}.svg)")
    return "\n\n".join(parts) + "\n"


def table(cells: Sequence[Cell], down: str, across: str) -> str:
    """Returns a Markdown table: a row for every value of `down`, a column for every one of
    `across`, and what holds for the whole row.
    """
    columns = distinct(getattr(c, across) for c in cells)
    rows = distinct(getattr(c, down) for c in cells)
    shared = [name for name in ("ceiling", "bound") if any(getattr(c, name) for c in cells)]
    searched = ["search, s"] if any(c.search_s for c in cells) else []
    head = [down if down == "method" else "", *columns, *shared, "measurement", *searched, "load"]
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for row in rows:
        own = {getattr(c, across): c for c in cells if getattr(c, down) == row}
        texts = [row, *(shown(own[c]) if c in own else "" for c in columns)]
        for name in shared:
            values = distinct(number(v) for c in own.values() if (v := getattr(c, name)))
            texts.append(", ".join(values))
        texts.append(", ".join(distinct(c.measurement for c in own.values())))
        if searched:
            longest = max((c.search_s for c in own.values() if c.search_s is not None), default=0)
            texts.append(number(longest))
        loads = [c.load_average for c in own.values() if c.load_average is not None]
        texts.append(f"{max(loads):g}" if loads else "")
        lines.append("| " + " | ".join(texts) + " |")
    return "\n".join(lines)


def shown(cell: Cell) -> str:
    """Returns a cell's text: ours, the paper's where it states one, and the mark."""
    ours = "none" if cell.ours is None else number(cell.ours)
    theirs = f" / {cell.paper}" if cell.paper else ""
    return f"{ours}{theirs}{MARKS[cell.mark]}"


def number(value: float) -> str:
    """Returns the value as a table shows it: whole from 100 on, else with up to three decimals."""
    if value == round(value):
        return f"{value:,.0f}"
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3f}".rstrip("0").rstrip(".")
