"""Chained forward stages compute what the loss computes, for every model and any partition."""

from functools import cache
from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from octojax import compat
from octojax.errors import CutError
from octojax.frontends import adapt
from octojax.ir.partition import Partition
from octojax.layers import StateKind, boundary, cut_stages, find_layers
from octojax.stages.program import Ref, Role
from octojax.trace import trace_loss
from tests.zoo import CASES
from tests.zoo.chain import run_chain

TOLERANCE = {"mixed-dtypes": 2e-2, "scan-cast": 2e-2}  # bfloat16 inside


@cache
def prepared(name: str) -> Any:
    """The case, its pure loss, batch, layers and reference results, evaluated once."""
    case = CASES[name]()
    pure = case.pure()
    batch = case.batch(4)
    layered = find_layers(
        trace_loss(pure.fn, pure.params, batch, pure.state), min_layers=case.layers
    )
    loss, aux, new_state = jax.jit(pure.fn)(pure.params, pure.state, batch)
    reference = [loss, *jax.tree.leaves(aux)], jax.tree.leaves(new_state)
    return case, pure, batch, layered, reference


def partitions(layers: int) -> st.SearchStrategy[Partition]:
    """Any partition of so many layers: each inner border is a cut or not."""
    bits = st.lists(st.booleans(), min_size=layers - 1, max_size=layers - 1)

    def build(cuts: list[bool]) -> Partition:
        ends = [0, *(i + 1 for i, cut in enumerate(cuts) if cut), layers]
        return Partition(tuple(b - a for a, b in pairwise(ends)))

    return bits.map(build)


def assert_close(found: list[Any], wanted: list[Any], tolerance: float) -> None:
    assert len(found) == len(wanted)
    for x, y in zip(found, wanted):
        if jax.dtypes.issubdtype(getattr(x, "dtype", None), jax.dtypes.prng_key):
            x, y = jax.random.key_data(x), jax.random.key_data(y)
        np.testing.assert_allclose(
            np.asarray(x, np.float64), np.asarray(y, np.float64), rtol=tolerance, atol=tolerance
        )


@pytest.mark.parametrize("name", CASES)
def test_finds_the_layers_of_the_case(name: str) -> None:
    case, _, _, layered, _ = prepared(name)
    assert layered.graph.num_layers == case.layers
    names = [layer.name for layer in layered.graph.layers]
    assert len(set(names)) == len(names)


