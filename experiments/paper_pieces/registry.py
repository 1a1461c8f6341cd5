"""Every table and figure by name, and which of them a user asked for."""

import difflib
from collections.abc import Sequence

from paper_pieces import (
    fig2,
    fig3,
    fig8,
    fig9,
    fig10,
    fig11,
    scaling,
    search,
    table2,
    table3,
    table4,
    table8,
)
from paper_pieces.piece import Piece

PIECES: dict[str, Piece] = {
    piece.name: piece
    for piece in (
        table2.PIECE,
        fig2.PIECE,
        fig3.PIECE,
        fig8.PIECE,
        table3.PIECE,
        fig9.PIECE,
        table4.PIECE,
        fig10.PIECE,
        fig11.PIECE,
        search.TABLE5,
        search.FIG12,
        scaling.TABLE6,
        scaling.TABLE7,
        table8.PIECE,
    )
}
"""In the order in which the page shows them, that of the paper."""


def chosen(names: Sequence[str]) -> list[Piece]:
    """Returns the pieces of these names, each once, in the page's order; `all` is all of them.

    Raises `ValueError` listing every unknown name, with the nearest known one.
    """
    unknown = [name for name in names if name not in PIECES and name != "all"]
    if unknown:
        known = [*PIECES, "all"]
        hints = []
        for name in unknown:
            near = difflib.get_close_matches(name.lower(), known, 1)
            hints.append(f"{name!r}" + (f" (did you mean {near[0]!r}?)" if near else ""))
        raise ValueError(
            f"unknown table or figure {', '.join(hints)}; choose of {', '.join(known)}"
        )
    return [piece for name, piece in PIECES.items() if name in names or "all" in names]
