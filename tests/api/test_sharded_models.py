"""Models of the zoo and a linen transformer, spread over meshes: as the plain model, to 1e-5."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from jax.sharding import PartitionSpec as P

from octojax.models.sharding import partition_specs
from tests.api.sharded_models import assert_exact

MESHES = ("2x1x2", "2x2x1", "2x2x2", "4x1x2")
SCHEDULES = ("1f1b", "zb-h1", "interleaved", "tuned")
MODELS = ("nemotron", "jamba", "llama", "linen")
LEVELS = ("0", "1", "3", "0")


def test_a_linen_transformer_with_logical_rules():
    report = assert_exact("linen-small", (2, 1, 2), "1f1b")
    assert {c.axes for p in report.collectives for c in p.collectives} == {("tensor",)}


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("model", MODELS)
def test_every_mesh_and_schedule_with_every_model(model):
    """Each pair of a mesh and a schedule, a mesh and a model, a schedule and a model."""
    at = MODELS.index(model)
    cases = [
        word
        for k, mesh in enumerate(MESHES)
        for word in (mesh, SCHEDULES[(k + at) % 4], LEVELS[(k + 2 * at) % 4])
    ]
    eight = {"XLA_FLAGS": "--xla_force_host_platform_device_count=8", "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.api.sharded_models", model, *cases],
        cwd=Path(__file__).parents[2],
        env={**os.environ, **eight},
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("exact") == len(MESHES)


@pytest.mark.parametrize(
    ("path", "shape", "spec"),
    [
        ("layers.0.mixer.into.weight", (16, 40), P(None, "tensor")),
        ("layers.0.mixer.out.weight", (16, 16), P("tensor", None)),
        ("layers.0.feed_forward.up_EDF", (4, 16, 32), P("expert", None, "tensor")),
        ("layers.0.feed_forward.router.weight", (16, 4), None),
        ("embedding.table", (32, 16), P("tensor", None)),
        ("layers.0.norm.scale", (16,), None),
        ("layers.0.mixer.conv_bias", (31,), P(None)),
    ],
)
def test_specs_by_path(path, shape, spec):
    found = partition_specs(expert="expert", sizes={"tensor": 2, "expert": 2})(path, shape)
    assert found == spec
