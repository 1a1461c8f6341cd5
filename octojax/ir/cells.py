"""From the cells of a table to instructions."""

import re

from octojax.errors import FormatError
from octojax.ir.action import Action, Item, Overlap, parse_item
from octojax.ir.instruction import Instruction, Receive, Rows, Run, Send, Update
from octojax.ir.lowering import Crossings, as_transfer
from octojax.ir.schedule import Schedule
from octojax.ir.transfer import Cargo, counterpart, parse_exchange, sends
from octojax.ir.wiring import Wiring

IDLE = "-"  # the line of a rank without work
_UPDATE = re.compile(r"UPDATE([0-9]{1,9})")


def busy_part(schedule: Schedule, wiring: Wiring) -> Schedule:
    """Returns the schedule without what has nothing to do by a wiring."""

    def busy(item: Item) -> bool:
        if isinstance(item, Overlap):
            return True
        if item.kind.transfers:
            send = item if sends(item) else counterpart(item)
            return wiring.carries(Cargo(send.kind.value[-1]), send.stage)
        return item.kind.computes and (item.stage, item.kind) not in wiring.idle

    return Schedule(tuple(tuple(filter(busy, row)) for row in schedule.ranks))


def instruction_of(item: Item, crossings: Crossings) -> Instruction:
    """Returns what one cell of a schedule does."""
    if isinstance(item, Action) and item.kind.transfers:
        transfer = as_transfer(item, crossings)
        return Send(transfer) if sends(item) else Receive(transfer)
    return Run(item.actions if isinstance(item, Overlap) else (item,))


def rows_of(rows: list[list[str]], name: str, wiring: Wiring | None) -> Rows:
    """Returns the instructions in rows of text. Raises `FormatError` naming row and cell."""
    read = [
        [_read(cell, name, row, at) for at, cell in enumerate(cells)]
        for row, cells in enumerate(rows)
    ]
    computing = Schedule(
        tuple(tuple(i for x in row if isinstance(x, Run) for i in x.items) for row in read)
    )
    crossings = Crossings.of(computing, wiring)
    return tuple(
        tuple(instruction_of(x, crossings) if isinstance(x, Action) else x for x in row)
        for row in read
    )


def _read(text: str, name: str, row: int, at: int) -> Instruction | Action:
    """One cell; sends and receives of PyTorch's tables stay actions until all rows are read."""
    try:
        exchange = parse_exchange(text.strip())
        if exchange is not None:
            return Send(exchange[1]) if exchange[0] else Receive(exchange[1])
        update = _UPDATE.fullmatch(text.strip())
        if update is not None:
            return Update(int(update[1]))
        items = tuple(parse_item(part) for part in text.split("+"))
    except FormatError as error:
        raise FormatError(f"{name}: row {row} (rank {row}), cell {at}: {error}") from None
    first = items[0]
    if len(items) == 1 and isinstance(first, Action) and first.kind.transfers:
        return first
    wrong = [str(x) for x in items if not isinstance(x, Action) or x.kind.transfers]
    if len(items) > 1 and wrong:
        raise FormatError(
            f"{name}: row {row} (rank {row}), cell {at}: {', '.join(wrong)} cannot be joined "
            f"with others; only actions that compute can"
        )
    return Run(tuple(a for x in items for a in (x.actions if isinstance(x, Overlap) else (x,))))
