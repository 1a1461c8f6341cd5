"""What users of other pipelines met, tried here: one test per case, named after its thread.

Cases with a test elsewhere:

    pytorch#127332           1F1B deadlocks naively  tests/ir/test_verify.py
    torchtitan#775           m < p, all figures      tests/simulate/test_published_figures.py
    Megatron-LM#1450         any delivery order      tests/executor/test_run.py
    torchtitan#803           overflow, any optimizer tests/update/test_update_skip_and_errors.py
    Megatron-LM#468          80 layers, 32 stages    tests/partitioners/test_partitioners.py
    DeepSpeed#5078, #1378    5 equal, heavy head     tests/partitioners, tests/simulate (makespans)
    NeMo-Speech#14288        the nearest valid m     tests/schedules/test_records.py
    alpa#829                 every table with m = 1  tests/schedules/test_closed_forms.py
    zero-bubble#8            limits per rank         tests/schedules/test_searched.py, tune
    pytorch#136766           two peaks of a ZB table tests/simulate/test_published_figures.py
    algolocal#95, zb#18, #73 bubbles, drawings, CSV  tests/simulate, tests/report, tests/ir
    torchgpipe#14            batch norm              tests/executor, tests/checkpoint
    DeepSpeed#5696           another sequence length tests/test_api.py (another shape)
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh

import octojax as octopipe
from octojax.api.options import Options
from octojax.api.pipelined import PipelinedLoss
from octojax.api.reference import by_microbatches, reference
from octojax.errors import PlanError
from octojax.frontends import adapt
from octojax.ir import Placement, Schedule
from octojax.ir.verify import naive_deadlock, verify
from octojax.schedules import SCHEDULES, generate
from octojax.simulate import StageCosts, simulate
from tests.pipelines import FAST, case_of, compiled, pipe, relative_error
from tests.zoo.case import Case, D, mse, weights

Batch = dict[str, jax.Array]


def rows_of(size: int = 8) -> Batch:
    rng = np.random.default_rng(3)
    return {k: jnp.asarray(rng.normal(size=(size, D)), jnp.float32) for k in "xy"}


def dense(n: int) -> list[jax.Array]:
    return [weights(i, w=(D, D))["w"] for i in range(n)]


def dense_loss(params: list[jax.Array], batch: Batch) -> jax.Array:
    h = batch["x"]
    for w in params:
        h = jnp.tanh(h @ w)
    return mse(h, batch["y"])


def pipelined(
    params: Any,
    loss_fn: Any,
    batch: Any,
    ranks: int,
    microbatches: int,
    schedule: Any = "1f1b",
    *,
    compiler_options: dict[str, Any] = FAST,
    **options: Any,
) -> PipelinedLoss:
    """Returns the loss cut into stages; it compiles when it first runs."""
    chosen = Options(
        microbatches,
        schedule,
        progress=False,
        compiler_options=compiler_options,
        **options,
    )
    return PipelinedLoss(adapt(params, loss_fn), batch, chosen, pipe(ranks))


def result(loss: PipelinedLoss, batch: Any) -> tuple[Any, Any]:
    """Returns value and gradients of one batch."""
    held = loss.place(loss.source())
    found, value, _ = loss.run(loss.trainer, held, batch)
    loss.trainer.engine.close()
    return value, loss.tree(loss.filled(found))


def assert_oracle(
    params: Any, loss_fn: Any, batch: Any, *sizes: Any, **options: Any
) -> PipelinedLoss:
    """Asserts value and gradients of `jax.value_and_grad` on the full batch, to 1e-5."""
    loss = pipelined(params, loss_fn, batch, *sizes, **options)
    wanted = jax.jit(jax.value_and_grad(loss_fn))(params, batch)
    assert relative_error(result(loss, batch), wanted) < 1e-5
    return loss


# ------------------------------------------------------------------ sums


def summed_loss(params: list[jax.Array], batch: Batch) -> tuple[jax.Array, dict[str, jax.Array]]:
    h = batch["x"]
    for w in params:
        h = jnp.tanh(h @ w)
    wrong = (h - batch["y"]) ** 2
    return wrong.sum(), {"mean": wrong.mean()}


@pytest.mark.parametrize("shards", [1, 2])
def test_a_loss_that_is_a_sum(shards):
    """Unequal microbatches add up, also over a data axis; what else is returned is joins, too."""
    batch, params = rows_of(10), dense(4)
    mesh = Mesh(np.array(jax.devices()[: 2 * shards]).reshape(2, shards), ("pipe", "data"))
    options = Options(3 if shards == 1 else 2, progress=False)
    loss = PipelinedLoss(adapt(params, summed_loss), batch, options, mesh)
    held = loss.place(loss.source())
    found, value, aux = loss.run(loss.trainer, held, batch)
    loss.trainer.engine.close()
    wanted = jax.value_and_grad(lambda p: summed_loss(p, batch)[0])(params)
    assert relative_error((value, loss.tree(loss.filled(found))), wanted) < 1e-5
    assert relative_error(aux["mean"], summed_loss(params, batch)[1]["mean"]) < 1e-5
    assert relative_error(reference(loss.whole, params, {}, batch)[0], value) < 1e-5


def test_a_reduction_that_is_neither():
    with pytest.raises(ValueError, match=r"reduction = 'total', expected 'mean'.*or 'sum'"):
        Options(2, reduction="total")


# ------------------------------------------------------------------ A. order and hangs


@pytest.mark.parametrize(
    ("name", "ranks", "microbatches", "chunks"),
    [
        ("interleaved", 2, 4, 2),
        ("interleaved", 4, 8, 2),
        ("zb-v", 4, 8, 2),
        ("dualpipe-v", 4, 10, 2),
        ("looped-bfs", 4, 8, 2),
    ],
)
def test_pytorch_172668_receive_just_before_use(name, ranks, microbatches, chunks):
    """The naive order hangs, at named operations; our order of the same table does not."""
    table = generate(name, ranks, microbatches, chunks)
    stuck = naive_deadlock(table)
    assert len(stuck) > 1
    assert all("SEND" in str(s.item) or "RECV" in str(s.item) for s in stuck)
    assert_oracle(dense(2 * ranks), dense_loss, rows_of(microbatches), ranks, microbatches, table)


def test_megatron_1852_a_stage_without_layers():
    with pytest.raises(PlanError, match=r"partition \[2 0 1 1\] leaves stage \[1\] empty"):
        pipelined(dense(4), dense_loss, rows_of(), 4, 4, partition=(2, 0, 1, 1))


def test_more_stages_than_layers():
    with pytest.raises(
        PlanError, match=r"8 stages, but the model has only 4 layer.*Use jax.vmap over"
    ):
        pipelined(dense(4), dense_loss, rows_of(), 4, 4, "interleaved", chunks=2)


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_deepspeed_1522_a_stage_without_parameters(schedule):
    def loss(params, batch):
        h = octopipe.boundary(jnp.tanh(batch["x"] @ params[0]))
        h = octopipe.boundary(jnp.tanh(h @ params[1]))
        h = octopipe.boundary(jnp.sin(h))
        return mse(jnp.tanh(h @ params[2]), batch["y"])

    found = assert_oracle(dense(3), loss, rows_of(), 4, 4, schedule)
    assert found.plan.partition.sizes == (1, 1, 1, 1)
    assert found.stages[0][2].weight_grad is None


def test_torchtitan_775_fewer_microbatches_than_ranks():
    rows = str(generate("1f1b", 4, 2)).split("\n")
    assert rows[0] == "0F0 0F1 0B0 0B1"
    assert rows[3] == "3F0 3B0 3F1 3B1"


# ------------------------------------------------------------------ B. gradients


@pytest.mark.parametrize(("schedule", "ranks"), [("1f1b", 4), ("zb-v", 2), ("chimera", 2)])
def test_pytorch_51931_embedding_tied_with_the_head(schedule, ranks):
    """One sum of both uses; copies stay bit-equal; counted once in the norm."""
    case = case_of("tied-lm")
    batch = case.batch(8)
    step = compiled(case, schedule, ranks, 4)
    state = step.init()
    params = case.model
    gradient = jax.jit(jax.grad(lambda p: case.loss_fn(p, batch)[0]))
    for _ in range(3):
        state, metrics = step(state, batch)
        grads = gradient(params)
        params = jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)
    assert relative_error(step.params(state), params) < 1e-5
    assert relative_error(metrics["grad_norm"], optax.tree.norm(grads)) < 1e-5
    transfers = [t for t in step.loss.lowered.step.transfers if t.kind == "P"]
    assert bool(transfers) is (schedule != "zb-v")  # the V holds both uses on rank 0
    for transfer, copies in zip(transfers, state.model.copies, strict=True):
        for unit, copy in zip(transfer.parts, copies, strict=True):
            np.testing.assert_array_equal(copy, state.model.units[unit])


def test_pytorch_180952_a_weight_used_twice_under_split_backward():
    w = jnp.array([[0.4, -0.2], [0.7, 0.3]])
    x = jnp.array([[1.1, -0.7]])
    params = {"w": w, "x": x}
    loss = pipelined(
        params, lambda p, b: jnp.sum(b * p["x"] @ p["w"] @ p["w"]), x / x, 1, 1, "zb-h1"
    )
    assert str(loss.plan.schedule) == "0F0 0I0 0W0"
    _, grads = result(loss, x / x)
    np.testing.assert_allclose(grads["w"], [[0.17, 1.05], [-0.57, -1.13]], rtol=1e-5)
    np.testing.assert_allclose(grads["x"], [[-0.12, 0.44]], rtol=1e-5)


def test_pytorch_166577_a_layer_with_a_derivative_of_its_own():
    case = case_of("custom-rules")
    assert_oracle(case.model, case.loss_fn, case.batch(8), 2, 4, "zb-h1")


@pytest.mark.parametrize(("schedule", "microbatches"), [("1f1b", 1), ("gpipe", 4), ("zb-h1", 8)])
def test_torchtitan_1733_accumulation_scales_once(schedule, microbatches):
    """Two accumulated batches give the step of their mean, for any number of microbatches."""
    optimizer = optax.MultiSteps(optax.chain(optax.clip_by_global_norm(0.01), optax.sgd(0.1)), 2)
    first, second = rows_of(16), {}
    first, second = ({k: v[i : i + 8] for k, v in first.items()} for i in (0, 8))
    step = octopipe.compile(
        dense(4), dense_loss, optimizer, first, mesh=pipe(2), schedule=schedule,
        microbatches=microbatches, progress=False, compiler_options=FAST,
    )  # fmt: skip
    state, _ = step(step.init(), first)
    assert relative_error(step.params(state), dense(4)) == 0
    state, _ = step(state, second)
    both = jax.tree.map(lambda a, b: jnp.concatenate([a, b]), first, second)
    grads = jax.grad(dense_loss)(dense(4), both)
    scale = 0.1 * min(1.0, 0.01 / float(optax.tree.norm(grads)))
    wanted = jax.tree.map(lambda p, g: p - scale * g, dense(4), grads)
    assert relative_error(step.params(state), wanted) < 1e-6


def test_zero_bubble_16_overflow_on_one_stage_skips_the_step_on_all():
    step = octopipe.compile(
        dense(4),
        lambda p, b: dense_loss(p, b) * b["scale"],
        optax.apply_if_finite(optax.sgd(0.1), 9),
        {**rows_of(), "scale": jnp.float32(1)},
        mesh=pipe(4),
        schedule="zb-h2",
        microbatches=8,
        progress=False,
        compiler_options=FAST,
    )
    state, _ = step(step.init(), {**rows_of(), "scale": jnp.float32(np.inf)})
    jax.tree.map(np.testing.assert_array_equal, step.params(state), dense(4))
    state, metrics = step(state, {**rows_of(), "scale": jnp.float32(1024)})
    assert np.isfinite(metrics["grad_norm"])
    assert relative_error(step.params(state), dense(4)) > 0


# ------------------------------------------------------------------ C. partition, placement


def test_megatron_1304_thirty_layers_on_four_stages():
    loss = pipelined(dense(30), dense_loss, rows_of(), 4, 8)
    assert sorted(loss.plan.partition.sizes) == [7, 7, 8, 8]
    assert [n for stage in loss.stages[0] for n in stage.layers] == list(range(30))
    read = [
        {r.index for r in stage.forward.reads if r.role.name == "PARAM"} for stage in loss.stages[0]
    ]
    assert [len(units) for units in read] == list(loss.plan.partition.sizes)


PLACED = [0, 1, 1, 0, 2, 3, 3, 2]


def hybrid() -> Case:
    """Twelve layers M M A F, repeated: a recurrence, attention over rows' halves, a dense one."""
    params = [weights(i, w=(D, D)) for i in range(12)]

    def loss(params: Any, batch: Batch) -> jax.Array:
        h = batch["x"]
        for i, p in enumerate(params):
            if i % 4 < 2:
                h = h + jax.nn.silu(jnp.cumsum(h, axis=-1) @ p["w"])
            elif i % 4 == 2:
                parts = (h @ p["w"]).reshape(-1, 2, D // 2)
                scores = jax.nn.softmax(jnp.einsum("rid,rjd->rij", parts, parts))
                h = h + jnp.einsum("rij,rjd->rid", scores, parts).reshape(-1, D)
            else:
                h = h + jnp.tanh(h @ p["w"])
        return mse(h, batch["y"])

    return Case("hybrid", params, loss, rows_of, layers=12)


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_megatron_1856_a_users_placement_of_a_hybrid_model(schedule):
    case = hybrid()
    loss = assert_oracle(
        case.model, case.loss_fn, rows_of(), 4, 8, schedule, placement=tuple(PLACED)
    )
    assert loss.plan.placement == Placement.of(PLACED)
    assert loss.plan.partition.num_layers == 12


@pytest.mark.parametrize("name", [n for n in SCHEDULES if n not in ("dualpipe", "chimera")])
@pytest.mark.parametrize(
    "placement", [PLACED, [3, 2, 1, 0], [0, 0, 1, 1, 2, 2, 3, 3], [0, 1, 2, 3, 0, 1, 2]]
)
def test_every_schedule_is_laid_out_for_any_placement(name, placement):
    for microbatches in (1, 3, 8):
        table = generate(name, 4, microbatches, placement=placement)
        verify(table, microbatches, len(placement))
        assert table.placement == Placement.of(placement)


def test_a_placement_with_its_ranks_renamed_keeps_the_published_rows():
    own = generate("interleaved", 4, 8, 2)
    renamed = generate("interleaved", 4, 8, 2, placement="2 0 3 1 2 0 3 1")
    assert [renamed.ranks[r] for r in (2, 0, 3, 1)] == list(own.ranks)
    again = generate("dualpipe", 4, 8, placement=str(generate("dualpipe", 4, 8).placement))
    assert again == generate("dualpipe", 4, 8)


def test_orders_for_other_placements_are_no_worse_than_one_stage_after_another():
    work = 8 * 8 * 3
    for name, most in (("1f1b", 67), ("zb-h1", 53), ("gpipe", 65)):
        makespan = simulate(generate(name, 4, 8, placement=PLACED), StageCosts.unit(8)).makespan_s
        assert work / 4 < makespan <= most


def test_placements_that_cannot_be():
    with pytest.raises(ValueError, match=r"\[0 1 5\] names rank 5, but there are 4 ranks"):
        generate("1f1b", 4, 8, placement=[0, 1, 5])
    with pytest.raises(ValueError, match="Place each stage once with '1f1b'"):
        generate("dualpipe", 4, 8, placement=PLACED)
    with pytest.raises(ValueError, match=r"chunks=1 on 4 ranks are 4 stages, but .* has 8"):
        generate("1f1b", 4, 8, 1, placement=PLACED)
    with pytest.raises(ValueError, match="a rank per stage, such as"):
        generate("1f1b", 4, 8, placement=5)
    with pytest.raises(PlanError, match=r"'auto' searches .* placement=\(1, 0\) was given"):
        pipelined(dense(4), dense_loss, rows_of(), 2, 2, "auto", placement=(1, 0))


def test_a_rank_without_a_stage_is_warned_about_and_idles():
    with pytest.warns(UserWarning, match=r"\[0 1 1 3\] leaves rank 2 of 4 without a stage"):
        assert_oracle(dense(4), dense_loss, rows_of(), 4, 3, placement=(0, 1, 1, 3))


def test_alpa_829_one_microbatch():
    for name in ("gpipe", "1f1b"):
        assert simulate(generate(name, 2, 1), StageCosts.unit(2)).makespan_s == 6
    assert_oracle(dense(4), dense_loss, rows_of(), 2, 1, "zb-v")


# ------------------------------------------------------------------ D. shapes and dtypes


def test_pytorch_126600_eight_rows_in_three_microbatches():
    loss = assert_oracle(dense(2), dense_loss, rows_of(), 2, 3)
    assert loss.batch.sizes == (3, 3, 2)
    parts = [{k: v[a:b] for k, v in rows_of().items()} for a, b in ((0, 3), (3, 6), (6, 8))]
    unweighted = np.mean([dense_loss(dense(2), p) for p in parts])
    assert abs(unweighted - float(dense_loss(dense(2), rows_of()))) > 1e-3


def test_megatron_1402_bfloat16_stream_float32_residual_and_integer_route():
    """Bit-equal to one device, once XLA may not compute bfloat16 wider inside one program.

    With that freedom (the default) programs of other extents round at other places; so does the
    full batch, whose weight gradients are rounded once, not once per microbatch: 2^-8 apart.
    """
    case = case_of("mixed-dtypes")
    strict = {**FAST, "xla_allow_excess_precision": False}
    batch = case.batch(8)
    loss = pipelined(
        case.model, case.loss_fn, batch, 2, 2, "zb-h1", compiler_options=strict, partition=(2, 2)
    )
    border = [
        aval.dtype.name
        for ref, aval in zip(
            loss.stages[0][0].forward.writes, loss.stages[0][0].forward.jaxpr.out_avals, strict=True
        )
        if ref.role.name == "OUTPUT"
    ]
    assert sorted(border) == ["bfloat16", "float32", "int32"]
    back = loss.stages[0][1].input_grad
    assert back is not None
    sent = [
        aval.dtype.name
        for ref, aval in zip(back.writes, back.jaxpr.out_avals, strict=True)
        if ref.role.name == "INPUT_GRAD"
    ]
    assert sorted(sent) == ["bfloat16", "float32"]  # nothing for the integers
    found = result(loss, batch)
    full = jax.value_and_grad(lambda p: case.loss_fn(p, batch)[0], allow_int=True)(case.model)
    assert relative_error(found, full) < 2**-7
    pure = case.pure()
    plain = jax.jit
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jax, "jit", lambda f: plain(f, compiler_options=strict))
        value, _, grads, _ = by_microbatches(loss.whole, pure.params, pure.state, batch)
    assert relative_error(found, (value, grads)) == 0


