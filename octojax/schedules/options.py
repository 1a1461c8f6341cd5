"""Readers of option values: from Python values or from command-line text, with one meaning."""

from collections.abc import Callable
from typing import Any

from octojax.errors import PlanError
from octojax.ir.placement import Placement


def whole(least: int = 1) -> Callable[[Any], int]:
    """Returns a reader of whole numbers >= `least`."""

    def read(value: Any) -> int:
        if isinstance(value, bool) or (isinstance(value, float) and not value.is_integer()):
            raise ValueError(f"expected a whole number >= {least}")
        try:
            number = int(value)
        except (TypeError, ValueError):
            raise ValueError(f"expected a whole number >= {least}") from None
        if number < least:
            raise ValueError(f"expected a whole number >= {least}")
        return number

    return read


def choice(*names: str) -> Callable[[Any], str]:
    """Returns a reader of one of `names`."""

    def read(value: Any) -> str:
        if value not in names:
            raise ValueError(f"expected {' or '.join(names)}")
        return value

    return read


def flag(value: Any) -> bool:
    """Returns a truth value: Python's, or true/false, yes/no, on/off, 1/0."""
    if isinstance(value, bool):
        return value
    words = {"true": True, "yes": True, "on": True, "1": True}
    words |= {"false": False, "no": False, "off": False, "0": False}
    try:
        return words[str(value).lower()]
    except KeyError:
        raise ValueError("expected true or false") from None


def seconds(value: Any) -> tuple[float, ...]:
    """Returns one cost (for every stage) or one per stage: `1`, `1,2,1,3` or a sequence."""
    if isinstance(value, str):
        parts: list[Any] = value.replace(" ", ",").split(",")
    elif isinstance(value, (int, float)):
        parts = [value]
    else:
        parts = list(value)
    try:
        costs = tuple(float(part) for part in parts if part != "")
    except (TypeError, ValueError):
        raise ValueError("expected a number, or one per stage such as 1,2,1,3") from None
    if not costs or not all(0 <= cost < float("inf") for cost in costs):
        raise ValueError("expected finite numbers >= 0")
    return costs


def amount(value: Any) -> float:
    """Returns one finite number >= 0."""
    (number,) = read if len(read := seconds(value)) == 1 else (-1.0,)
    if number < 0:
        raise ValueError("expected one number >= 0")
    return number


def limits(value: Any) -> tuple[int, ...]:
    """Returns one whole number >= 1 (for every rank) or one per rank: `4`, `4,3,3,2`."""
    numbers = seconds(value)
    if not all(number >= 1 and number.is_integer() for number in numbers):
        raise ValueError("expected whole numbers >= 1")
    return tuple(map(int, numbers))


def ranks_of_stages(value: Any) -> Placement:
    """Returns a placement: a `Placement`, a sequence of ranks, or text `0 1 1 0` / `0,1,1,0`."""
    if isinstance(value, Placement):
        return value
    if isinstance(value, str):
        return Placement.parse(value.replace(",", " "))
    try:
        return Placement.of([int(rank) for rank in value])
    except (TypeError, ValueError) as error:
        if isinstance(error, PlanError):
            raise
        raise ValueError(
            f"cannot read {value!r} as a placement: expected a rank per stage, such as (0, 1, 1, 0)"
        ) from None


def per_stage(costs: tuple[float, ...], stages: int, what: str) -> tuple[float, ...]:
    """Returns one cost per stage. Raises `ValueError` if there are neither one nor `stages`."""
    if len(costs) == 1:
        return costs * stages
    if len(costs) != stages:
        raise ValueError(
            f"{what}: expected one number or {stages} (one per stage), found {len(costs)}"
        )
    return costs


def per_rank(numbers: tuple[int, ...], ranks: int, what: str) -> tuple[int, ...]:
    """Returns one number per rank. Raises `ValueError` if there are neither one nor `ranks`."""
    if len(numbers) == 1:
        return numbers * ranks
    if len(numbers) != ranks:
        raise ValueError(
            f"{what}: expected one number or {ranks} (one per rank), found {len(numbers)}"
        )
    return numbers
