"""Write docs/optimizers.md: what becomes of every optimizer of optax under a pipeline.

    python docs/make_optimizers.py                 all of them, some minutes
    python docs/make_optimizers.py adamw muon      print the rows of these

Each optimizer makes two steps on a model that is cut over two ranks. The programs of its update are
evaluated and compared with plain optax: parameters and optimizer state, leaf by leaf.
"""

import inspect
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=2")
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
from jax.sharding import Mesh

import octojax as octopipe
from octojax.errors import PlanError
from octojax.update import UpdatePlan, gather_state
from octojax.update.evaluate import evaluate
from octojax.update.plan import End, Role

PAGE = Path(__file__).with_name("optimizers.md")
KINDS = ("plain", "stacked", "tied")
TOLERANCE = 2e-5
WIDTH = 34  # a matrix of this width is larger than what crosses ranks as a small value

# ---------------------------------------------------------------------- optimizers

adam, sgd = optax.scale_by_adam, optax.sgd
schedule = optax.linear_schedule(1e-2, 1e-3, 5)


def matrices(params: Any) -> Any:
    return jax.tree.map(lambda x: x.ndim > 1, params)


def labels(params: Any) -> Any:
    return jax.tree.map(lambda x: "matrix" if x.ndim > 1 else "vector", params)


def by_path(params: Any) -> Any:
    return jax.tree_util.tree_map_with_path(
        lambda path, _: "vector" if "scale" in jax.tree_util.keystr(path) else "matrix", params
    )


def layers(numbers: Any) -> Callable[[Any], Any]:
    return lambda params: jax.tree.map(lambda x: numbers if x.ndim == 3 else None, params)


def with_loss(optimizer: Any) -> Any:
    return optax.chain(optax.sgd(0.1), optimizer)


