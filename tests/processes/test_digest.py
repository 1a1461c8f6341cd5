import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from octojax.processes.digest import checksum, describe

TYPES = (np.float32, np.int32, np.uint8, np.bool_, ml_dtypes.bfloat16, np.complex64, np.float16)


@given(st.sampled_from(TYPES), st.integers(1, 40), st.integers(0, 39))
def test_one_changed_value_is_seen(dtype, size, place):
    values = (np.arange(size) % 2).astype(dtype)
    other = values.copy()
    other[place % size] = not values[place % size]
    assert checksum([values]) == checksum([values.copy()])
    assert checksum([values]) != checksum([other])


@pytest.mark.parametrize("dtype", TYPES)
def test_where_an_array_lies_does_not_count(dtype):
    values = (np.arange(24).reshape(4, 6) % 2).astype(dtype)
    assert describe(values) == describe(jnp.asarray(values))
    assert describe(values) == describe(np.asfortranarray(values))
    assert describe(values) == describe(jax.device_put(values, jax.devices()[-1]))


def test_types_are_those_that_jax_gives():
    assert describe(np.ones(3)) == describe(np.ones(3, np.float32))
    assert describe(2.5).startswith("float32[] ")
    assert describe(np.float64(2.5)) == describe(2.5)


def test_a_nan_equals_any_nan():
    quiet = np.array([np.nan, 1], np.float32)
    other = quiet.copy()
    other.view(np.uint32)[0] ^= 1  # another payload
    assert np.isnan(other[0])
    assert quiet.tobytes() != other.tobytes()
    assert describe(quiet) == describe(other)
    assert describe(quiet) != describe(np.array([1, np.nan], np.float32))


def test_seeds_are_compared():
    keys = [jax.random.key(0), jax.random.key(1), jax.random.split(jax.random.key(0), 2)]
    assert len({describe(k) for k in keys}) == 3
    assert describe(keys[0]) == describe(jax.random.key(0))


@pytest.mark.parametrize("there", [np.asarray, jnp.asarray])
def test_of_a_large_array_blocks_are_read(there):
    values = np.random.default_rng(0).standard_normal((300, 100)).astype(np.float32)
    limit = 1 << 12
    sums = {
        checksum([there(x)], limit)
        for x in (values, values[::-1], np.roll(values, 1, 0), values + np.float32(1))
    }
    assert len(sums) == 4
    assert checksum([values], limit) == checksum([jax.device_put(values, jax.devices()[-1])], limit)
