"""Logits of the reference implementation, for every family (`tests/data/make_parity.py`)."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

safetensors = pytest.importorskip("safetensors")

from octojax.models.weights import config_from, load  # noqa: E402
from tests.pipelines import FAST  # noqa: E402

CASES = sorted((Path(__file__).parents[1] / "data" / "parity").glob("*.safetensors"))
TOLERANCE = 1e-4  # of the largest logit


def test_every_family_has_a_case():
    assert {path.stem for path in CASES} >= {
        *("llama-3", "llama-3.1", "gemma-2", "gemma-3", "jamba"),
        *("nemotron-h", "nemotron-h-experts", "deepseek-v3", "qwen3-next"),
    }


@pytest.mark.parametrize("case", CASES, ids=lambda path: path.stem)
def test_logits_are_those_of_the_reference(case):
    with safetensors.safe_open(case, "numpy") as file:
        config = config_from(json.loads(file.metadata()["config"]))
        tokens, expected = file.get_tensor("tokens"), file.get_tensor("logits")
    model = load(case, config, ignore=("tokens", "logits"))
    graph, state = nnx.split(model)
    call = jax.jit(lambda state, token_BT: nnx.merge(graph, state)(token_BT), compiler_options=FAST)
    logits = call(state, jnp.asarray(tokens))
    scale = np.max(np.abs(expected))
    np.testing.assert_allclose(logits / scale, expected / scale, rtol=0, atol=TOLERANCE)
    shifted = call(state, jnp.asarray((tokens + 1) % 24))
    assert np.max(np.abs(shifted - expected)) > 0.1 * scale  # the test would see a difference
