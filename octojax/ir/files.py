"""Reading text and JSON files, with errors that name the file."""

import csv
import io
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from octojax.errors import FormatError


def read_text(path: str | Path) -> str:
    """Returns the text of a UTF-8 file, without the byte order mark that spreadsheets write.

    Raises `FormatError` for bytes that are no text, `OSError` for what cannot be opened.
    """
    try:
        return Path(path).read_text(encoding="utf-8-sig")
    except UnicodeDecodeError:
        raise FormatError(
            f"{path} is not UTF-8 text; expected a CSV table or a JSON file"
        ) from None


def csv_text(rows: Iterable[Iterable[object]]) -> str:
    """Returns a CSV table, one line per row and no padding."""
    out = io.StringIO()
    csv.writer(out, lineterminator="\n").writerows([map(str, row) for row in rows])
    return out.getvalue()


def csv_cells(text: str, name: str) -> list[list[str]]:
    """Returns the cells of a CSV table, row by row; empty ones too. Raises `FormatError` naming the
    source for what is none.
    """
    try:
        return list(csv.reader(io.StringIO(text), strict=True))
    except csv.Error as error:
        raise FormatError(f"{name}: not a CSV table: {error}") from None


def read_json(path: str | Path) -> Any:
    """Returns what a JSON file holds. Raises `FormatError` for anything else."""
    text = read_text(path)
    try:
        return json.loads(text)
    except RecursionError:
        raise FormatError(f"{path}: not JSON that we can read: nested too deeply") from None
    except ValueError as error:  # broken JSON, or a number of thousands of digits
        if not text.strip():
            raise FormatError(f"{path} is empty; expected a JSON file") from None
        if getattr(error, "pos", 0) >= len(text.rstrip()) or "Unterminated" in str(error):
            raise FormatError(
                f"{path} ends in the middle (line {text.count(chr(10)) + 1}): writing or copying "
                f"it was cut short; make it again"
            ) from None
        raise FormatError(f"{path}: not JSON: {error}") from None


def other_version(name: str, kind: str, version: Any, newest: int) -> str:
    """Returns what to say of a file in a version that this octojax does not read."""
    if type(version) is int and version > newest:
        return (
            f"{name}: {kind} of version {version}, written by a newer octojax; this one reads "
            f"version {newest}: upgrade it with `python -m pip install --upgrade octojax`"
        )
    return f"{name}: {kind} version {version!r}, this octojax reads {newest}"