OPTAX: dict[str, Callable[[], Any]] = {
    "ApplyEvery": lambda: optax.chain(optax.apply_every(2), sgd(0.1)),
    "MultiSteps": lambda: optax.MultiSteps(optax.adamw(1e-2), 2).gradient_transformation(),
    "adabelief": lambda: optax.adabelief(1e-2),
    "adadelta": lambda: optax.adadelta(1e-2),
    "adafactor": lambda: optax.adafactor(1e-2, min_dim_size_to_factor=8),
    "adagrad": lambda: optax.adagrad(1e-2),
    "adam": lambda: optax.adam(1e-2),
    "adamax": lambda: optax.adamax(1e-2),
    "adamaxw": lambda: optax.adamaxw(1e-2, mask=matrices),
    "adamw": lambda: optax.adamw(schedule, weight_decay=1.0, mask=matrices),
    "adan": lambda: optax.adan(1e-2),
    "adaptive_grad_clip": lambda: optax.chain(optax.adaptive_grad_clip(0.01), sgd(0.1)),
    "add_decayed_weights": lambda: optax.chain(optax.add_decayed_weights(0.1, matrices), sgd(0.1)),
    "add_noise": lambda: optax.chain(optax.add_noise(0.01, 0.5, key=3), sgd(0.1)),
    "amsgrad": lambda: optax.amsgrad(1e-2),
    "apply_every": lambda: optax.chain(optax.apply_every(2), sgd(0.1)),
    "apply_if_finite": lambda: optax.apply_if_finite(optax.adam(1e-2), 3),
    "centralize": lambda: optax.chain(optax.centralize(), sgd(0.1)),
    "chain": lambda: optax.chain(optax.clip_by_global_norm(0.1), optax.adam(1e-2)),
    "clip": lambda: optax.chain(optax.clip(1e-3), sgd(0.1)),
    "clip_by_block_rms": lambda: optax.chain(optax.clip_by_block_rms(1e-4), sgd(0.1)),
    "clip_by_global_norm": lambda: optax.chain(optax.clip_by_global_norm(1e-3), sgd(0.1)),
    "conditionally_mask": lambda: optax.conditionally_mask(sgd(0.1), lambda step: step % 2 == 0),
    "conditionally_transform": lambda: optax.chain(
        optax.conditionally_transform(adam(), lambda step: step % 2 == 0), sgd(0.1)
    ),
    "ema": lambda: optax.chain(optax.ema(0.9), sgd(0.1)),
    "flatten": lambda: optax.flatten(optax.adam(1e-2)),
    "freeze": lambda: optax.chain(sgd(0.1), optax.freeze(matrices_frozen)),
    "fromage": lambda: optax.fromage(1e-2),
    "identity": lambda: optax.chain(optax.identity(), sgd(0.1)),
    "inject_hyperparams": lambda: optax.inject_hyperparams(optax.adamw)(learning_rate=schedule),
    "inject_stateful_hyperparams": lambda: optax.inject_stateful_hyperparams(optax.adam)(
        learning_rate=1e-2
    ),
    "keep_params_nonnegative": lambda: optax.chain(sgd(0.1), optax.keep_params_nonnegative()),
    "lamb": lambda: optax.lamb(1e-2, weight_decay=0.1),
    "lars": lambda: optax.lars(1e-2, weight_decay=0.1),
    "lbfgs": lambda: optax.lbfgs(1e-2),
    "lion": lambda: optax.lion(1e-3),
    "lookahead": lambda: optax.lookahead(sgd(0.1), 2, 0.5),
    "masked": lambda: optax.chain(optax.masked(optax.clip(1e-3), matrices), sgd(0.1)),
    "measure_with_ema": lambda: optax.chain(
        optax.monitor({"norm": optax.measure_with_ema(optax.tree.norm, 0.9)}), sgd(0.1)
    ),
    "monitor": lambda: optax.chain(optax.monitor({"norm": optax.tree.norm}), sgd(0.1)),
    "multi_transform": lambda: optax.multi_transform(
        {"matrix": optax.adamw(1e-2), "vector": sgd(0.1)}, labels
    ),
    "nadam": lambda: optax.nadam(1e-2),
    "nadamw": lambda: optax.nadamw(1e-2),
    "named_chain": lambda: optax.named_chain(("a", optax.clip(1.0)), ("b", sgd(0.1))),
    "noisy_sgd": lambda: optax.noisy_sgd(1e-2, key=3),
    "normalize_by_update_norm": lambda: optax.chain(optax.normalize_by_update_norm(), sgd(0.1)),
    "novograd": lambda: optax.novograd(1e-2),
    "optimistic_adam": lambda: optax.optimistic_adam(1e-2),
    "optimistic_adam_v2": lambda: optax.optimistic_adam_v2(1e-2),
    "optimistic_gradient_descent": lambda: optax.optimistic_gradient_descent(1e-2),
    "partition": lambda: optax.partition(
        {"matrix": optax.adafactor(1e-2), "vector": sgd(0.1)}, by_path
    ),
    "polyak_sgd": lambda: optax.polyak_sgd(),
    "radam": lambda: optax.radam(1e-2),
    "rmsprop": lambda: optax.rmsprop(1e-2, centered=True, momentum=0.9),
    "rprop": lambda: optax.rprop(1e-2),
    "scale": lambda: optax.scale(-0.1),
    "scale_by_adadelta": lambda: optax.chain(optax.scale_by_adadelta(), sgd(0.1)),
    "scale_by_adam": lambda: optax.chain(optax.scale_by_adam(), sgd(0.1)),
    "scale_by_adamax": lambda: optax.chain(optax.scale_by_adamax(), sgd(0.1)),
    "scale_by_adan": lambda: optax.chain(optax.scale_by_adan(), sgd(0.1)),
    "scale_by_amsgrad": lambda: optax.chain(optax.scale_by_amsgrad(), sgd(0.1)),
    "scale_by_backtracking_linesearch": lambda: optax.chain(
        sgd(0.1), optax.scale_by_backtracking_linesearch(5)
    ),
    "scale_by_belief": lambda: optax.chain(optax.scale_by_belief(), sgd(0.1)),
    "scale_by_distance_over_gradients": lambda: optax.chain(
        optax.scale_by_distance_over_gradients(), sgd(1.0)
    ),
    "scale_by_factored_rms": lambda: optax.chain(
        optax.scale_by_factored_rms(min_dim_size_to_factor=8), sgd(1e-3)
    ),
    "scale_by_lbfgs": lambda: optax.chain(optax.scale_by_lbfgs(3), sgd(1e-2)),
    "scale_by_learning_rate": lambda: optax.scale_by_learning_rate(schedule),
    "scale_by_lion": lambda: optax.chain(optax.scale_by_lion(), sgd(1e-3)),
    "scale_by_novograd": lambda: optax.chain(optax.scale_by_novograd(), sgd(1e-2)),
    "scale_by_optimistic_gradient": lambda: optax.chain(
        optax.scale_by_optimistic_gradient(), sgd(0.1)
    ),
    "scale_by_param_block_norm": lambda: optax.chain(optax.scale_by_param_block_norm(), sgd(0.1)),
    "scale_by_param_block_rms": lambda: optax.chain(optax.scale_by_param_block_rms(), sgd(0.1)),
    "scale_by_polyak": lambda: optax.chain(optax.scale_by_polyak(), optax.scale(-1.0)),
    "scale_by_radam": lambda: optax.chain(optax.scale_by_radam(), sgd(0.1)),
    "scale_by_rms": lambda: optax.chain(optax.scale_by_rms(), sgd(1e-2)),
    "scale_by_rprop": lambda: optax.chain(optax.scale_by_rprop(1e-2), optax.scale(-1.0)),
    "scale_by_rss": lambda: optax.chain(optax.scale_by_rss(), sgd(0.1)),
    "scale_by_schedule": lambda: optax.chain(optax.scale_by_schedule(schedule), sgd(1.0)),
    "scale_by_sign": lambda: optax.chain(optax.scale_by_sign(), sgd(1e-3)),
    "scale_by_sm3": lambda: optax.chain(optax.scale_by_sm3(), sgd(1e-2)),
    "scale_by_stddev": lambda: optax.chain(optax.scale_by_stddev(), sgd(1e-3)),
    "scale_by_trust_ratio": lambda: optax.chain(optax.scale_by_trust_ratio(), sgd(1e-2)),
    "scale_by_yogi": lambda: optax.chain(optax.scale_by_yogi(), sgd(1e-2)),
    "scale_by_zoom_linesearch": lambda: optax.chain(sgd(0.1), optax.scale_by_zoom_linesearch(5)),
    "selective_transform": lambda: optax.selective_transform(
        optax.adam(1e-2), freeze_mask=matrices_frozen
    ),
    "set_to_zero": lambda: optax.set_to_zero(),
    "sgd": lambda: optax.sgd(0.1, momentum=0.9, nesterov=True),
    "sign_sgd": lambda: optax.sign_sgd(1e-3),
    "signum": lambda: optax.signum(1e-3),
    "sm3": lambda: optax.sm3(1e-2),
    "snapshot": lambda: optax.chain(optax.snapshot("norm", optax.tree.norm), sgd(0.1)),
    "stateless": lambda: optax.stateless(lambda g, _: jax.tree.map(lambda x: -x, g)),
    "stateless_with_tree_map": lambda: optax.stateless_with_tree_map(lambda g, _: -g),
    "trace": lambda: optax.chain(optax.trace(0.9), optax.scale(-0.1)),
    "with_extra_args_support": lambda: optax.with_extra_args_support(optax.adam(1e-2)),
    "yogi": lambda: optax.yogi(1e-2),
    "zero_nans": lambda: optax.chain(optax.zero_nans(), sgd(0.1)),
}
CONTRIB: dict[str, Callable[[], Any]] = {
    "acprop": lambda: optax.contrib.acprop(1e-2),
    "ademamix": lambda: optax.contrib.ademamix(1e-2),
    "adopt": lambda: optax.contrib.adopt(1e-2),
    "cocob": lambda: optax.contrib.cocob(),
    "dadapt_adamw": lambda: optax.contrib.dadapt_adamw(1.0),
    "differentially_private_aggregate": lambda: optax.chain(
        optax.contrib.differentially_private_aggregate(1.0, 0.1, key=3), sgd(0.1)
    ),
    "dog": lambda: optax.contrib.dog(1.0),
    "dowg": lambda: optax.contrib.dowg(1.0),
    "dpsgd": lambda: optax.contrib.dpsgd(0.1, 1.0, 0.1, seed=3),
    "galore": lambda: optax.contrib.galore(1e-2, rank=4),
    "hutchinson_estimator_diag_hessian": lambda: optax.contrib.hutchinson_estimator_diag_hessian(3),
    "madgrad": lambda: optax.contrib.madgrad(1e-2),
    "mechanize": lambda: optax.contrib.mechanize(optax.adam(1e-2)),
    "momo": lambda: optax.contrib.momo(0.1),
    "momo_adam": lambda: optax.contrib.momo_adam(1e-2),
    "muon": lambda: optax.contrib.muon(1e-2),
    "normalize": lambda: optax.chain(optax.contrib.normalize(), sgd(0.1)),
    "prodigy": lambda: optax.contrib.prodigy(1.0),
    "reduce_on_plateau": lambda: with_loss(optax.contrib.reduce_on_plateau(patience=1)),
    "sam": lambda: optax.contrib.sam(sgd(0.1), optax.chain(optax.contrib.normalize(), sgd(0.05))),
    "scale_by_acprop": lambda: optax.chain(optax.contrib.scale_by_acprop(), sgd(1e-2)),
    "scale_by_ademamix": lambda: optax.chain(optax.contrib.scale_by_ademamix(), sgd(1e-2)),
    "scale_by_adopt": lambda: optax.chain(optax.contrib.scale_by_adopt(), sgd(1e-2)),
    "scale_by_cocob": lambda: optax.contrib.scale_by_cocob(),
    "scale_by_galore": lambda: optax.chain(optax.contrib.scale_by_galore(4), sgd(1e-2)),
    "scale_by_madgrad": lambda: optax.contrib.scale_by_madgrad(1e-2),
    "scale_by_muon": lambda: optax.chain(
        optax.masked(optax.contrib.scale_by_muon(weight_dimension_numbers=muon_all), matrices),
        sgd(1e-2),
    ),
    "scale_by_simplified_ademamix": lambda: optax.chain(
        optax.contrib.scale_by_simplified_ademamix(), sgd(1e-2)
    ),
    "schedule_free": lambda: optax.contrib.schedule_free(optax.adam(1e-2, b1=0.0), 1e-2),
    "schedule_free_adamw": lambda: optax.contrib.schedule_free_adamw(1e-2),
    "schedule_free_sgd": lambda: optax.contrib.schedule_free_sgd(0.1),
    "simplified_ademamix": lambda: optax.contrib.simplified_ademamix(1e-2),
    "sophia": lambda: optax.contrib.sophia(1e-2),
    "split_real_and_imaginary": lambda: optax.contrib.split_real_and_imaginary(optax.adam(1e-2)),
}
MUON, GALORE = optax.contrib.MuonDimensionNumbers, optax.contrib.GaLoreDimensionNumbers
RULES: dict[str, Callable[[], Any]] = {
    "adamw, mask by `ndim > 1`": lambda: optax.adamw(1e-2, weight_decay=1.0, mask=matrices),
    "labels by path": lambda: optax.multi_transform(
        {"matrix": optax.contrib.muon(1e-2), "vector": optax.lion(1e-3)}, by_path
    ),
    "Muon, each layer a matrix": lambda: optax.contrib.muon(
        1e-2, muon_weight_dimension_numbers=layers(MUON(1, 2))
    ),
    "Muon, layers among the rows": lambda: optax.contrib.muon(
        1e-2, muon_weight_dimension_numbers=layers(MUON((0, 1), 2))
    ),
    "Muon, each column of all layers a matrix": lambda: optax.contrib.muon(
        1e-2, muon_weight_dimension_numbers=layers(MUON(0, 2))
    ),
    "GaLore, layers among the rows": lambda: optax.contrib.galore(
        1e-2, rank=4, weight_dimension_numbers=layers(GALORE((0, 1), 2))
    ),
    "Adafactor over layers": lambda: optax.adafactor(1e-2, min_dim_size_to_factor=2),
    "sorted along layers": lambda: optax.stateless(
        lambda g, _: jax.tree.map(lambda x: -jnp.sort(x, axis=0) if x.ndim == 3 else -x, g)
    ),
}


