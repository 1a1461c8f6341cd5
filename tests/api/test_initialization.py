"""Leaves that are made or read part by part are those of the whole model, to the bit."""

import os
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

import octojax as octopipe
from octojax.api.initialization import Initialization
from octojax.api.leaf_sources import Part
from octojax.errors import ExecutionError, LossError
from octojax.frontends import adapt
from octojax.models import jamba, nemotron_h
from octojax.programs.recipe import raw
from tests.pipelines import FAST, pipe

WIDTH = 8
OPTIONS: dict[str, Any] = {"microbatches": 2, "progress": False, "compiler_options": FAST}


class Block(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.norm = nnx.BatchNorm(WIDTH, rngs=rngs)
        self.drop = nnx.Dropout(0.5, rngs=rngs)
        init = nnx.with_partitioning(nnx.initializers.lecun_normal(), (None, "tensor"))
        self.linear = nnx.Linear(WIDTH, WIDTH, rngs=rngs, kernel_init=init)


class Deep(nnx.Module):
    def __init__(self, layers: int, rngs: nnx.Rngs) -> None:
        self.blocks = nnx.List([Block(rngs) for _ in range(layers)])


class Linen(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        kernel = nn.with_partitioning(nn.initializers.orthogonal(), (None, "tensor"))
        for _ in range(3):
            x = nn.Dense(WIDTH, kernel_init=kernel)(x)
        return nn.BatchNorm(use_running_average=False)(x)


def stacked() -> Any:
    @nnx.vmap
    def block(rngs: nnx.Rngs) -> nnx.Linear:
        return nnx.Linear(WIDTH, WIDTH, rngs=rngs)

    return block(nnx.Rngs(3).split(4))


def plain() -> Any:
    keys = jax.random.split(jax.random.PRNGKey(1), 5)
    return {f"w{i}": jax.random.normal(k, (WIDTH, WIDTH)) / 3 for i, k in enumerate(keys)}


def _loss(*_: Any) -> Any:
    return jnp.float32(0)


MODELS: dict[str, tuple[Any, Any]] = {
    "nnx with statistics, streams and specs": (lambda: Deep(4, nnx.Rngs(0)), None),
    "linen": (Linen(), lambda: Linen().init(jax.random.key(2), jnp.ones((2, WIDTH)))),
    "stacked": (stacked, None),
    "plain, raw keys": (plain, None),
    "nemotron-h": (
        lambda: nemotron_h.NemotronH(nemotron_h.tiny(32, 2, 64), rngs=nnx.Rngs(0)),
        None,
    ),
    "jamba": (lambda: jamba.Jamba(jamba.tiny(32, 2, 64), rngs=nnx.Rngs(7)), None),
}


def whole_of(name: str) -> tuple[Callable[[], Any], list[Any]]:
    pure = adapt(MODELS[name][0], _loss, MODELS[name][1])
    assert pure.make is not None
    make = pure.make
    leaves = jax.jit(lambda: [raw(x) for x in jax.tree.leaves(make())])()
    return make, leaves


SLOW = ("nemotron-h", "jamba")


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.slow] if n in SLOW else []) for n in MODELS]
)
def test_parts_are_bit_equal_to_the_jitted_whole_initialization(name: str) -> None:
    make, whole = whole_of(name)
    made = Initialization(make, [str(k) for k in range(len(whole))])
    rank = Mesh(np.array(jax.devices()).reshape(2, 2), ("data", "tensor"))
    alone = SingleDeviceSharding(jax.devices()[1])
    for spread in (False, True):
        chosen = range(spread, len(whole), 2)  # each half by itself
        parts = []
        for k in chosen:
            even = whole[k].ndim and whole[k].shape[-1] % 2 == 0
            axes = (*(None,) * (whole[k].ndim - 1), "tensor") if even else ()
            where = NamedSharding(rank, PartitionSpec(*axes)) if spread else alone
            parts.append(Part(k, None, where))
        for part, value in zip(parts, made.place(parts), strict=True):
            assert value.sharding.is_equivalent_to(part.where, value.ndim)
            assert value.dtype == whole[part.leaf].dtype
            np.testing.assert_array_equal(value, whole[part.leaf])