@pytest.mark.parametrize("name", CASES)
@settings(
    deadline=None, max_examples=3, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_any_partition_reproduces_the_loss(name: str, data: Any) -> None:
    _, pure, batch, layered, (emits, new_state) = prepared(name)
    staged = cut_stages(layered, data.draw(partitions(layered.graph.num_layers)))
    found, found_state = run_chain(staged, pure.params, pure.state, batch)
    tolerance = TOLERANCE.get(name, 2e-6)
    assert_close(found, emits, tolerance)
    assert_close(found_state, new_state, tolerance)


@pytest.mark.parametrize("name", CASES)
def test_ends_of_programs_fit_together(name: str) -> None:
    layered = prepared(name)[3]
    staged = cut_stages(layered, Partition((1,) * layered.graph.num_layers))
    for before, after in zip(staged.forwards, staged.forwards[1:]):
        sent = {r.index for r in before.forward.writes if r.role is Role.OUTPUT}
        assert sent == set(range(len(staged.borders[before.index])))
        assert {r.index for r in after.forward.reads if r.role is Role.INPUT} <= sent
    for stage in staged.forwards:
        for ref, var in zip(stage.forward.reads, stage.forward.jaxpr.jaxpr.invars):
            if ref.role is Role.PARAM:
                assert var.aval.shape == staged.unit_avals[ref.index].shape
        assert len(set(stage.forward.reads)) == len(stage.forward.reads)
        assert len(set(stage.forward.writes)) == len(stage.forward.writes)
    emitted = [r.index for s in staged.forwards for r in s.forward.writes if r.role is Role.EMIT]
    assert sorted(emitted) == list(range(len(staged.emits)))
    assert Ref(Role.EMIT, 0) in staged.forwards[-1].forward.writes


@pytest.mark.parametrize("name", CASES)
def test_units_cover_every_leaf_once(name: str) -> None:
    _, pure, _, layered, _ = prepared(name)
    staged = cut_stages(layered, Partition((layered.graph.num_layers,)))
    rows: dict[int, list[int | None]] = {}
    for unit in staged.units:
        rows.setdefault(unit.leaf, []).append(unit.index)
    leaves = [*jax.tree.leaves(pure.params), *jax.tree.leaves(pure.state), *staged.constants]
    mutable = {s.leaf for s in staged.state if s.kind is not StateKind.READ_ONLY}
    params = len(jax.tree.leaves(pure.params))
    assert set(rows) == set(range(len(leaves))) - {params + i for i in mutable}
    for leaf, found in rows.items():
        assert found in ([None], list(range(len(found))))
        assert found == [None] or len(found) == leaves[leaf].shape[0]
    for unit in staged.units:
        wanted = unit.leaf < params and jnp.issubdtype(leaves[unit.leaf].dtype, jnp.floating)
        assert unit.trainable == wanted


def staged_of(name: str, sizes: tuple[int, ...] | None = None) -> Any:
    layered = prepared(name)[3]
    return cut_stages(layered, Partition(sizes or (1,) * layered.graph.num_layers))


def test_stacked_leaves_come_apart_into_one_unit_per_layer() -> None:
    for name in (
        "scan",
        "scan-reverse",
        "scan-cast",
        "fori",
        "hand-stack",
        "linen-scan",
        "nnx-scan-dropout",
    ):
        staged = staged_of(name)
        per_stage = [
            {unit.index for unit in _trained(staged, s) if not unit.name.startswith("head")}
            for s in staged.forwards[:4]
        ]
        order = range(3, -1, -1) if name == "scan-reverse" else range(4)
        assert per_stage == [{i} for i in order], name


def _trained(staged: Any, stage: Any) -> list[Any]:
    reads = (staged.units[r.index] for r in stage.forward.reads if r.role is Role.PARAM)
    return [unit for unit in reads if unit.trainable]


def test_tied_weight_is_one_unit_read_by_two_stages() -> None:
    for name, readers in (("tied-lm", 2), ("nnx-tied", 2), ("tied-lm-3", 3)):
        staged = staged_of(name)
        (tied,) = [u for u, x in enumerate(staged.units) if x.name.startswith("embed")]
        found = [s.index for s in staged.forwards if Ref(Role.PARAM, tied) in s.forward.reads]
        assert len(found) >= readers
        assert found[0] == 0
        assert found[-1] == len(staged.forwards) - 1


def test_skips_travel_through_every_stage_between() -> None:
    borders = staged_of("unet").borders
    assert [len(x) for x in borders] == [1, 2, 3, 4, 4, 3, 2]


def test_only_float_values_are_differentiable() -> None:
    borders = staged_of("mixed-dtypes").borders
    for border in borders[1:]:
        found = {(str(x.aval.dtype), x.differentiable) for x in border}
        assert found >= {("bfloat16", True), ("float32", True)}
        assert not any(x.differentiable and not compat.is_float(x.aval) for x in border)
    assert any(not x.differentiable for border in borders for x in border)


def test_batch_only_values_are_not_sent() -> None:
    staged = staged_of("constants")
    assert [len(x) for x in staged.borders] == [1] * 5
    readers = [s.index for s in staged.forwards if Ref(Role.BATCH, 0) in s.forward.reads]
    assert readers == [0, 1, 3, 5]  # look-up, both attention masks, the metric


def test_a_layer_without_parameters_reads_none() -> None:
    staged = staged_of("parameterless")
    assert not [r for r in staged.forwards[2].forward.reads if r.role is Role.PARAM]


def test_kinds_of_state() -> None:
    kinds = {s.name: (s.kind, s.stage) for s in staged_of("state").state}
    assert kinds == {
        "count": (StateKind.COUNTER, None),
        "mean": (StateKind.CARRIED, 1),  # a reduction begins the layer that it feeds
        "scale": (StateKind.READ_ONLY, None),
    }
    names = {s.name: s.kind for s in staged_of("dropout-rngs").state}
    assert set(names.values()) == {StateKind.COUNTER, StateKind.READ_ONLY}
    assert all((k is StateKind.COUNTER) == n.endswith("count") for n, k in names.items())


def test_counts_that_pass_through_a_checkpointed_stack_are_still_counters() -> None:
    found = {s.name: s.kind for s in staged_of("nnx-scan-dropout").state}
    assert found == {
        "layers.drop.rngs.count": StateKind.COUNTER,
        "layers.drop.rngs.key": StateKind.READ_ONLY,
    }


def test_state_that_crosses_stages_is_refused_by_name() -> None:
    params = [jnp.eye(4), jnp.eye(4)]
    state = {"average": jnp.zeros(())}

    def loss(params: Any, state: Any, batch: Any) -> Any:
        h = jnp.tanh(batch @ params[0]) * state["average"]
        h = jnp.tanh(h @ params[1])
        return jnp.mean(h), None, {"average": jnp.mean(h)}

    pure = adapt(params, loss, state=state)
    layered = find_layers(trace_loss(pure.fn, params, jnp.ones((2, 4)), state))
    with pytest.raises(CutError, match=r"average \(written by stage 1, read by \[0\]\)"):
        cut_stages(layered, Partition((1, 1)))
    staged = cut_stages(layered, Partition((2,)))
    assert staged.state[0].stage == 0


def test_more_stages_than_layers_names_numbers_and_remedies() -> None:
    layered = prepared("toy")[3]
    with pytest.raises(CutError, match=r"5 layers in 5 stages, the model has 4: .*boundary"):
        cut_stages(layered, Partition((1,) * 5))
    with pytest.raises(CutError, match=r"Give a partition of 4 layers"):
        cut_stages(layered, Partition((3, 2)))


def test_finer_layers_on_request() -> None:
    pure = CASES["tied-lm"]().pure()
    traced = trace_loss(pure.fn, pure.params, CASES["tied-lm"]().batch(2), pure.state)
    counts = [find_layers(traced, min_layers=n).graph.num_layers for n in (1, 6, 9, 12, 1000)]
    assert counts[:4] == [6, 6, 9, 12]
    assert 12 <= counts[4] < 1000


def test_boundary_is_the_identity_everywhere() -> None:
    x = {"a": jnp.arange(4.0), "b": jnp.arange(2)}
    same = boundary(x)
    assert all(bool((same[k] == x[k]).all()) for k in x)
    grad = jax.jit(jax.vmap(jax.grad(lambda v: boundary(v) ** 2)))(jnp.arange(3.0))
    np.testing.assert_array_equal(grad, [0.0, 2.0, 4.0])
    doubled = jax.lax.scan(lambda c, v: (boundary(c + v), None), 0.0, jnp.arange(3.0))[0]
    assert float(doubled) == 3.0