def muon_all(params: Any) -> Any:
    return jax.tree.map(lambda x: MUON(x.ndim - 2, x.ndim - 1), params)


def matrices_frozen(params: Any) -> Any:
    return jax.tree.map(lambda x: x.ndim == 1, params)


NO_OPTIMIZERS = frozenset(
    ["bias_correction", "matrix_inverse_pth_root", "schedule_free_eval_params"]
    + ["sigmoid_binary_cross_entropy", "update_infinity_moment", "update_moment"]
    + ["update_moment_per_elem_norm"]
)
"""Functions without a return type that make no optimizer."""


def optimizers_of(module: ModuleType) -> list[str]:
    """Returns the public names of a module that make a gradient transformation.

    By their return type; of functions without one, all but `NO_OPTIMIZERS`.
    """
    names = []
    for name, value in vars(module).items():
        if name.startswith("_") or not inspect.isfunction(value):
            continue
        returns = inspect.signature(value).return_annotation
        untyped = returns is inspect.Signature.empty and name not in NO_OPTIMIZERS
        if untyped or "GradientTransformation" in str(returns):
            names.append(name)
    return sorted(names)


# ---------------------------------------------------------------------- models


@dataclass(frozen=True)
class Model:
    """A model cut over two ranks; its loss is compiled once for all optimizers."""

    pipelined: Any
    value_and_grad: Callable[[Any, Any], tuple[jax.Array, Any]]
    params: Any
    batch: jax.Array


