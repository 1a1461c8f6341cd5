"""Equal stages share one name, different ones do not."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octojax.stages import differentiate, fingerprint
from tests.stages.chain import Piece, forward_stages


def layer(scale=1.0, axis=-1, table=None):
    def run(params, batch, inputs):
        h = jax.nn.softmax(inputs[0] @ params[0] * scale, axis=axis)
        return (h if table is None else h + jnp.asarray(table)[None, :],)

    return run


def chain(*runs, width=4):
    pieces = [Piece(lambda p, b, i: (b[0] @ p[0],), (0,))]
    pieces += [Piece(run, (i + 1,)) for i, run in enumerate(runs)]
    pieces += [Piece(lambda p, b, i: (i[0].sum(),), ())]
    params = [jnp.ones((width, width)) for _ in range(len(runs) + 1)]
    return differentiate(forward_stages(pieces, params, (jnp.ones((2, width)),)))


def names(stage):
    programs = (stage.forward, stage.backward, stage.input_grad, stage.weight_grad)
    return [fingerprint(p) for p in programs]


def test_equal_layers_share_all_programs():
    stages = chain(layer(), layer(), layer())
    assert names(stages[1]) == names(stages[2]) == names(stages[3])
    assert len(set(names(stages[1]))) == 4


@pytest.mark.parametrize("other", [layer(2.0), layer(axis=0)])
def test_a_literal_or_a_parameter_of_an_equation_counts(other):
    stages = chain(layer(), other)
    assert all(a != b for a, b in zip(names(stages[1])[:3], names(stages[2])[:3], strict=True))


def test_shape_and_dtype_count():
    assert names(chain(layer())[1])[0] != names(chain(layer(), width=5)[1])[0]


@settings(deadline=None, max_examples=10)
@given(st.lists(st.sampled_from([1.0, 2.0, 3.0]), min_size=2, max_size=4))
def test_forward_programs_are_equal_exactly_where_their_literals_are(scales):
    stages = chain(*map(layer, scales))[1:-1]
    found = [names(s)[0] for s in stages]
    for a, x in zip(found, scales, strict=True):
        for b, y in zip(found, scales, strict=True):
            assert (a == b) == (x == y)


def test_callbacks_count_by_what_they_capture():
    def host(offset):
        def call(x):
            return np.asarray(x) + offset

        def run(params, batch, inputs):
            shape = jax.ShapeDtypeStruct(inputs[0].shape, inputs[0].dtype)
            shift = jax.pure_callback(call, shape, jax.lax.stop_gradient(inputs[0]))
            return (inputs[0] @ params[0] + shift,)

        return run

    stages = chain(host(1.0), host(2.0), host(1.0))
    found = [names(s)[0] for s in stages[1:-1]]
    assert found[0] == found[2] != found[1]


def test_functions_that_differ_in_the_names_they_use_differ():
    def host(call):
        def run(params, batch, inputs):
            shape = jax.ShapeDtypeStruct(inputs[0].shape, inputs[0].dtype)
            shift = jax.pure_callback(call, shape, jax.lax.stop_gradient(inputs[0]))
            return (inputs[0] @ params[0] + shift,)

        return run

    one = [lambda x: np.sin(x), lambda x: np.cos(x)]  # of equal byte code
    inner = [lambda x: [np.sin(y) for y in x], lambda x: [np.cos(y) for y in x]]
    for pair in (one, inner):
        stages = chain(*map(host, pair))
        assert names(stages[1])[0] != names(stages[2])[0]
