"""`octopipe.compile` and the training step that it returns."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property, wraps
from pathlib import Path
from typing import Any, Literal, TypeVar, overload

import jax
import optax

from octojax import compat
from octojax.api import saving
from octojax.api.adoption import adopt
from octojax.api.opt_state import opt_state_of, with_hyperparams
from octojax.api.optimizer_bytes import optimizer_bytes_per_rank
from octojax.api.options import options_of
from octojax.api.origin import Origin, origin_of
from octojax.api.pipelined import ModelValues, PipelinedLoss
from octojax.api.reference import per_microbatch, reference
from octojax.api.rehearsal import Rehearsal, rehearse
from octojax.api.report import StepReport, report
from octojax.api.state_layout import check_alive
from octojax.api.structure import refuse_changed
from octojax.api.update_plan import update_of
from octojax.arrays import local, put
from octojax.errors import ExecutionError, NonFiniteError
from octojax.executor.engine import Results
from octojax.executor.recorded import Ledger, Recorder, timeline_of
from octojax.executor.update import Update, values_of
from octojax.frontends import adapt, is_constructor
from octojax.ir import LayerGraph, LoweredPlan, Machine, Plan, Timeline
from octojax.ir.exchange import end_rows, with_update
from octojax.ir.shown import count, line, picture
from octojax.processes import call
from octojax.programs.recipe import stored
from octojax.update import GRAD_NORM, Places, UpdatePlan
from octojax.update.state import piece_aval


@dataclass(frozen=True)
class TrainState:
    """Parameters, module state and optimizer state, each on its rank's devices; a pytree.

    `step` counts the calls that made it. `origin` is that of the step that it fits. A step takes
    over the buffers of the state it gets (donation).
    """

    model: ModelValues
    opt_state: Any
    step: int
    origin: Origin

    def __repr__(self) -> str:
        groups = [jax.tree.leaves(x) for x in (self.model.units, self.opt_state)]
        arrays, optimizer = (sum(getattr(x, "nbytes", 0) for x in leaves) for leaves in groups)
        return line("TrainState", "", (
            f"step {self.step}",
            f"{count(len(groups[0]), 'array')} of the model ({arrays:,} bytes)",
            f"{count(len(groups[1]), 'array')} of the optimizer ({optimizer:,} bytes)",
            "" if self.is_alive() else "whose buffers a later step has taken over",
        ))  # fmt: skip

    def is_alive(self) -> bool:
        """Whether no step has taken over its buffers."""
        leaves = jax.tree.leaves((self.model.units, self.opt_state))
        return not any(isinstance(leaf, jax.Array) and leaf.is_deleted() for leaf in leaves)


jax.tree_util.register_dataclass(
    TrainState, data_fields=["model", "opt_state"], meta_fields=["step", "origin"]
)


Method = TypeVar("Method", bound=Callable[..., Any])


def _alike(topic: str) -> Callable[[Method], Method]:
    """Marks a method of a state that all processes call alike, in the same order."""

    def decorate(method: Method) -> Method:
        @wraps(method)
        def called(self: "TrainStep", state: TrainState, *args: Any, **options: Any) -> Any:
            with call(f"{topic} {getattr(state, 'step', '?')}"):
                return method(self, state, *args, **options)

        return called  # type: ignore[return-value]

    return decorate


class TrainStep:
    """A compiled pipeline step: `state, metrics = step(state, batch)`.

    Calls from several threads run one after the other. A call that is interrupted leaves its
    state whole, or what it made can be had by `recover()`. `with octopipe.compile(...) as step:`
    closes it at the end; see `close`.

    `metrics` are `loss` (of the whole batch), `grad_norm` (over all stages) and, where the loss
    returns any, `aux`, joined by what its leaves depend on, or as `aux=` says; see
    docs/exactness.md.
    """

    def __init__(self, loss: PipelinedLoss, optimizer: optax.GradientTransformation) -> None:
        self.loss, self.optimizer = loss, optimizer
        self._ledger = Ledger()
        self._newest: tuple[TrainState, dict[str, Any]] | None = None

    def __repr__(self) -> str:
        devices = [str(device) for rank in self.loss.mesh.ranks for device in rank.devices]
        listed = devices if len(devices) <= 4 else [*devices[:2], "...", devices[-1]]
        return line("TrainStep", "", (f"on {' '.join(listed)}", repr(self.plan)))

    def _repr_html_(self) -> str | None:
        return picture(self.plan)

    @property
    def plan(self) -> Plan:
        return self.loss.plan

    @cached_property
    def lowered(self) -> LoweredPlan:
        """Everything that every rank executes in a step, in order; `print` it."""
        plan = self.loss.lowered.plan
        own = self.update_plan is self.loss.update
        return plan if own else with_update(plan, self.update_plan.update.outline)

    @property
    def layers(self) -> LayerGraph:
        return self.loss.layers

    @property
    def report(self) -> StepReport:
        """What was compiled, what crosses stages, what is kept."""
        return report(self.loss, self.update.num_programs)

    # ------------------------------------------------------------------ training

    def init(self, params: Any = None, state: Any = None) -> TrainState:
        """Returns the first training state: the model's own values, or those given.

        `params` is a tree like that of the compiled parameters, or the user's whole model (an nnx
        module, linen variables), which brings its state along unless `state` says other. Leaves
        are found by their paths, whatever the containers. Raises `ValueError` listing all that
        are missing, that the model does not have, or that have another shape or type;
        `TypeError` for a training state.

        Of a model that was compiled as a function, every rank makes its own leaves alone. `params`
        (and `state`) may also be a reader, a function from the path of a leaf to something with
        `shape`, `dtype` and `[index]` (`np.memmap`, `h5py.Dataset`, ...), of which every rank reads
        its own slices; it raises `KeyError` for a path that it lacks. See docs/scale.md.
        """
        if isinstance(params, TrainState):
            raise TypeError(
                "params is a training state, expected the model's parameters. step.adopt(state) "
                "takes over the state of another step; step.params(state) are its parameters"
            )
        pure = self.loss.pure
        whole = None if params is None or is_constructor(params) else pure.split(params)
        if whole is not None:
            params = whole[0]
            state = whole[1] or None if state is None else state
        with call("init"):
            source = self.loss.source(params, state)
            self.loss.agree_on(params, state, "the first parameters")
            model = self.loss.place(source)
            return self.renewed(model, self.first_opt_state(model), 0)

    @_alike("adoption of step")
    def adopt(self, state: TrainState, *, reset_optimizer: bool = False) -> TrainState:
        """Returns the state of another step of the same model, placed as this step's plan says.

        Parameters, module state and optimizer state are the same to the bit, and `state` stays
        usable. Parameters go by their paths. The optimizer must keep the same leaves (another
        learning rate is the same optimizer), unless `reset_optimizer` begins a new state. Several
        processes: all of them call this.

        Raises `ValueError` listing the leaves that are not those of this step's model, or naming
        both optimizers.
        """
        _expect_kind(state)
        return self.loss.calls.run(lambda: adopt(self, state, reset_optimizer), "adopt")

    def first_opt_state(self, model: ModelValues) -> Any:
        """Returns what `optimizer.init` makes of the parameters, on the ranks."""
        loss = self.loss
        return loss.calls.run(
            lambda: self.update.init(self._optimized(model.units), loss.calls.stop), "init"
        )

    def renewed(self, model: ModelValues, opt_state: Any, count: int) -> TrainState:
        """Returns a training state of this step after `count` calls."""
        return TrainState(model, opt_state, count, self.origin)

    @overload
    def __call__(
        self, state: TrainState, batch: Any, record: Literal[False] = False
    ) -> tuple[TrainState, dict[str, Any]]: ...

    @overload
    def __call__(
        self, state: TrainState, batch: Any, record: Literal[True]
    ) -> tuple[TrainState, dict[str, Any], Timeline]: ...

    def __call__(self, state: TrainState, batch: Any, record: bool = False) -> Any:
        """Returns the state after one optimizer step on `batch`, and the step's metrics.

        With `record` also the `Timeline` of what happened on every rank: each action and
        transfer, and the bytes held. All processes record the same steps.
        """
        with call(f"step {getattr(state, 'step', '?')}"):
            return self.loss.calls.run(lambda: self._call(state, batch, record), "the step")

    def _call(self, state: TrainState, batch: Any, record: bool) -> Any:
        if not record:
            return self._step(state, batch, None)
        recorder = Recorder(self._ledger)
        new, metrics = self._step(state, batch, recorder)
        if self._ledger.extra_bytes is None:
            self._ledger.extra_bytes = optimizer_bytes_per_rank(self.loss, new.opt_state)
        return (
            new,
            metrics,
            timeline_of(recorder, self.loss.lowered, self.loss.schedule, self.loss.mesh.led_ranks),
        )

    def _step(
        self, state: TrainState, batch: Any, recorder: Recorder | None
    ) -> tuple[TrainState, dict[str, Any]]:
        self._expect_state(state)
        loss = self.loss
        results, value, aux = loss.run(loss.trainer, state.model, batch, recorder)
        carried, counters = loss.next_state(state.model, results)
        gradients, extra = self._gradients(results), self._extra(value)
        params, others = self._optimized(state.model.units), dict(enumerate(state.model.units))
        loss.calls.stop.commit()  # from here on the buffers of `state` are taken over
        self._newest = None
        try:
            new, opt_state, scalars, copies = self.update.apply(
                params, gradients, state.opt_state, extra, others, loss.calls.stop, recorder
            )
            units: list[Any] = list(state.model.units)
            for unit, value_ in zip(loss.trained, new, strict=True):
                units[unit] = value_
            model = ModelValues(tuple(units), copies, carried, counters)
            if loss.share is not None:
                loss.trainer.engine.transport.drain()
        except Exception as error:
            raise _failed_update(error, state) from error
        metrics = {"loss": value, "grad_norm": local(scalars[GRAD_NORM])}
        if jax.tree.leaves(aux):
            metrics["aux"] = aux
        self._newest = self.renewed(model, opt_state, state.step + 1), metrics
        return self._newest

    def recover(self) -> tuple[TrainState, dict[str, Any]]:
        """Returns the state and metrics that the newest step made, once more.

        For a caller that was interrupted (Ctrl-C, an alarm) before it got them: a step that has
        taken over the buffers of its state runs to its end all the same, and this waits for it.
        What an interrupted step was given is whole until then, and is simply used again. Raises
        `ValueError` if no step has run, or its state has been given to a later one.
        """
        newest = self.loss.calls.run(lambda: self._newest, "recover")
        if newest is None or not newest[0].is_alive():
            raise ValueError(
                "there is nothing to recover: no step has made a state that is still there. The "
                "state that was given to an interrupted step is whole unless it is said otherwise"
            )
        return newest

    def close(self) -> None:
        """Ends the threads and lets go of the compiled programs and buffers; twice is once.

        A step that nobody holds any more does so by itself. Calls that were made before are
        waited for; later ones raise `ExecutionError`. States and metrics stay what they are.
        """
        self._newest = None
        self.loss.close()

    def __enter__(self) -> "TrainStep":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @_alike("rehearsal at step")
    def rehearse(
        self, state: TrainState, batch: Any, *, rounds: int = 5, machine: Machine | None = None
    ) -> Rehearsal:
        """Returns what the plan's actions take on their ranks; changes nothing.

        Every rank runs its own compiled programs in the plan's order, with stand-ins for what
        it would receive, so that none waits for another: all of a step but what the simulator
        is to predict. `rounds` steps are timed after one that warms up. Links are measured,
        unless a `machine` has them. Ranks that share cores take them from each other, more than
        in a step, where some of them wait. All processes call this alike. Raises `ValueError` for
        `rounds` below 1, and for a batch or state as a step does.
        """
        self._expect_state(state)
        return self.loss.calls.run(
            lambda: rehearse(self.loss, state.model, batch, self.optimizer, rounds, machine),
            "rehearse",
        )

    @_alike("evaluation at step")
    def evaluate(self, state: TrainState, batch: Any) -> dict[str, Any]:
        """Returns `loss` and `aux` of a batch of the training batch's form; changes nothing."""
        self._expect_state(state)
        loss = self.loss
        _, value, aux = loss.calls.run(
            lambda: loss.run(loss.evaluator, state.model, batch), "evaluate"
        )
        return {"loss": value, **({"aux": aux} if jax.tree.leaves(aux) else {})}

    @_alike("value_and_grad at step")
    def value_and_grad(self, state: TrainState, batch: Any) -> tuple[jax.Array, Any, Any]:
        """Returns `(loss, aux, grads)` without an update; gradients in the user's tree."""
        self._expect_state(state)
        loss = self.loss

        def work() -> tuple[jax.Array, Any, Any]:
            results, value, aux = loss.run(loss.trainer, state.model, batch)
            return value, aux, loss.tree(loss.layout.gathered_units(loss.filled(results)))

        return loss.calls.run(work, "value_and_grad")

    @_alike("reference at step")
    def reference(self, state: TrainState, batch: Any) -> tuple[jax.Array, Any]:
        """Returns `(loss, grads)` of the unpipelined model on one device, for comparison.

        It sees the whole batch at once; where random keys or carried module state belong to
        microbatches, it sees these one after the other, as the pipeline does.
        """
        self._expect_state(state)
        params, module_state = self.params(state), self.module_state(state)
        named, whole = self.loss.under_mesh, not per_microbatch(self.loss.whole)
        with self.loss.mesh.around_plain_model(named=named, whole=whole) as placed:
            results = reference(self.loss.whole, *placed((params, module_state, batch)))
        return results[0], results[2]

    # ------------------------------------------------------------------ back to the user

    @_alike("parameters at step")
    def params(self, state: TrainState) -> Any:
        """Returns the parameters as the user's tree, copied to the first rank's devices."""
        self._expect_state(state)
        return self.loss.calls.run(lambda: self.loss.layout.gathered(state.model), "params")

    @_alike("module state at step")
    def module_state(self, state: TrainState) -> Any:
        """Returns mutable and frozen module state as the front end's tree; None without any."""
        self._expect_state(state)
        layout = self.loss.layout
        return self.loss.calls.run(lambda: layout.gathered(state.model, state=True), "module_state")

    def model(self, state: TrainState) -> Any:
        """Returns the user's model with the trained values.

        An nnx module, linen variables, or the pytree of parameters, as it was given.
        """
        return self.loss.pure.merge(self.params(state), self.module_state(state))

    @_alike("optimizer state at step")
    def opt_state(self, state: TrainState) -> Any:
        """Returns the optimizer state as `optimizer.init(params)` makes it of the user's tree.

        Leaves are whole, wherever their rows lie. Every process must call this.
        """
        self._expect_state(state)
        return opt_state_of(self.update_plan, state.opt_state, self.loss.layout)

    def with_opt_state(self, state: TrainState, opt_state: Any) -> TrainState:
        """Returns `state` with another optimizer state, of the form that `opt_state` returns.

        Parameters are those of `state`: a step on either takes over the buffers of both.
        Raises `ValueError` naming every leaf of another shape or type.

            tree = step.opt_state(state)
            tree[0].mu["head"] = jnp.zeros_like(tree[0].mu["head"])
            state = step.with_opt_state(state, tree)
        """
        self._expect_state(state)
        return replace(state, opt_state=self.update.scatter(opt_state))

    def with_hyperparams(self, state: TrainState, **values: Any) -> TrainState:
        """Returns `state` with hyperparameters of `optax.inject_hyperparams` set by name.

            state = step.with_hyperparams(state, learning_rate=1e-4)

        Every part of the optimizer that has a hyperparameter of the name gets the value.
        Raises `ValueError` naming those that no part has, with those that there are, and those
        that a schedule sets anew in every step.
        """
        return self.with_opt_state(state, with_hyperparams(self.opt_state(state), values))

    def save(self, path: str | Path, state: TrainState, *, overwrite: bool = False) -> None:
        """Writes a checkpoint to the folder `path`; see `octojax.checkpoint`.

        Parameters and optimizer state are stored as the user's trees, so that the checkpoint
        reloads under any plan, and without octojax. Every process must call this.
        """
        with call(f"save of step {getattr(state, 'step', '?')}"):
            self._expect_state(state)
            self.loss.calls.run(lambda: saving.save(self, path, state, overwrite), "save")

    def restore(self, path: str | Path) -> TrainState:
        """Returns the training state in a checkpoint, placed as this step's plan says.

        Raises `FormatError` naming every leaf that does not fit this model and optimizer.
        """

        def work() -> TrainState:
            return self.renewed(*saving.restore(self, path))

        with call("restore"):
            return self.loss.calls.run(work, "restore")

    # ------------------------------------------------------------------ the update

    @cached_property
    def update_plan(self) -> UpdatePlan:
        """The optimizer update as programs per rank, not compiled."""
        loss = self.loss
        if loss.update is not None and loss.optimizer is self.optimizer:
            return loss.update
        return update_of(self.optimizer, loss.staged, loss.owners, loss.mesh)

    @cached_property
    def places(self) -> Places:
        """Where the values of the update lie, on the ranks of this process."""
        loss, here = self.loss, set(self.loss.mesh.local_ranks)
        return Places(
            tuple(r.replicated if r.index in here else None for r in loss.mesh.ranks),
            *self._unit_places(here),
        )

    @cached_property
    def update(self) -> Update:
        """The optimizer update, spread over the ranks."""
        loss, plan, engine = self.loss, self.update_plan, self.loss.trainer.engine
        where = tuple(r.replicated for r in loss.mesh.ranks)
        crew = engine.crew("UP")
        if plan is not loss.update:  # a loss that was compiled for another optimizer, or none
            crew = engine.further_crew({**values_of(plan.update, where), **engine.copies})
        return Update(
            plan,
            self.places,
            end_rows(self.lowered),
            crew,
            engine.further_crew(values_of(plan.init, where)),
            units=loss.trained,
            compiler_options=loss.options.compiler_options,
        )

    def _unit_places(self, here: set[int]) -> tuple[tuple[Any, ...], ...]:
        """Where parameters lie, and their gradients and moments; nothing, if all are whole."""
        loss = self.loss
        specs = loss.param_specs
        if not any(any(spec) for spec in (*specs.stored, *specs.gradients)):
            return ()
        return tuple(
            tuple(place(u) if loss.owners[u] in here else None for u in loss.trained)
            for place in (loss.home, loss.gradient_home)
        )

    @cached_property
    def origin(self) -> Origin:
        """Names what this step's states are made for; see `Origin`."""
        return origin_of(self.loss, self.update_plan)

    def _optimized(self, units: Any) -> list[jax.Array]:
        return [units[u] for u in self.loss.trained]

    def _expect_state(self, state: Any) -> None:
        """Raises unless `state` is one of this step's, or of a step of the same origin."""
        _expect_kind(state)
        if state.origin is self.origin or state.origin == self.origin:
            if self._newest is None or state is not self._newest[0]:
                self._expect_types(state)
            return
        raise ValueError(
            f"this training state is of another step. {self.origin.differences(state.origin)}. "
            f"Go on with the step it came from, or move it: state = step.adopt(state)"
        )

    def _expect_types(self, state: TrainState) -> None:
        """Raises `ValueError` naming the values of `state` that are not those that were compiled
        for, such as those of a cast state."""
        check_alive(state.model)
        staged, plan = self.loss.staged, self.update_plan
        names = [unit.name for unit in staged.units]
        refuse_changed(
            [
                *zip(names, state.model.units, map(stored, staged.unit_avals), strict=True),
                *(
                    ("a value of the optimizer state", value, piece_aval(plan, k))
                    for rank in self.loss.mesh.local_ranks
                    for k, value in zip(plan.states_on(rank), state.opt_state[rank], strict=True)
                ),
            ]
        )

    def _extra(self, value: Any) -> dict[int, Any] | None:
        """The loss on the ranks whose update reads it (`optax.contrib.reduce_on_plateau`)."""
        ranks = self.loss.mesh.ranks
        targets = self.update.extra_ranks
        return {r: {"value": put(value, ranks[r].replicated)} for r in targets} or None

    def _gradients(self, results: Results) -> list[Any]:
        filled = self.loss.filled(results)
        return [filled[u] for u in self.loss.trained]