@cache
def model() -> Model:
    """Returns a scanned stack of four layers between a matrix that is used first and last, and a
    plain matrix and vector."""
    keys = jax.random.split(jax.random.key(0), 6)
    params = {
        "tied": jax.random.normal(keys[0], (WIDTH, WIDTH)) / WIDTH**0.5,
        "stacked": {
            "w": jax.random.normal(keys[1], (4, WIDTH, WIDTH)) / WIDTH**0.5,
            "scale": 1 + jax.random.normal(keys[2], (4, WIDTH)) / 8,
        },
        "plain": {
            "w": jax.random.normal(keys[3], (WIDTH, WIDTH)) / WIDTH**0.5,
            "scale": 1 + jax.random.normal(keys[4], (WIDTH,)) / 8,
        },
    }
    batch = jax.random.normal(keys[5], (4, WIDTH))

    def loss(params: Any, batch: Any) -> jax.Array:
        def layer(h: Any, p: Any) -> Any:
            return h + jnp.tanh((h * p["scale"][None]) @ p["w"])

        h = jnp.tanh(batch @ params["tied"])
        h, _ = jax.lax.scan(lambda h, p: (layer(h, p), None), h, params["stacked"])
        return jnp.mean((layer(h, params["plain"]) @ params["tied"].T - 1) ** 2)

    step = octopipe.compile(
        params,
        loss,
        optax.sgd(0.1),
        batch,
        mesh=Mesh(np.array(jax.devices()[:2]), ("pipe",)),
        microbatches=2,
        progress=False,
    )
    assert {unit.index for unit in step.loss.staged.units} >= {None, 0, 1, 2, 3}
    return Model(step.loss, jax.jit(jax.value_and_grad(loss)), params, batch)


