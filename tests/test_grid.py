"""The whole grid: schedules x models x ranks x microbatches, loss and every gradient.

Run with `pytest tests/test_grid.py -m grid`. Combinations that a schedule's own rule forbids
must be refused with a `ValueError`; the count of those that run is checked, so that the grid
cannot shrink unseen.
"""

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


def allowed(schedule: str, ranks: int, microbatches: int) -> bool:
    """Whether the schedule's published rule allows the sizes, and the model's layers suffice."""
    family = families()[schedule]
    options = SCHEDULES[schedule]
    try:
        table = family.generate(ranks, microbatches, options.get("chunks"))
    except ValueError:
        return False
    return table.num_stages <= 4


@pytest.mark.parametrize("microbatches", MICROBATCHES)
@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("model", MODELS)
def test_grid(model, schedule, ranks, microbatches):
    if not allowed(schedule, ranks, microbatches):
        pytest.skip("the schedule's own rule, or more stages than layers")
    if model in CARRIED and schedule in ("dualpipe", "chimera") and ranks > 1:
        with pytest.raises(PlanError, match="held by two ranks"):
            assert_exact(model, schedule, ranks, microbatches)
        return
    assert_exact(model, schedule, ranks, microbatches, **SCHEDULES[schedule])


@pytest.mark.parametrize("model", ["nnx-hybrid", "linen-transformer", "unet"])
def test_six_stages_on_two_ranks(model):
    assert_exact(model, FIG3, 2, 2)


def test_the_grid_is_large():
    ran = sum(
        allowed(s, p, m) for s in SCHEDULES for p in RANKS for m in MICROBATCHES for _ in MODELS
    )
    assert ran >= 400
    assert set(SCHEDULES) >= set(families()) - {"tessel"}
    assert all(case_of(model).layers >= 4 for model in MODELS)
