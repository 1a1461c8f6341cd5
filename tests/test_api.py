"""The public surface: what users call, what they get back, and what they are told."""

import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx
from jax.sharding import Mesh

import octojax as octopipe
from octojax.api.options import Options, options_of
from octojax.api.planning import make_plan
from octojax.errors import CutError, LossError, MeshError, PlanError, ScheduleError
from octojax.ir import Layer, LayerCost, LayerGraph, Partition, Placement, Plan, Profile, Schedule
from octojax.programs.microbatch import plan_microbatches
from octojax.schedules import generate
from tests.pipelines import FAST, case_of, compiled, pipe, relative_error


def test_importing_the_package_imports_no_jax():
    code = (
        "import sys, octojax; assert not {'jax', 'flax', 'numpy'} & set(sys.modules); "
        "assert 'compile' in dir(octojax)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_an_unknown_public_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'pipelin'"):
        _ = octopipe.pipelin


@octopipe.pipeline(microbatches=4, schedule="gpipe")
class Net(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.first = nnx.Linear(4, 4, rngs=rngs)
        self.second = nnx.Linear(4, 4, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.second(jnp.tanh(self.first(x)))


def net_loss(model: Net, batch: dict[str, jax.Array]):
    difference = model(batch["x"]) - batch["y"]
    loss = jnp.mean(difference**2)
    aux = {
        "worst": jnp.mean(jnp.abs(difference)),
        "rows": jnp.asarray(difference.shape[0]),
        "difference": difference,
        "finite": jnp.isfinite(difference).all(),
    }
    return loss, aux


def net_batch() -> dict[str, jax.Array]:
    x = jnp.linspace(-1, 1, 32).reshape(8, 4)
    return {"x": x, "y": jnp.flip(x) ** 2}


def test_the_decorator_leaves_a_normal_module_and_records_options():
    model = Net(nnx.Rngs(0))
    assert model(jnp.ones((2, 4))).shape == (2, 4)
    assert options_of(model).microbatches == 4
    assert options_of(model, schedule="1f1b").schedule == "1f1b"


def test_the_decorator_takes_linen_modules():
    @octopipe.pipeline(schedule="zb-h1")
    class Dense(linen.Module):
        @linen.compact
        def __call__(self, x: jax.Array) -> jax.Array:
            return linen.Dense(3)(x)

    assert options_of(Dense()).schedule == "zb-h1"
    assert Dense().init(jax.random.key(0), jnp.ones((1, 2)))["params"]


def test_a_mistaken_option_is_refused_where_it_is_written():
    with pytest.raises(TypeError, match=r"unknown pipeline option.*microbatchs"):
        octopipe.pipeline(microbatchs=4)


def test_an_nnx_module_trains_and_comes_back():
    model, batch = Net(nnx.Rngs(0)), net_batch()
    step = octopipe.compile(
        model, net_loss, optax.sgd(0.1), batch, mesh=pipe(2), progress=False, compiler_options=FAST
    )
    assert str(step.plan.schedule) == str(generate("gpipe", 2, 4))
    state = step.init()
    plain = nnx.jit(nnx.value_and_grad(net_loss, has_aux=True))
    (loss, aux), grads = plain(model, batch)
    state, metrics = step(state, batch)
    assert relative_error(metrics["loss"], loss) < 1e-6
    assert relative_error(metrics["aux"]["worst"], aux["worst"]) < 1e-6
    assert int(metrics["aux"]["rows"]) == 8  # integers add up
    assert relative_error(metrics["aux"]["difference"], aux["difference"]) < 1e-6  # rows join
    assert bool(metrics["aux"]["finite"])

    trained = step.model(state)
    assert isinstance(trained, Net)
    wanted = model.first.kernel[...] - 0.1 * grads.first.kernel[...]
    assert relative_error(trained.first.kernel[...], wanted) < 1e-5
    loss, grads = step.reference(state, batch)
    assert relative_error(step.evaluate(state, batch)["loss"], loss) < 1e-6
    assert step.report.compilations > 4
    assert "XLA compilations" in str(step.report)


def test_value_and_grad_is_a_drop_in():
    case = case_of("tied-lm")
    batch = case.batch(8)
    f = octopipe.value_and_grad(
        case.loss_fn,
        case.model,
        batch,
        has_aux=True,
        mesh=pipe(2),
        microbatches=2,
        progress=False,
        compiler_options=FAST,
    )
    (loss, aux), grads = f(case.model, batch)
    plain = jax.jit(jax.value_and_grad(case.loss_fn, has_aux=True))
    (wanted, wanted_aux), wanted_grads = plain(case.model, batch)
    assert relative_error(loss, wanted) < 1e-6
    assert jax.tree.structure(aux) == jax.tree.structure(wanted_aux)
    assert relative_error(grads, wanted_grads) < 1e-5
    moved = jax.tree.map(lambda p, g: p + g, case.model, grads)  # on the same devices
    assert relative_error(f(moved, batch)[0][0], plain(moved, batch)[0][0]) < 1e-5


def test_the_state_is_a_pytree_that_a_step_gives_away():
    case = case_of("toy")
    step = compiled(case, "1f1b", 2, 2)
    state = step.init()
    leaves, tree = jax.tree.flatten(state)
    again = tree.unflatten(leaves)
    new, _ = step(again, case.batch(8))
    assert new.step == 1
    assert all(x.is_deleted() for x in state.model.units)
    # The user's own arrays are never given away.
    assert not any(x.is_deleted() for x in jax.tree.leaves(case.model))


# ------------------------------------------------------------------ bad input


def refuse(error: type[Exception], match: str, **options):
    case = case_of("toy")
    arguments = {"schedule": "1f1b", "ranks": 2, "microbatches": 2, **options}
    with pytest.raises(error, match=match):
        compiled(case, **arguments)


def test_too_few_rows():
    refuse(
        ValueError,
        "batch of 8 rows cannot form 9 microbatches. The nearest possible number .* is 8",
        microbatches=9,
    )


def test_leading_axes_that_differ():
    case = case_of("toy")
    batch = {**case.batch(8), "y": case.batch(6)["y"]}
    with pytest.raises(ValueError, match=r"different leading axes: 8 in x; 6 in y"):
        octopipe.compile(case.model, case.loss_fn, optax.sgd(1), batch, mesh=pipe(2))


def test_leading_axes_of_many_leaves_are_counted():
    leaves = [np.ones((8, 2)) for _ in range(9)] + [np.ones(3)]
    names = [f"x{k}" for k in range(9)] + ["table"]
    with pytest.raises(ValueError, match=r"8 in x0, x1, x2, x3, \.\.\. \(9 leaves\); 3 in table"):
        plan_microbatches(leaves, names, 2)


def test_leaves_of_a_tuple_go_by_number():
    def loss(w, batch):
        return jnp.mean((batch[0] @ w) ** 2) * batch[1].sum()

    w, batch = jnp.ones((2, 2)), (jnp.arange(8.0).reshape(4, 2), jnp.arange(3.0))
    for choice in ({"shared": (1,)}, {"rows": 0}, {"shared": "1"}):
        options = {"mesh": pipe(1), "microbatches": 2, "progress": False, **choice}
        step = octopipe.value_and_grad(loss, w, batch, **options)
        assert float(step(w, batch)[0]) == float(loss(w, batch))


def test_a_batch_of_another_shape():
    case = case_of("toy")
    step = compiled(case, "1f1b", 1, 2)
    with pytest.raises(ValueError, match=r"x is float32\[6, 8\], compiled for float32\[8, 8\]"):
        step(step.init(), case.batch(6))


def test_a_mesh_without_the_axis():
    mesh = Mesh(np.array(jax.devices()[:2]), ("stage",))
    refuse(MeshError, r"axes \('stage',\) of sizes \(2,\), none is named 'pipe'", mesh=mesh)


def test_fewer_devices_than_ranks():
    case = case_of("toy")
    with pytest.raises(MeshError, match=r"plan has 5 ranks, but there are only 4 device\(s\)"):
        octopipe.compile(
            case.model,
            case.loss_fn,
            optax.sgd(1),
            case.batch(8),
            schedule=generate("1f1b", 5, 2),
            microbatches=2,
        )


def test_more_stages_than_layers():
    refuse((PlanError, CutError), "stages", schedule="interleaved", chunks=40)


def test_an_empty_stage():
    refuse(PlanError, r"leaves stage \[1\] empty", ranks=3, partition=(2, 0, 2))


def test_a_partition_of_another_size():
    refuse(PlanError, "2 stages of 7 layers in all; .* the model has 4 layers", partition=(3, 4))


def test_a_table_that_lacks_an_action():
    table = Schedule.parse("0F0 0F1 0B0\n1F0 1B0 1F1 1B1")
    refuse(ScheduleError, "0B1", schedule=table)


def test_a_table_that_doubles_an_action():
    table = Schedule.parse("0F0 0F1 0B0 0B1 0B0\n1F0 1B0 1F1 1B1")
    refuse(ScheduleError, "0B0", schedule=table)


def test_a_table_that_deadlocks():
    table = Schedule.parse("0F0 0B0 0F1 0B1\n1F0 1F1 1B0 1B1")
    refuse(ScheduleError, "rank 0", schedule=table)


def test_a_table_for_other_ranks_or_microbatches():
    refuse(MeshError, "schedule is for 4 ranks, the mesh has 2", schedule=generate("1f1b", 4, 2))
    refuse(PlanError, "runs 8 microbatches, asked for were 2", schedule=generate("1f1b", 2, 8))


def test_an_unknown_schedule_suggests_one():
    refuse(ValueError, "unknown schedule 'zb-h3'.*zb-h1", schedule="zb-h3")


def test_a_plan_for_another_model():
    plan = Plan(Partition((9, 9)), Placement.sequential(2), generate("1f1b", 2, 2))
    refuse(PlanError, "a model of 18 layers, this one has 4", plan=plan)


def test_a_placement_that_the_schedule_does_not_have():
    refuse(
        PlanError,
        r"stages on ranks \[0 1\], asked for was \[1 0\]",
        placement=(1, 0),
        schedule=generate("1f1b", 2, 2),
    )


def test_a_loss_that_is_no_scalar():
    with pytest.raises(LossError, match=r"shape \(4,\)"):
        octopipe.compile(
            {"w": jnp.ones(4)},
            lambda p, b: p["w"] * b["x"].mean(),
            optax.sgd(1),
            {"x": jnp.ones((2, 3))},
            mesh=pipe(1),
        )


def test_a_loss_without_floating_parameters():
    for params, match in (
        ({"w": jnp.ones(4, int)}, r"none of the 1 parameters of 'dict' is floating \(int32\)"),
        ({}, "no trained parameters"),
    ):
        with pytest.raises(LossError, match=match):
            octopipe.compile(
                params,
                lambda p, b: (p["w"] * b["x"].mean()).sum(),
                optax.sgd(1),
                {"x": jnp.ones((2, 3))},
                mesh=pipe(1),
            )


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"mesh": 2}, r"mesh is of type int, expected a jax\.sharding\.Mesh with an axis 'pipe'"),
        ({"optimizer": 3}, "optimizer is of type int, expected an optax optimizer"),
        ({"optimizer": None}, "optimizer is of type NoneType"),
        ({"loss_fn": 3}, "loss_fn is of type int, expected a function"),
        ({"batch": {"x": "a"}}, "x is of type str, expected an array of numbers"),
    ],
)
def test_arguments_of_another_type(change, match):
    arguments = {
        "model": {"w": jnp.ones(4)},
        "loss_fn": lambda p, b: (p["w"] * b["x"].mean()).sum(),
        "optimizer": optax.sgd(1),
        "batch": {"x": jnp.ones((2, 3))},
        "mesh": pipe(1),
    }
    with pytest.raises(TypeError, match=match):
        octopipe.compile(**{**arguments, **change})