def _expect_kind(state: Any) -> None:
    if not isinstance(state, TrainState):
        raise TypeError(
            f"state is of type {type(state).__name__}, expected the TrainState that step.init(), "
            f"step.restore(path) or a step before returned"
        )


def _failed_update(error: Exception, state: TrainState) -> Exception:
    """What to raise where the update, or the copies of what it made, failed."""
    whole = state.is_alive()
    kind = NonFiniteError if compat.is_nan_report(error) else ExecutionError
    return kind(
        f"the optimizer's update after step {state.step} failed: {error}. "
        + (
            "The state that was given to the step is whole"
            if whole
            else "It had taken over the state that was given to the step, which is gone: go on "
            "from the last checkpoint (step.restore)"
        )
    )


def compile(
    model: Any,
    loss_fn: Any,
    optimizer: optax.GradientTransformation,
    batch: Any,
    *,
    params: Any = None,
    mesh: Any = None,
    trainable: Any = None,
    state: Any = None,
    **options: Any,
) -> TrainStep:
    """Returns the training step of `model`, cut into a pipeline and compiled.

    `model` is an nnx module (`loss_fn(model, batch)`), a linen module with `params=` its
    variables (`loss_fn(variables, batch)`), or a pytree of parameters
    (`loss_fn(params, batch)`; with `state=`, `loss_fn(params, state, batch)`). The loss returns
    a scalar, or `(scalar, aux)`. Model, `params` and `state` may each be a function that makes them
    (`lambda: Model(config, rngs=nnx.Rngs(0))`, `lambda: module.init(key, x)`), or of shapes
    (`nnx.eval_shape`, `jax.eval_shape`): then no array is made here. `batch` is an example: arrays
    or shapes of the batch that the step will get; axis 0 of every leaf but scalars is split into
    microbatches.

    `mesh` has a pipeline axis (`axis="pipe"`); by default it is the mesh in force
    (`jax.set_mesh`) if that has such an axis, else all devices form one. Further options
    are those of `octojax.api.options.Options`: microbatches, schedule, plan, partition,
    placement, chunks, recompute, transport, progress, ...; what is not given comes from
    `@octopipe.pipeline` on the model's class.

    Raises before anything is launched: see `octojax.errors`.
    """
    if not (callable(getattr(optimizer, "init", None)) and hasattr(optimizer, "update")):
        raise TypeError(
            f"optimizer is of type {type(optimizer).__name__}, expected an optax optimizer such as "
            f"optax.adamw(1e-3); octopipe.value_and_grad works without one"
        )
    with call("compile"), compat.jit_enabled(), compat.without_mesh() as callers:
        pure = adapt(model, loss_fn, params, trainable=trainable, state=state)
        settings = options_of(pure.example(model), **options)
        loss = PipelinedLoss(pure, batch, settings, mesh, optimizer, callers=callers)
        step = TrainStep(loss, optimizer)
        _ = step.update, loss.trainer
    return step