# ---------------------------------------------------------------------- verdicts


def verdicts(optimizer: Any) -> list[str]:
    """Returns what becomes of each kind of leaf under an optimizer, in the words of the page."""
    of = model()
    optimizer = optax.with_extra_args_support(optimizer)
    try:
        plan = octopipe.TrainStep(of.pipelined, optimizer).update_plan
    except PlanError as error:
        return [f"refused: {reason(error)}", "refused", "refused"]
    gathers = any(x.moves for x in exchanges(plan))
    right = {"plain": "exact", "stacked": "gathers" if gathers else "rows", "tied": "exact"}
    worst = errors_of(plan, optimizer, of)
    return [
        right[kind] if worst[kind] <= TOLERANCE else f"**differs by {worst[kind]:.0e}**"
        for kind in KINDS
    ]


def exchanges(plan: UpdatePlan) -> Iterator[Any]:
    for phase in (*plan.init.phases, *plan.update.phases):
        if phase.exchange is not None:
            yield phase.exchange


def reason(error: PlanError) -> str:
    """Returns a refusal in a few words."""
    cause = error.__cause__
    if "another structure" in str(error):
        return "its state changes its structure"
    if cause is None:
        return "one operation takes large values of several leaves"
    text = " ".join(str(cause).split())
    return f"{type(cause).__name__}: {text[:80]}{'...' if len(text) > 80 else ''}"


def errors_of(plan: UpdatePlan, optimizer: Any, of: Model) -> dict[str, float]:
    """Returns, by kind of leaf, the largest error of parameters and state after two steps,
    relative to each leaf's largest value."""
    params, state = of.params, optimizer.init(of.params)
    inputs = {End(Role.PARAM, i): x for i, x in enumerate(pieces(params, plan))}
    outputs = evaluate(plan.init, inputs)
    worst = dict.fromkeys(KINDS, 0.0)
    compare(user_state(plan, outputs), state, worst)
    for _ in range(2):
        value, grads = of.value_and_grad(params, of.batch)
        inputs = {End(Role.GRAD, i): x for i, x in enumerate(pieces(grads, plan))}
        inputs |= {End(Role.PARAM, i): x for i, x in enumerate(pieces(params, plan))}
        inputs |= {
            End(Role.STATE, end.index): x
            for end, x in outputs.items()
            if end.role is Role.NEW_STATE
        }
        inputs[End(Role.EXTRA, 0)] = value
        outputs = evaluate(plan.update, inputs)
        updates, state = optimizer.update(grads, state, params, value=value)
        params = optax.apply_updates(params, updates)
        new = [outputs[End(Role.NEW_PARAM, i)] for i in range(len(plan.param_pieces))]
        compare(user_params(plan, new), params, worst)
        compare(user_state(plan, outputs), state, worst)
    return worst