def test_a_state_that_is_none_of_ours():
    step = compiled(case_of("toy"), "1f1b", 2, 2)
    for run in (step, step.evaluate, step.value_and_grad):
        with pytest.raises(TypeError, match="state is of type dict, expected the TrainState"):
            run({}, {})


def test_a_profile_of_another_model():
    layer = LayerCost("x", 1.0, 1.0, 1.0)
    profile = Profile("p", (layer,) * 99)
    refuse(PlanError, "profile 'p' is of 99 layers, this model has", profile=profile)


def test_the_decorator_without_parentheses():
    with pytest.raises(TypeError, match=r"by name only, found <class .*Plain"):

        @octopipe.pipeline
        class Plain(nnx.Module): ...


def test_carried_state_on_a_stage_of_two_ranks():
    case = case_of("state")
    with pytest.raises(PlanError, match="held by two ranks"):
        compiled(case, "dualpipe", 2, 4)


def test_the_default_cut_is_the_best_of_equals():
    layers = tuple(Layer(f"l{i}", "layer", 100.0, 8, 8) for i in range(5))
    schedule = generate("1f1b", 4, 8)
    for named in ({}, {"partition": "balanced"}, {"partition": "alpa"}, {"partition": "uniform"}):
        plan = make_plan(Options(**named), schedule, LayerGraph(layers))
        assert plan.partition.sizes == (2, 1, 1, 1), named
    with pytest.raises(ValueError, match="did you mean 'balanced'"):
        make_plan(Options(partition="balance"), schedule, LayerGraph(layers))
