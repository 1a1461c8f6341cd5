"""Units, colours and axis marks."""

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octojax.report.panel import (
    DARK,
    LIGHT,
    filled,
    mixed,
    nbytes,
    readable,
    seconds,
    shaded,
    ticks,
)


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.0, "0 s"), (33.0, "33 s"), (0.0123456, "12.35 ms"), (5e-6, "5 us"), (2e-9, "2 ns")],
)
def test_times_have_fitting_units(value, text):
    assert seconds(value) == text


@pytest.mark.parametrize(
    ("value", "text"), [(0, "0 B"), (1536, "1.5 KiB"), (3 << 30, "3 GiB"), (1 << 50, "1024 TiB")]
)
def test_sizes_have_binary_units(value, text):
    assert nbytes(value) == text


@given(end_s=st.floats(1e-9, 1e6), most=st.integers(1, 30))
def test_marks_are_few_round_and_inside(end_s, most):
    marks = [time_s for time_s, _ in ticks(end_s, most)]
    assert marks[0] == 0.0
    assert 1 <= len(marks) <= most + 1
    assert marks[-1] <= end_s * (1 + 1e-6)
    assert len(marks) >= min(most, 2) // 2


def test_colours_mix():
    assert mixed("#000000", "#ffffff", 0.5) == "#808080"
    assert mixed("#102030", "#ffffff", 0.0) == "#102030"
    assert shaded("F", 0, LIGHT, "#ffffff") == LIGHT["F"]
    assert len({shaded("F", shade, LIGHT, "#ffffff") for shade in range(4)}) == 4


SIGHT = {
    "full": ((1.0, 0.0, 0.0), (0.0, 1.0, 0.0), (0.0, 0.0, 1.0)),
    "no red": (
        (0.152286, 1.052583, -0.204868),
        (0.114503, 0.786281, 0.099216),
        (-0.003882, -0.048116, 1.051998),
    ),
    "no green": (
        (0.367322, 0.860646, -0.227968),
        (0.280085, 0.672501, 0.047413),
        (-0.011820, 0.042940, 0.968881),
    ),
    "no blue": (
        (1.255528, -0.076749, -0.178779),
        (-0.078411, 0.930809, 0.147602),
        (0.004733, 0.691367, 0.303900),
    ),
}
"""Machado, Oliveira and Fernandes (2009), on linear RGB: what is seen without one kind of cones."""
XYZ = ((0.4339, 0.3762, 0.1899), (0.2126, 0.7152, 0.0722), (0.0177, 0.1095, 0.8727))
"""Of linear RGB, divided by those of white (D65)."""


def times(matrix, vector):
    return [min(max(sum(a * b for a, b in zip(row, vector, strict=True)), 0.0), 1.0)
            for row in matrix]  # fmt: skip


def xyz(colour: str, sight: str = "full") -> list[float]:
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
    return times(XYZ, times(SIGHT[sight], linear))


def lab(colour: str, sight: str) -> tuple[float, float, float]:
    x, y, z = (v ** (1 / 3) if v > 0.008856 else 7.787 * v + 16 / 116 for v in xyz(colour, sight))
    return 116 * y - 16, 500 * (x - y), 200 * (y - z)


@pytest.mark.parametrize("sight", SIGHT)
@pytest.mark.parametrize("palette", [LIGHT, DARK], ids=["light", "dark"])
def test_kinds_look_different_to_everyone(palette, sight):
    for one, other in itertools.combinations(palette.values(), 2):
        assert math.dist(lab(one, sight), lab(other, sight)) > 20


@pytest.mark.parametrize("palette", [LIGHT, DARK], ids=["light", "dark"])
def test_labels_can_be_read_on_every_bar(palette):
    for kind, shade, odd in itertools.product(palette, range(4), (False, True)):
        colour = filled(kind, shade, odd, palette, "#ffffff")
        low, high = sorted((xyz(colour)[1], xyz(readable(colour))[1]))
        assert (high + 0.05) / (low + 0.05) > 4.5
