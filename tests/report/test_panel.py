"""Units, colours and axis marks."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octojax.report.panel import LIGHT, mixed, nbytes, seconds, shaded, ticks


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
