"""The fields of a machine's TOML file, and everything that is wrong with one."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

from octojax.errors import FormatError


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_share(value: Any) -> bool:
    return _is_number(value) and 0 < value <= 1


@dataclass(frozen=True)
class Form:
    """What a field must be, in words, and whether a value is that."""

    words: str
    holds: Callable[[Any], bool]
    required: bool = False


_TEXT = Form("text", lambda v: isinstance(v, str), required=True)
_SIZE = Form("a number > 0", lambda v: _is_number(v) and v > 0)
_NEEDED = Form(_SIZE.words, _SIZE.holds, required=True)
_AMOUNT = Form("a number >= 0", lambda v: _is_number(v) and v >= 0)
_FLAG = Form("true or false", lambda v: isinstance(v, bool))
_COUNT = Form(
    "a whole number >= 1", lambda v: isinstance(v, int) and not isinstance(v, bool) and v >= 1
)
_SHARE = Form("a share, more than 0 and at most 1", _is_share)
_NUMBERS = Form("a list of numbers > 0", lambda v: isinstance(v, list) and all(map(_SIZE.holds, v)))

TABLES: dict[str, dict[str, Form]] = {
    "": {
        "name": _TEXT,
        "capacity_bytes": _NEEDED,
        "latency_s": Form(_AMOUNT.words, _AMOUNT.holds, required=True),
        "bandwidth_bytes_per_s": _NEEDED,
        "devices_per_node": _COUNT,
        "inter_latency_s": _AMOUNT,
        "inter_bandwidth_bytes_per_s": _SIZE,
        "host_cost_s": _AMOUNT,
        "blocking": _FLAG,
        "overlap_discount": Form("a number >= 0 and < 1", lambda v: _is_number(v) and 0 <= v < 1),
        "replicas": _COUNT,
        "zero": Form("0, 1 or 3", lambda v: (_COUNT.holds(v) and v in (1, 3)) or v == 0),
        "expert_parallel": _FLAG,
        "update_bytes_per_s": _SIZE,
        "speeds": _NUMBERS,
        "capacities_bytes": _NUMBERS,
    },
    "device": {
        "flops_per_s": _NEEDED,
        "bandwidth_bytes_per_s": _NEEDED,
        "float32_flops_per_s": _SIZE,
        "launch_s": _AMOUNT,
        "optimizer_slots": Form("a whole number >= 0", lambda v: v == 0 or _COUNT.holds(v)),
    },
    "achieved": {
        "contraction": _SHARE,
        "attention": _SHARE,
        "recurrence": _SHARE,
        "memory": _SHARE,
        "links": _SHARE,
    },
}
"""Fields by table; `""` is the top of the file."""


def check(data: Mapping[str, Any], where: str) -> None:
    """Returns nothing if a parsed file has every field that it must, and no other.

    Raises `FormatError` listing all that are unknown, missing or of the wrong form.
    """
    wrong: list[str] = []
    for table, forms in TABLES.items():
        part = data.get(table, {}) if table else {k: v for k, v in data.items() if k not in TABLES}
        if not isinstance(part, Mapping):
            wrong.append(f"{table} = {part!r}, expected a table [{table}]")
            continue
        prefix = f"{table}." if table else ""
        for name, value in part.items():
            if name not in forms:
                wrong.append(f"unknown {prefix}{name}{_near(name, table)}")
            elif not forms[name].holds(value):
                wrong.append(f"{prefix}{name} = {value!r}, expected {forms[name].words}")
        wrong += [
            f"missing {prefix}{name}, {form.words}"
            for name, form in forms.items()
            if form.required and name not in part
        ]
    if wrong:
        known = "; ".join(f"{f'[{t}] ' if t else ''}{', '.join(f)}" for t, f in TABLES.items())
        raise FormatError("\n  ".join([f"{where}:", *wrong, f"fields are {known}"]))


def _near(name: str, table: str) -> str:
    homes = [f"[{t}]" if t else "the top" for t, forms in TABLES.items() if name in forms]
    if homes:
        return f" (it belongs to {homes[0]})"
    own = get_close_matches(name, TABLES[table], 1, 0.5)
    return f" (did you mean {own[0]}?)" if own else ""
