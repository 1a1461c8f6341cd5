"""A schedule table drawn as text with some of its cells marked."""

from collections.abc import Iterable, Sequence

Place = tuple[int, int]
"""`(rank, position)` of a cell."""

_WHOLE = 24  # rows up to which the whole table is drawn
_AROUND = 3  # rows shown before and after a mark in longer ones
_MOST_RANKS = 8  # columns, else the marked ranks and as many others as fit


def mark(rows: Sequence[Sequence[object]], places: Iterable[Place]) -> str:
    """Returns the table, ranks as columns and positions as rows, with `places` marked.

    `rows[r][i]` is what rank r has at position i. Long tables show the rows around the marks
    only, wide ones the marked ranks first.

                 rank 0   rank 1
            6    0F3      1F2
            7    0F4      3B0      <-- rank 1
    """
    marks = sorted(set(places), key=lambda place: place[::-1])
    ranks = _columns(len(rows), [rank for rank, _ in marks])
    length = max((len(rows[r]) for r in ranks), default=0)
    shown = _shown(length, [position for _, position in marks])
    cells = [[str(x) for x in rows[r]] for r in ranks]
    widths = [
        max([len(f"rank {r}")] + [len(column[i]) for i in shown if i < len(column)]) + 2
        for r, column in zip(ranks, cells, strict=True)
    ]
    head = "".join(f"rank {r}".ljust(w) for r, w in zip(ranks, widths, strict=True))
    lines = [" " * 8 + head.rstrip()]
    before = -1
    for i in shown:
        if i != before + 1:
            lines.append("     ...")
        before = i
        line = "".join(
            (column[i] if i < len(column) else "").ljust(w)
            for column, w in zip(cells, widths, strict=True)
        )
        here = [rank for rank, position in marks if position == i]
        note = f"  <-- rank {', '.join(map(str, here))}" if here else ""
        lines.append(f"{i:6d}  {line}{note}".rstrip())
    if before < length - 1:
        lines.append("     ...")
    return "\n".join(lines)


def _columns(num_ranks: int, marked: list[int]) -> list[int]:
    if num_ranks <= _MOST_RANKS:
        return list(range(num_ranks))
    first = list(dict.fromkeys(marked))[:_MOST_RANKS]
    rest = [r for r in range(num_ranks) if r not in first]
    return sorted(first + rest[: _MOST_RANKS - len(first)])


def _shown(length: int, marked: list[int]) -> list[int]:
    if length <= _WHOLE:
        return list(range(length))
    if not marked:
        return list(range(_WHOLE))
    near: set[int] = set()
    for position in marked:
        near.update(range(max(0, position - _AROUND), min(length, position + _AROUND + 1)))
        if len(near) >= 2 * _WHOLE:
            break
    return sorted(near)