@cache
def made_stack() -> tuple[Initialization, list[Any]]:
    make, whole = whole_of("stacked")
    return Initialization(make, "ab"), whole


@settings(max_examples=20)
@given(st.lists(st.tuples(st.integers(0, 1), st.integers(0, 3)), min_size=1, max_size=6))
def test_rows_of_a_stack_are_made_wherever_they_are_wanted(wanted: list[tuple[int, int]]) -> None:
    made, whole = made_stack()
    parts = [Part(leaf, row, SingleDeviceSharding(jax.devices()[row])) for leaf, row in wanted]
    for part, value in zip(parts, made.place(parts), strict=True):
        assert value.devices() == {jax.devices()[part.row or 0]}
        np.testing.assert_array_equal(value, whole[part.leaf][part.row])


def test_layers_share_the_program_of_a_leaf_with_their_keys_as_inputs() -> None:
    pure = adapt(lambda: Deep(24, nnx.Rngs(0)), _loss)
    assert pure.make is not None
    count = len(jax.tree.leaves((pure.params, pure.state)))
    made = Initialization(pure.make, [str(k) for k in range(count)])
    parts = [Part(k, None, SingleDeviceSharding(jax.devices()[k % 4])) for k in range(count)]
    values = made.place(parts)
    assert count > 150
    assert made.num_programs <= 3  # a kernel, zeros, ones; streams and counts are seeds
    kernels = [np.asarray(v) for v in values if v.shape == (WIDTH, WIDTH)]
    assert len({k.tobytes() for k in kernels}) == 24


def test_equal_programs_of_functions_of_one_name_but_other_values_are_told_apart() -> None:
    def make() -> Any:
        key = jax.random.key(0)
        return [jax.random.normal(key, (4,)) * s for s in (1.0, 2.0, 2.0)]

    made = Initialization(make, "abc")
    one = SingleDeviceSharding(jax.devices()[0])
    a, b, c = made.place([Part(k, None, one) for k in range(3)])
    assert made.num_programs == 2
    np.testing.assert_array_equal(a * 2, b)
    np.testing.assert_array_equal(b, c)


def test_a_leaf_that_fails_is_named() -> None:
    def fails(x: Any) -> Any:
        raise RuntimeError("no such file")

    def make() -> Any:
        shape = jax.ShapeDtypeStruct((2,), jnp.float32)
        return {"fine": jnp.zeros(3), "table": jax.pure_callback(fails, shape, jnp.ones(2))}

    made = Initialization(make, ["fine", "embedding.table"])
    one = SingleDeviceSharding(jax.devices()[0])
    with pytest.raises(ExecutionError, match=r"leaf embedding\.table could not be made: .*no such"):
        jax.block_until_ready(made.place([Part(k, None, one) for k in range(2)]))


# ---------------------------------------------------------------------- through compile


def chain(params: Any, batch: Any) -> Any:
    h = batch
    for name in sorted(params):
        h = jnp.tanh(h @ params[name])
    return jnp.mean(h**2)


BATCH = np.linspace(-1, 1, 4 * WIDTH, dtype=np.float32).reshape(4, WIDTH)


def compiled(model: Any, mesh: Any = None, **options: Any) -> octopipe.TrainStep:
    options = {"schedule": "gpipe", **OPTIONS, **options}
    return octopipe.compile(model, chain, optax.adam(0.1), BATCH, mesh=mesh or pipe(2), **options)


def test_a_model_that_is_a_function_trains_as_the_jitted_whole() -> None:
    whole = jax.jit(plain)()
    with compiled(plain) as lazy, compiled(whole) as eager:
        state = lazy.init()
        jax.tree.map(np.testing.assert_array_equal, lazy.params(state), whole)
        _, mine = lazy(state, BATCH)
        _, theirs = eager(eager.init(), BATCH)
        assert float(mine["loss"]) == float(theirs["loss"])
        assert float(mine["grad_norm"]) == float(theirs["grad_norm"])


