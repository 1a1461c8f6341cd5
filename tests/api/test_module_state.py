"""Module state after a step, and gradients that rules put in: those of the plain model."""

import jax
import numpy as np
import pytest

from octojax.api.reference import reference
from tests.pipelines import assert_exact, case_of, compiled, relative_error, whole_batch


@pytest.mark.parametrize("name", ["nnx-scan-stats", "linen-scan-stats", "scan-stats-set"])
def test_statistics_of_a_stack_move_as_in_the_plain_model(name):
    """Each layer's rows of a stacked leaf lie with the layer, and come back as one leaf."""
    case = case_of(name)
    pure, batch = case.pure(), case.batch(8)
    step = compiled(case, "1f1b", 2, 2, recompute=True)
    state = step.init()
    whole = whole_batch(pure, batch, 2)
    _, aux, grads, wanted = reference(whole, pure.params, pure.state, batch)
    assert relative_error(step.value_and_grad(state, batch)[2], grads) < 1e-5
    state, metrics = step(state, batch)
    found = step.module_state(state)
    assert jax.tree.structure(found) == jax.tree.structure(wanted)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(*map(jax.tree.leaves, (metrics.get("aux"), aux)), rtol=1e-5)
    again = step.init(step.params(state), found)
    assert jax.tree.leaves(step.module_state(again))[0].shape == jax.tree.leaves(found)[0].shape


def test_gradients_of_no_cotangent_add_up_over_microbatches():
    assert_exact("fp8-like", "zb-h1", 2, 2)
