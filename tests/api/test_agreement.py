"""What of an optimizer the processes compare; that they do is in `tests/processes`."""

import jax.numpy as jnp
import optax
import pytest

from octojax.api.agreement import optimizer_facts
from octojax.update import build_update

PARAMS = {"a": jnp.ones((3, 3)), "b": jnp.ones(3)}


def facts(optimizer):
    return optimizer_facts(
        build_update(optimizer, PARAMS, [0, 1], 2, extra={"value": jnp.ones(())})
    )


def warm(peak):
    return optax.warmup_cosine_decay_schedule(0.0, peak, 10, 100)


PAIRS = [
    (lambda x: optax.sgd(x), 0.1, 0.2),
    (lambda x: optax.adam(1e-3, b1=x), 0.9, 0.8),
    (lambda x: optax.adamw(warm(x)), 1e-3, 2e-3),
    (lambda x: optax.chain(optax.clip_by_global_norm(x), optax.sgd(0.1)), 1.0, 2.0),
    (lambda x: optax.inject_hyperparams(optax.adam)(learning_rate=x), 1e-3, 2e-3),
    (lambda x: optax.masked(optax.sgd(0.1), {"a": x, "b": True}), True, False),
    (lambda x: optax.MultiSteps(optax.adam(1e-3), x), 2, 3),
]


@pytest.mark.parametrize(("make", "one", "other"), PAIRS)
def test_another_setting_is_another_fact(make, one, other):
    assert facts(make(one)) == facts(make(one))
    assert facts(make(one)) != facts(make(other))


def test_the_numbers_are_legible():
    assert "0.015625" in facts(optax.sgd(0.015625))["optimizer, the numbers in its update"].replace(
        "-", ""
    )