def test_leaves_are_made_as_their_specs_say_they_lie() -> None:
    mesh = Mesh(np.array(jax.devices()).reshape(2, 2), ("pipe", "tensor"))

    def specs(path: str, shape: tuple[int, ...]) -> Any:
        return PartitionSpec(None, "tensor")

    with compiled(plain, mesh, param_specs=specs) as step:
        state = step.init()
        assert {unit.sharding.spec for unit in state.model.units} == {PartitionSpec(None, "tensor")}
        jax.tree.map(np.testing.assert_array_equal, step.params(state), jax.jit(plain)())


class Recorded:
    """An array that is read in slices, and what was read of it."""

    def __init__(self, value: Any) -> None:
        self.value, self.shape, self.dtype = np.asarray(value), value.shape, value.dtype
        self.read: list[int] = []

    def __getitem__(self, index: Any) -> Any:
        found = self.value[index]
        self.read.append(found.size)
        return found


def test_a_reader_gives_every_rank_its_own_leaves_once() -> None:
    whole = jax.jit(plain)()
    files = {name: Recorded(value) for name, value in whole.items()}
    shapes = jax.eval_shape(plain)
    with compiled(shapes) as step:
        state = step.init(files.__getitem__)
        jax.tree.map(np.testing.assert_array_equal, step.params(state), whole)
    assert {name: file.read for name, file in files.items()} == {
        name: [WIDTH * WIDTH] for name in whole
    }


def test_a_reader_of_a_stack_is_asked_for_rows() -> None:
    def loss(params: Any, batch: Any) -> Any:
        def layer(h: Any, w: Any) -> Any:
            return jnp.tanh(h @ w), None

        return jnp.mean(jax.lax.scan(layer, batch, params["w"])[0] ** 2)

    file = Recorded(np.random.default_rng(0).normal(size=(4, WIDTH, WIDTH)).astype(np.float32))
    shapes = {"w": jax.ShapeDtypeStruct(file.shape, jnp.float32)}
    step = octopipe.compile(
        shapes, loss, optax.sgd(0.1), BATCH, mesh=pipe(2), schedule="gpipe", **OPTIONS
    )
    with step:
        state = step.init(lambda path: {"w": file}[path])
        np.testing.assert_array_equal(step.params(state)["w"], file.value)
    assert file.read == [WIDTH * WIDTH] * 4


def test_all_leaves_that_do_not_fit_are_listed_before_anything_is_read() -> None:
    files = {name: Recorded(value) for name, value in jax.jit(plain)().items()}
    files["w1"] = Recorded(np.zeros((WIDTH, WIDTH + 1), np.float32))
    files["w2"] = Recorded(np.zeros((WIDTH, WIDTH), np.float16))
    del files["w0"], files["w4"]
    with compiled(jax.eval_shape(plain)) as step:
        with pytest.raises(ValueError, match=r"2 missing \(w0, w4\).*2 of another shape or type "
                           r"\(w1 is float32\[8, 9\], compiled for float32\[8, 8\], "
                           r"w2 is float16\[8, 8\]"):  # fmt: skip
            step.init(files.__getitem__)
        assert not any(file.read for file in files.values())
        with pytest.raises(ValueError, match=r"compiled from shapes, and has no values for the "
                           r"parameters: 5 leaves \(w0, w1, w2, w3, w4\)"):  # fmt: skip
            step.init()


def test_functions_that_make_no_model_are_refused() -> None:
    rngs = nnx.Rngs(0)
    with pytest.raises(LossError, match=r"random streams from outside of it .*Make them inside"):
        compiled(lambda: nnx.Linear(4, 4, rngs=rngs))
    with pytest.raises(LossError, match="makes no model when it is called without arguments"):
        compiled(lambda config: plain())
    with pytest.raises(LossError, match="no trained parameters"):
        compiled(dict)


