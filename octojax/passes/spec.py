"""Passes as text: `split,recompute(stages=0-3),transfers,reorder(window=64),join`."""

import re
from collections.abc import Callable, Sequence
from dataclasses import fields
from difflib import get_close_matches
from typing import Any

from octojax.passes.join_actions import JoinActions
from octojax.passes.merge_backward import MergeBackward
from octojax.passes.place_exchanges import PlaceExchanges
from octojax.passes.place_transfers import PlaceTransfers
from octojax.passes.recompute import Recompute
from octojax.passes.reorder_comm import ReorderComm
from octojax.passes.split_backward import SplitBackward

Pass = Callable[[Any], Any]

PASSES: dict[str, type] = {
    each.name: each
    for each in (
        SplitBackward,
        MergeBackward,
        Recompute,
        PlaceTransfers,
        ReorderComm,
        PlaceExchanges,
        JoinActions,
    )
}
"""Every pass by the name that a spec gives it."""

_ONE = re.compile(r"\s*([^,()]*?)\s*(?:\(([^()]*)\))?\s*(,|$)")


def parse_passes(passes: str | Pass | Sequence[Pass | str]) -> tuple[Pass, ...]:
    """Returns the passes of a spec, or of a sequence of specs, passes and own callables.

    Raises `ValueError` for an unknown pass or option (with a suggestion), or a broken spec.
    """
    if isinstance(passes, str):
        return tuple(_parsed(passes))
    if callable(passes):
        return (passes,)
    if not isinstance(passes, Sequence):
        raise TypeError(f"passes={passes!r}: expected text such as 'transfers,reorder', or a list")
    wrong = [x for x in passes if not (isinstance(x, str) or callable(x))]
    if wrong:
        raise TypeError(
            f"passes: {', '.join(map(repr, wrong))} is no pass: expected names such as 'reorder', "
            f"or callables that take a plan and return one"
        )
    return tuple(one for x in passes for one in (_parsed(x) if isinstance(x, str) else (x,)))


def name_of(each: Pass) -> str:
    """Returns what errors and dumps call a pass: its own name, else its function's or class's."""
    name = getattr(each, "name", None)
    if isinstance(name, str) and name:
        return name
    return getattr(each, "__name__", type(each).__name__)


def _parsed(text: str) -> list[Pass]:
    passes: list[Pass] = []
    at = 0
    while at < len(text):
        match = _ONE.match(text, at)
        if match is None or not match[1]:
            raise ValueError(
                f"cannot read {text!r} as passes, at {text[at:]!r}: expected names with options, "
                f"such as transfers,reorder(window=64)"
            )
        passes.append(_pass(match[1], match[2] or ""))
        at = match.end()
    return passes


def _pass(name: str, options: str) -> Pass:
    if name not in PASSES:
        raise ValueError(
            f"unknown pass {name!r}{_suggestion(name, PASSES)}; known are {', '.join(PASSES)}"
        )
    kind = PASSES[name]
    readers = {f.name: _READERS[f.name] for f in fields(kind) if f.name in _READERS}
    values: dict[str, Any] = {}
    for word in filter(None, map(str.strip, options.split(","))):
        key, equals, value = (part.strip() for part in word.partition("="))
        if not equals:
            raise ValueError(f"pass {name}: cannot read option {word!r}; expected key=value")
        key = key.replace("-", "_")
        if key not in readers:
            known = f"known are {', '.join(readers)}" if readers else "it has none"
            raise ValueError(
                f"pass {name} has no option {key!r}{_suggestion(key, readers)}; {known}"
            )
        try:
            values[key] = readers[key](value)
        except ValueError as error:
            raise ValueError(f"pass {name}: {key}={value!r}: {error}") from None
    return kind(**values)


def _suggestion(word: str, known: Any) -> str:
    close = get_close_matches(word, list(known), n=1, cutoff=0.5)
    return f"; did you mean {close[0]!r}?" if close else ""


def _whole(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise ValueError("expected a whole number >= 1")
    return int(text)


def _flag(text: str) -> bool:
    words = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}
    if text.lower() not in words:
        raise ValueError("expected true or false")
    return words[text.lower()]


def _mode(text: str) -> str:
    if text not in ("async", "blocking"):
        raise ValueError("expected async or blocking")
    return text


def _numbers(text: str) -> tuple[int, ...] | None:
    """`0-3`, `0+2`, `0-1+5`; `all` is None."""
    if text == "all":
        return None
    numbers: list[int] = []
    for word in text.split("+"):
        first, dash, last = word.partition("-")
        if not first.isdigit() or (dash and not last.isdigit()):
            raise ValueError("expected stages such as 0-3, 0+2 or all")
        numbers += range(int(first), int(last or first) + 1)
    return tuple(numbers)


_READERS: dict[str, Callable[[str], Any]] = {
    "stages": _numbers,
    "window": _whole,
    "mode": _mode,
    "only_adjacent": _flag,
    "drop_redundant": _flag,
    "overlap": _flag,
    "prepose": _flag,
}
"""How an option of any pass is read from text; those without stay for Python."""
