"""The account of a step on two cores: its parts add up."""

import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

from gap import Work, time_parts

SECONDS = st.floats(0.0, 10.0)


@given(st.lists(SECONDS, min_size=8, max_size=8))
def test_causes_add_up_to_the_extra_work(values: list[float]) -> None:
    work = Work(*values)
    assert sum(work.causes().values()) == pytest.approx(work.extra_s, abs=1e-9)
    assert work.extra_s == pytest.approx(work.step_s - work.plain_s)


@given(SECONDS, SECONDS, st.lists(SECONDS, min_size=1, max_size=4), SECONDS)
def test_parts_add_up_to_the_step(
    step_s: float, plain_s: float, by_rank_s: list[float], fill_s: float
) -> None:
    parts = time_parts(step_s, plain_s, by_rank_s, {"fill and drain": fill_s})
    assert sum(parts.values()) == pytest.approx(step_s, abs=1e-9)
    assert parts["imbalance"] >= -1e-9


def test_the_issues_figures() -> None:
    """373 ms with 3 % bubbles; both ranks worked 724 ms where the plain step takes 612."""
    parts = time_parts(0.373, 0.612, (0.362, 0.362), {"bubbles": 0.011})
    assert parts["plain step's work, evenly spread"] == pytest.approx(0.306)
    assert parts["extra work, evenly spread"] == pytest.approx(0.056)
    assert parts["imbalance"] == pytest.approx(0.0)
    assert parts["the rest (other work on the cores)"] == pytest.approx(0.0)


def test_each_cause_is_the_difference_that_names_it() -> None:
    causes = Work(
        step_s=100.0,
        gradients_s=93.0,
        together_s=88.0,
        apart_s=84.0,
        split_s=3.0,
        transfers_s=2.0,
        plain_s=85.0,
        plain_update_s=5.0,
    ).causes()
    assert list(causes.values()) == [1.0, 3.0, 4.0, 2.0, 3.0, 2.0]