def test_options_of_a_class_hold_for_a_function_that_makes_it() -> None:
    @octopipe.pipeline(microbatches=2, schedule="gpipe", progress=False, compiler_options=FAST)
    class Two(nnx.Module):
        def __init__(self, rngs: nnx.Rngs) -> None:
            self.a, self.b = (nnx.Linear(WIDTH, WIDTH, rngs=rngs) for _ in range(2))

        def __call__(self, x: Any) -> Any:
            return self.b(jnp.tanh(self.a(x)))

    def loss(model: Two, batch: Any) -> Any:
        return jnp.mean(model(batch) ** 2)

    step = octopipe.compile(lambda: Two(nnx.Rngs(1)), loss, optax.sgd(0.1), BATCH, mesh=pipe(2))
    with step:
        assert step.plan.schedule.num_microbatches == 2
        state = step.init()
        whole = jax.jit(lambda: nnx.state(Two(nnx.Rngs(1))))()
        made = nnx.state(step.model(state))
        jax.tree.map(np.testing.assert_array_equal, made, whole)


PEAK = """
import gc, jax, jax.numpy as jnp
from jax.sharding import SingleDeviceSharding
from octojax.api.initialization import Initialization
from octojax.api.leaf_sources import Part

def make():
    keys = jax.random.split(jax.random.key(0), 16)
    return [jax.random.normal(keys[i], (2048, 2048)) for i in range(16)]  # 16 MiB each

def mib(name):
    lines = open("/proc/self/status").read().splitlines()
    return int(next(x for x in lines if x.startswith(name)).split()[1]) / 1024

made = Initialization(make, [str(i) for i in range(16)])
where = SingleDeviceSharding(jax.devices()[0])
first = made.place([Part(0, None, where)])
del first
gc.collect()
open("/proc/self/clear_refs", "w").write("5")
before = mib("VmRSS")
own = made.place([Part(i, None, where) for i in range(4)])
print(mib("VmHWM") - before)
"""


@pytest.mark.slow
@pytest.mark.skipif(not os.access("/proc/self/clear_refs", os.W_OK), reason="needs Linux's /proc")
def test_a_rank_needs_its_share_and_what_one_leaf_takes_to_make() -> None:
    """The CPU backend's generator keeps three arrays of a leaf's size meanwhile."""
    done = subprocess.run([sys.executable, "-c", PEAK], capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr[-2000:]
    assert 4 * 16 <= float(done.stdout) <= (4 + 3 + 1) * 16  # of 256 MiB that the model has


@pytest.mark.slow
def test_a_plan_is_tuned_for_a_model_that_exists_only_as_shapes() -> None:
    """Layers are measured with dummy values, and the function that makes the model runs in traces
    alone until `init`."""
    eager: list[int] = []

    def make() -> Any:
        params = plain()
        eager.extend(1 for x in params.values() if not isinstance(x, jax.core.Tracer))
        return params

    def loss(params: Any, x: jax.Array) -> jax.Array:
        for name in sorted(params):
            x = jnp.tanh(x @ params[name])
        return jnp.mean(x**2)

    rows = jnp.ones((4, WIDTH)) / 2
    shapes = jax.ShapeDtypeStruct(rows.shape, rows.dtype)
    options = OPTIONS | {"schedule": "auto", "tune_seconds": 0.3, "mesh": pipe(2)}
    with octopipe.compile(make, loss, optax.sgd(0.1), shapes, **options) as step:
        assert not eager
        assert step.plan.num_ranks == 2
        assert step.plan.partition.num_layers == 5
        state = step.init()
        value, _, grads = step.value_and_grad(state, rows)
        wanted, plain_grads = jax.value_and_grad(loss)(jax.jit(plain)(), rows)
        np.testing.assert_allclose(value, wanted, rtol=1e-5)
        for own, other in zip(*map(jax.tree.leaves, (grads, plain_grads)), strict=True):
            np.testing.assert_allclose(own, other, rtol=1e-5, atol=1e-7)
