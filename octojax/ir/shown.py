"""What a prompt or notebook shows of a record: a short line, and a picture on demand."""

from collections.abc import Iterable
from typing import Any

_LONGEST = 40


def short(text: str, longest: int = _LONGEST) -> str:
    """Returns the text, cut with an ellipsis if it is longer than a line has room for."""
    return text if len(text) <= longest else f"{text[: longest - 3].rstrip()}..."


def line(kind: str, name: str, parts: Iterable[str]) -> str:
    """Returns `<Plan 'name': part, part>`, leaving out empty parts."""
    head = f"{kind} {short(name)!r}" if name else kind
    return f"<{head}: {', '.join(filter(None, parts))}>"


def count(number: int, what: str) -> str:
    """Returns `1 rank`, `4 ranks` or `2 microbatches`."""
    plural = "es" if what.endswith("ch") else "s"
    return f"{number:,} {what}{plural if number != 1 else ''}"


def duration(seconds: float) -> str:
    """Returns `2.5 s` or `31.2 ms`."""
    return f"{seconds:.4g} s" if seconds >= 1 else f"{seconds * 1e3:.4g} ms"


def picture(record: Any) -> str | None:
    """Returns the record's picture for a notebook (IPython's `_repr_html_`).

    Drawing lies above the records, and is loaded when a notebook asks for it.
    """
    from octojax.report.notebook import html

    return html(record)
