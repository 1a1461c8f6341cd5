"""A schedule table drawn as text with some of its cells marked."""

from collections.abc import Iterable

from octojax.ir.schedule import Schedule

Place = tuple[int, int]
"""`(rank, position)` of a cell."""

_WHOLE = 24  # rows up to which the whole table is drawn
_AROUND = 3  # rows shown before and after a mark in longer ones
_MOST_RANKS = 8  # columns, else the marked ranks and as many others as fit


def mark(schedule: Schedule, places: Iterable[Place]) -> str:
    """Returns the table, ranks as columns and positions as rows, with `places` marked.

    Long tables show the rows around the marks only, wide ones the marked ranks first.

                 rank 0   rank 1
            6    0F3      1F2
            7    0F4      3B0      <-- rank 1
    """
    marks = sorted(set(places), key=lambda place: place[::-1])
    ranks = _columns(schedule.num_ranks, [rank for rank, _ in marks])
    length = max((len(schedule.ranks[r]) for r in ranks), default=0)
    rows = _rows(length, [position for _, position in marks])
    cells = [[str(x) for x in schedule.ranks[r]] for r in ranks]
    widths = [
        max([len(f"rank {r}")] + [len(column[i]) for i in rows if i < len(column)]) + 2
        for r, column in zip(ranks, cells, strict=True)
    ]
    head = "".join(f"rank {r}".ljust(w) for r, w in zip(ranks, widths, strict=True))
    lines = [" " * 8 + head.rstrip()]
    before = -1
    for i in rows:
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


def _rows(length: int, marked: list[int]) -> list[int]:
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