@pytest.mark.parametrize(("schedule", "ranks"), [("1f1b", 4), ("zb-v", 2)])
def test_pytorch_127964_a_skip_and_a_mask_from_the_first_stage_to_the_last(schedule, ranks):
    def loss(params, batch):
        first = h = jnp.tanh(batch["x"] @ params[0])
        mask = first > 0
        for w in params[1:3]:
            h = jnp.tanh(h @ w)
        return mse(jnp.tanh(h @ params[3]) + jnp.where(mask, first, 0.0), batch["y"])

    found = assert_oracle(dense(4), loss, rows_of(), ranks, 4, schedule)
    from octojax.api.report import report

    middle = report(found).stages[1]
    assert middle.output_bytes >= 2 * 2 * D * 4  # the stream and what it carries past


def test_batches_of_tuples_scalars_and_keys():
    def loss(params, batch):
        (x, y), scale, key, positions = batch
        angle = positions[:, None] * jnp.arange(1, D // 2 + 1, dtype=jnp.float32)[None]
        h = x * scale + 0.0 * jax.random.normal(key)
        for w in params:
            a, b = jnp.split(h @ w, 2, axis=-1)
            turned = (
                a * jnp.cos(angle) - b * jnp.sin(angle),
                a * jnp.sin(angle) + b * jnp.cos(angle),
            )
            h = jnp.tanh(jnp.concatenate(turned, axis=-1))
        return mse(h, y)

    data = rows_of()
    batch = (
        (data["x"], np.asarray(data["y"])),
        0.5,
        jax.random.key(0),
        jnp.arange(8, dtype=jnp.float32),
    )
    assert_oracle(dense(4), loss, batch, 2, 3, "zb-h1")


def test_a_given_partition_says_how_many_layers_to_look_for():
    """Where the finder would join some, as many as the sizes add up to are found."""
    case = case_of("mixed-dtypes")
    for sizes in ((2, 2), "2 2"):
        loss = pipelined(case.model, case.loss_fn, case.batch(8), 2, 2, partition=sizes)
        assert loss.plan.partition.sizes == (2, 2)
    again = pipelined(case.model, case.loss_fn, case.batch(8), 2, 2, plan=loss.plan)
    assert again.plan == loss.plan
    with pytest.raises(PlanError, match=r"partition \[2 2\], asked for was \[3 1\]"):
        pipelined(case.model, case.loss_fn, case.batch(8), 2, 2, plan=loss.plan, partition=(3, 1))


def test_deepspeed_3195_another_sequence_length():
    case = case_of("tied-lm")
    loss = pipelined(case.model, case.loss_fn, case.batch(8), 2, 4)
    short = jax.tree.map(lambda x: x[:, :4], case.batch(8))
    with pytest.raises(ValueError, match=r"inputs is int32\[8, 4\], compiled for int32\[8, 6\]"):
        loss.batch_leaves(short)


def test_frozen_parameters_and_penalties_over_all_stages():
    def loss(params, batch):
        penalty = sum(jnp.sum(w * w) for w in params[1:])
        return dense_loss([jax.lax.stop_gradient(params[0]), *params[1:]], batch) + 0.01 * penalty

    assert_oracle(dense(4), loss, rows_of(), 4, 3, "zb-h1")


# ------------------------------------------------------------------ E. use of a step


def test_a_state_that_a_step_has_taken_over_is_refused():
    step = compiled(case_of("toy"), "1f1b", 1, 2)
    state = step.init()
    batch = case_of("toy").batch(8)
    with pytest.raises(TypeError, match=r"called inside jax\.jit"):
        jax.jit(lambda state: step(state, batch)[1])(state)
    step(state, batch)
    with pytest.raises(ValueError, match="given to an earlier step"):
        step(state, batch)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"microbatches": 2.0}, TypeError, "microbatches=2.0, expected a whole number"),
        ({"microbatches": 0}, ValueError, "microbatches = 0, expected a number >= 1"),
        ({"schedule": 7}, TypeError, "schedule=7, expected a name, a table"),
        ({"plan": "plan.json"}, TypeError, r"an octopipe.Plan \(Plan.load reads a file\)"),
        ({"partition": 5}, TypeError, "partition=5, expected 'balanced'"),
        ({"timeout_s": -1}, ValueError, "timeout_s = -1, expected seconds > 0"),
    ],
)
def test_options_of_the_wrong_form(options, error, message):
    with pytest.raises(error, match=message):
        Options(**options)


def test_a_skewed_mesh_and_a_table_without_a_mesh():
    """A placement alone says how many devices are wanted."""
    loss = PipelinedLoss(
        adapt(dense(4), dense_loss), rows_of(), Options(2, placement="1 0", progress=False)
    )
    assert loss.mesh.num_ranks == 2
    reverse = Mesh(np.array(jax.devices()[1::-1]), ("pipe",))
    table = Schedule.parse("1F0 1B0 1F1 1B1\n0F0 0F1 0B0 0B1")
    chosen = Options(2, table, progress=False, compiler_options=FAST)
    loss = PipelinedLoss(adapt(dense(4), dense_loss), rows_of(), chosen, reverse)
    wanted = jax.value_and_grad(dense_loss)(dense(4), rows_of())
    assert relative_error(result(loss, rows_of()), wanted) < 1e-5
