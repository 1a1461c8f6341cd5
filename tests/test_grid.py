"""The grid: schedules x models x ranks x microbatches, loss and every gradient.

Run with `pytest tests/test_grid.py -m grid`. Every two values of two of the four that a schedule's
rule allows together are run together in some case: what fails does so because of one or two
of them. `OCTOPIPE_GRID=all` runs the whole product.
"""

import os
from functools import cache
from itertools import combinations, product

import jax
import pytest

from octojax.errors import PlanError
from octojax.schedules.registry import families
from tests.pipelines import FIG3, assert_exact, case_of

pytestmark = [pytest.mark.grid, pytest.mark.timeout(900)]

SCHEDULES = {
    "gpipe": {},
    "1f1b": {},
    "1f1b-overlap": {},
    "interleaved": {"chunks": 2},
    "looped-bfs": {"chunks": 2},
    "zb-h1": {},
    "zb-h2": {},
    "zb-auto": {},
    "zb-greedy": {},
    "zb-v": {},
    "v-half": {},
    "v-min": {},
    "1f1b-v": {},
    "dualpipe": {},
    "dualpipe-v": {},
    "hanayo": {},
    "chimera": {},
    "dynapipe": {},
}
MODELS = (
    "nnx-hybrid",
    "linen-transformer",
    "tied-lm",
    "moe",
    "masked",
    "unet",
    "dropout-key",
    "scan",
    "nnx-scan-stats",
    "fp8-like",
)
CARRIED = ("nnx-scan-stats",)
"""Models whose state is carried from microbatch to microbatch: one rank must see them all."""
RANKS = (1, 2, 4)
MICROBATCHES = (1, 3, 8)


@pytest.fixture(autouse=True, scope="module")
def cache_of_compiled_programs(tmp_path_factory):
    """Equal programs recur all over the grid: compile each once."""
    settings = {
        "jax_compilation_cache_dir": str(tmp_path_factory.mktemp("xla")),
        "jax_persistent_cache_min_compile_time_secs": 0,
        "jax_persistent_cache_min_entry_size_bytes": -1,
    }
    before = {name: getattr(jax.config, name) for name in settings}
    for name, value in settings.items():
        jax.config.update(name, value)
    yield
    for name, value in before.items():
        jax.config.update(name, value)


@cache
def allowed(schedule: str, ranks: int, microbatches: int) -> bool:
    """Whether the schedule's published rule allows the sizes, and the model's layers suffice."""
    family = families()[schedule]
    options = SCHEDULES[schedule]
    try:
        table = family.generate(ranks, microbatches, options.get("chunks"))
    except ValueError:
        return False
    return table.num_stages <= 4


def pairs(case: tuple) -> set:
    """Every two values of a case, with their places."""
    return set(combinations(enumerate(case), 2))


def cases() -> list[tuple]:
    """Cases (model, schedule, ranks, microbatches) that hold every pair which a case can hold.

    Greedy, in a fixed order: the case with the most pairs that no case before it holds.
    """
    every = [c for c in product(MODELS, SCHEDULES, RANKS, MICROBATCHES) if allowed(*c[1:])]
    if os.environ.get("OCTOPIPE_GRID") == "all":
        return every
    left = {case: pairs(case) for case in every}
    missing = set().union(*left.values())
    chosen = []
    while missing:
        best = max(left, key=lambda case: len(left[case] & missing))
        missing -= left.pop(best)
        chosen.append(best)
    return chosen


@pytest.mark.parametrize(("model", "schedule", "ranks", "microbatches"), cases(), ids=str)
def test_grid(model, schedule, ranks, microbatches):
    if model in CARRIED and schedule in ("dualpipe", "chimera") and ranks > 1:
        with pytest.raises(PlanError, match="held by two ranks"):
            assert_exact(model, schedule, ranks, microbatches)
        return
    assert_exact(model, schedule, ranks, microbatches, **SCHEDULES[schedule])


@pytest.mark.parametrize("model", ["nnx-hybrid", "linen-transformer", "unet"])
def test_six_stages_on_two_ranks(model):
    assert_exact(model, FIG3, 2, 2)


def test_the_grid_holds_every_pair():
    chosen = cases()
    assert {(m, s) for m, s, _, _ in chosen} == set(product(MODELS, SCHEDULES))
    possible = [c for c in product(SCHEDULES, RANKS, MICROBATCHES) if allowed(*c)]
    assert {c[1:3] for c in chosen} == {c[:2] for c in possible}
    assert {c[2:] for c in chosen} == {c[1:] for c in possible}
    assert set(SCHEDULES) >= set(families()) - {"tessel"}
    assert all(case_of(model).layers >= 4 for model in MODELS)