def user_params(plan: UpdatePlan, new: list[Any]) -> Any:
    leaves: list[list[Any]] = [[] for _ in plan.param_layouts]
    for piece, value in zip(plan.param_pieces, new, strict=True):
        leaves[piece.leaf].append(value)
    whole = [np.stack(x) if len(x) > 1 else x[0] for x in leaves]
    return plan.params_tree.unflatten(whole)


def pieces(tree: Any, plan: UpdatePlan) -> list[Any]:
    leaves = jax.tree.leaves(tree)
    return [leaves[p.leaf] if p.row is None else leaves[p.leaf][p.row] for p in plan.param_pieces]


def user_state(plan: UpdatePlan, outputs: dict[End, Any]) -> Any:
    held = [[outputs[End(Role.NEW_STATE, k)] for k in plan.states_on(r)] for r in range(2)]
    return gather_state(plan, tuple(map(tuple, held)))


def compare(got: Any, expected: Any, worst: dict[str, float]) -> None:
    """Raises the errors in `worst` to those of these trees; what is of no leaf counts for all."""
    assert jax.tree.structure(got) == jax.tree.structure(expected)
    paths = jax.tree_util.tree_leaves_with_path(expected)
    for a, (path, b) in zip(jax.tree.leaves(got), paths, strict=True):
        if jnp.issubdtype(b.dtype, jax.dtypes.prng_key):
            a, b = jax.random.key_data(a), jax.random.key_data(b)
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        scale = max(float(np.max(np.abs(b), initial=0.0)), 1e-30)
        error = float(np.max(np.abs(a - b), initial=0.0)) / scale
        text = jax.tree_util.keystr(path)
        for kind in [k for k in KINDS if k in text] or KINDS:
            worst[kind] = max(worst[kind], error)


# ---------------------------------------------------------------------- the page

HEAD = """# Optimizers under a pipeline

Written by `python docs/make_optimizers.py`. Every optimizer of optax makes two steps on a model
that is cut over two ranks. It has a *plain* matrix and vector, a *stacked* matrix and vector (four
layers in a scan, on both ranks), and a *tied* matrix that the first and the last stage use.
Parameters and optimizer state are compared with those of plain optax.

- **exact**: the update of plain optax, to float32 rounding.
- **rows**: the same for a stacked leaf, whose rows are updated on their ranks; sums over the leaf
  cross ranks as scalars.
- **gathers**: the same; a stacked leaf is brought to one rank, updated there, and sent back.
- **refused**: `compile` says so by name.

An optimizer is traced over your whole tree, so that masks, labels, paths and shapes are yours.
A step passes it gradients, state, parameters and `value` (the loss), and nothing else.
"""


def rows(table: dict[str, Callable[[], Any]], names: list[str] | None = None) -> Iterator[str]:
    """Yields the lines of a table."""
    yield "| optimizer | " + " | ".join(KINDS) + " |"
    yield "|---" * (1 + len(KINDS)) + "|"
    for name in table if names is None else names:
        cells = [cell.replace("|", "\\|") for cell in verdicts(table[name]())]
        label = f"`{name}`" if table is not RULES else name
        yield f"| {label} | " + " | ".join(cells) + " |"


def page() -> str:
    """Returns the whole page."""
    sections = [HEAD]
    for title, table in (
        ("Rules about leaves", RULES),
        ("optax", OPTAX),
        ("optax.contrib", CONTRIB),
    ):
        sections.append(f"## {title}\n\n" + "\n".join(rows(table)) + "\n")
    return "\n".join(sections)


def main() -> None:
    warnings.simplefilter("ignore")
    if len(sys.argv) == 1:
        PAGE.write_text(page(), encoding="utf-8")
        return
    for table in (RULES, OPTAX, CONTRIB):
        known = [name for name in sys.argv[1:] if name in table]
        for at, line in enumerate(rows(table, known)):
            if at > 1:
                print(line, flush=True)


if __name__ == "__main__":
    main()
