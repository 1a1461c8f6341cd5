"""A loss cut into a pipeline: the core under `compile` and `value_and_grad`."""

import platform
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import chain
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, PartitionSpec

from octojax import compat
from octojax.api.agreement import (
    REMEDY,
    Stamp,
    constant_facts,
    optimizer_facts,
    value_facts,
)
from octojax.api.copies import find_copies, warn_of_copies
from octojax.api.initialization import Initialization
from octojax.api.leaf_sources import GivenLeaves, JoinedLeaves, LeafSource, Part, ReadLeaves, Tail
from octojax.api.mesh_faults import explained
from octojax.api.options import Options
from octojax.api.param_specs import unit_specs
from octojax.api.planning import (
    check_recompute,
    choose_schedule,
    given_schedule,
    layers_wanted,
    make_plan,
    ranks_wanted,
    refuse_with_auto,
)
from octojax.api.report import unit_bytes
from octojax.api.state_layout import ModelValues, StateLayout, check_alive
from octojax.api.structure import leaves_like, listed, readable, refuse_packed, valueless
from octojax.api.tuning import tuned_plan
from octojax.api.update_plan import trained_units, update_of
from octojax.api.whole_batch import WholeBatch, leaves_without_rows, lines_of
from octojax.api.zero import param_specs
from octojax.arrays import put
from octojax.costs import Device, estimate
from octojax.errors import GradientWarning, LossError, PlanError
from octojax.executor.engine import Engine, Results
from octojax.executor.kept_memory import keep_memory
from octojax.executor.lower import Lowered, lower
from octojax.executor.prepare import Model
from octojax.executor.recorded import Recorder
from octojax.executor.share import Share
from octojax.executor.specs import ParamSpecs
from octojax.executor.step_thread import GRACE_S, StepThread
from octojax.executor.transports import transport
from octojax.executor.update import values_of
from octojax.executor.wiring import wiring_of
from octojax.frontends import PureLoss, is_constructor
from octojax.ir import Cargo, LoweredPlan, Plan, Schedule
from octojax.ir.exchange import owners, with_update
from octojax.jaxprs.shardings import check_shardings, evaluate
from octojax.layers.cut import StagedLoss, cut_stages
from octojax.layers.find import LayeredLoss, find_layers
from octojax.layers.state import StateKind
from octojax.mesh import DATA_AXIS, ONE_DEVICE, PipelineMesh, pipeline_mesh
from octojax.passes import Pipeline
from octojax.processes import agree, busy, several, step_timeout_s
from octojax.programs.build import compile_all
from octojax.programs.microbatch import Microbatches, plan_microbatches
from octojax.programs.recipe import raw, stored, unstored
from octojax.simulate.durations import durations
from octojax.stages.differentiate import differentiate
from octojax.stages.fingerprint import fingerprint, portable
from octojax.stages.program import Ref, Role, Stage
from octojax.stages.put_in import mixed_units, put_in_units
from octojax.trace import Leaves, path_name
from octojax.update import UpdatePlan, mixing

TYPICAL = Device(flops_per_s=1e12, bandwidth_bytes_per_s=3e10)
"""Only for the order of transfers, where no profile is given: what counts is how stages compare."""


@dataclass(frozen=True)
class Runner:
    """An engine, and where in `units + copies` each local rank's parameters stand."""

    engine: Engine
    sources: list[list[int]]


class PipelinedLoss:
    """`pure` cut into stages by a plan, for batches like `batch`. Compiles on first use.

    A tuned plan (`schedule="auto"`) counts the state of `optimizer` in every rank's memory.
    `callers` is the mesh that the caller has in force: the model may then name axes, and it is
    the default of `mesh` if it has the pipeline's axis.

    Raises before anything is launched: `MeshError`, `PlanError`, `ScheduleError`, `CutError`,
    `LossError` or `ValueError`, each with the numbers and the remedy.
    """

    def __init__(
        self,
        pure: PureLoss,
        batch: Any,
        options: Options,
        mesh: Any = None,
        optimizer: optax.GradientTransformation | None = None,
        *,
        callers: Any = None,
    ) -> None:
        self.pure, self.options, self.under_mesh = pure, options, callers is not None
        refuse_packed(pure.params)
        if options.keep_memory and jax.default_backend() == "cpu":
            keep_memory()
        table = given_schedule(options)
        ranks = ranks_wanted(options) if mesh is None else None
        if mesh is None and isinstance(callers, Mesh) and options.axis in callers.axis_names:
            mesh = callers
        self.mesh: PipelineMesh = pipeline_mesh(mesh, options.axis, ranks)
        if mesh is None and ranks is None and self.mesh.num_ranks == 1:
            warnings.warn(ONE_DEVICE, stacklevel=3)
        with self.mesh.in_force(named=self.under_mesh):
            lowered = self._plan(pure, batch, options, table, optimizer)
        self.trained = trained_units(self.staged)
        self.optimizer = optimizer
        self.update: UpdatePlan | None = None
        if optimizer is not None:
            ranks = [max(0, owner) for owner in owners(lowered)]
            self.update = update_of(optimizer, self.staged, ranks, self.mesh)
            lowered = with_update(lowered, self.update.update.outline)
        self.lowered: Lowered = self._lower(lowered)
        self._warn_of_put_in()
        self._warn_of_copies()
        self.calls = StepThread(self.timeout_s, 0.0 if several() else GRACE_S)
        self.compilations = 0
        self._zero_gradients: dict[int, jax.Array] = {}
        self._compared = False  # whether a batch has been, thoroughly

    # ------------------------------------------------------------------ cutting

    def _plan(
        self,
        pure: PureLoss,
        batch: Any,
        options: Options,
        table: Schedule | None,
        optimizer: optax.GradientTransformation | None,
    ) -> LoweredPlan:
        """Traces, plans, cuts and differentiates, all under the mesh that the model sees; returns
        what the ranks execute until the gradients are there."""
        count = options.microbatches or (table.num_microbatches if table is not None else 1)
        paths, self.batch_tree = jax.tree_util.tree_flatten_with_path(batch)
        names = [path_name(path) or "the batch" for path, _ in paths]
        self.split: Microbatches = plan_microbatches(
            [leaf for _, leaf in paths],
            names,
            count,
            self.mesh.data_size,
            shared=leaves_without_rows(names, [np.ndim(leaf) for _, leaf in paths], options),
        )
        axes = self.mesh.mesh.axis_names
        with explained(axes):
            self.whole = WholeBatch(pure, self.split, self.batch_tree, options)
        first = self.whole.first
        for part in filter(None, (first.traced.flat, first.evaluate)):
            check_shardings(part, axes, (self.mesh.axis, DATA_AXIS))
        self.whole.check()
        self.batch: Microbatches = self.whole.batch
        if options.schedule == "auto" and options.plan is None:
            refuse_with_auto(options)
            plan = tuned_plan(pure, self.split, self.batch_tree, self.mesh, options, optimizer)
            self.options = options = replace(options, plan=plan)
        table = choose_schedule(options, self.mesh.num_ranks, count)
        self._min_layers = layers_wanted(options, table)
        self._layered = layered = self._layers(0)
        plan = make_plan(options, table, layered.graph)
        costs = options.profile or estimate(layered, TYPICAL)
        pipeline = Pipeline.of(options.passes, plan, costs=costs)
        self.plan: Plan = pipeline.on_plan(plan)
        check_recompute(self.plan)
        self.layers = layered.graph
        self.staged: StagedLoss = self._cut(layered)
        traced = self.staged.traced
        self.unit_specs: tuple[PartitionSpec, ...] = unit_specs(
            pure.params,
            pure.state,
            (traced.params, traced.state),
            self.staged.units,
            self.mesh,
            options.param_specs,
            pure.aliases,
        )
        self.stages: tuple[tuple[Stage, ...], ...] = self._stages()
        self._check_state()
        wiring = wiring_of(self.stages, len(self.staged.units))
        self.plan = replace(self.plan, wiring=wiring)
        return pipeline.lower(self.plan)

    @property
    def schedule(self) -> Schedule:
        return self.plan.schedule

    def _layers(self, microbatch: int) -> LayeredLoss:
        return find_layers(self.whole.traced(microbatch), self._min_layers)

    def _cut(self, layered: LayeredLoss) -> StagedLoss:
        ranks = [min(ranks) for ranks in self.plan.placement.stages]
        return cut_stages(layered, self.plan.partition, ranks)

    def _stages(self) -> tuple[tuple[Stage, ...], ...]:
        """The stages of every microbatch; equal sizes share them."""
        recompute = self.plan.recomputes
        by_size: dict[int, tuple[Stage, ...]] = {}
        for microbatch, size in enumerate(self.batch.sizes):
            if size in by_size:
                continue
            staged = self.staged
            if microbatch:
                layered = self._relayered(self._layers(microbatch))
                staged = layered and self._cut(layered)
                if staged is None or staged.units != self.staged.units:
                    raise PlanError(
                        f"the loss of {size} rows has other operations or constants than the "
                        f"loss of {self.batch.sizes[0]} rows. Choose microbatches that divide the "
                        f"{self.batch.num_rows} rows of the batch"
                    )
            by_size[size] = differentiate(staged.forwards, self.trainable, recompute)
        return tuple(by_size[size] for size in self.batch.sizes)

    def _relayered(self, layered: LayeredLoss) -> LayeredLoss | None:
        """Returns the loss of another microbatch size with the layers of the first."""
        if len(layered.steps) != len(self._layered.steps):
            return None
        return replace(layered, borders=self._layered.borders, graph=self._layered.graph)

    @cached_property
    def trainable(self) -> frozenset[int]:
        """Units that are differentiated: floating leaves of the parameters."""
        num = len(self.staged.traced.params)
        return frozenset(
            u
            for u, unit in enumerate(self.staged.units)
            if unit.leaf < num and compat.is_float(self.staged.unit_avals[u])
        )

    def _check_state(self) -> None:
        carried = [s for s in self.staged.state if s.kind is StateKind.CARRIED]
        shared = [
            s.name
            for s in carried
            if s.stage is not None and len(self.plan.placement.stages[s.stage]) > 1
        ]
        if shared:
            raise PlanError(
                f"module state {', '.join(shared)} is carried from microbatch to microbatch, but "
                f"its stage is held by two ranks, which see different microbatches. Use a "
                f"schedule that holds each stage once, or take the state out of the model"
            )
        if carried and self.mesh.data_size > 1:
            raise PlanError(
                f"module state {', '.join(s.name for s in carried)} is carried from microbatch "
                f"to microbatch and would differ between the {self.mesh.data_size} devices of "
                f"the data axis. Use a mesh without a data axis, or take the state out of the model"
            )

    def _warn_of_put_in(self) -> None:
        """Says once which gradients a rule makes of no cotangent, or of those of several rows,
        where several are added up."""
        pieces = self.batch.count * self.batch.shards
        put_in = put_in_units(self.stages[0]) if pieces > 1 else frozenset()
        mixed = mixed_units(self.stages[0]) if pieces > 1 else {}
        if mixed:
            self._warn_of_gradients(
                f"the gradients of {listed(*self._named(mixed))} are not sums over the rows of the "
                f"batch: a derivative rule (jax.custom_vjp) makes them of cotangents, and mixes "
                f"rows at {'; '.join(lines_of(list(mixed.values()))[:3])}. Those of the {pieces} "
                f"microbatches and shards of the batch are added up, which is not the rule's "
                f"result on the whole batch. Have the rule treat every row by itself, or take one "
                f"microbatch. See docs/exactness.md, State and custom gradients"
            )
        if not put_in:
            return
        names = self._named(put_in)[1]
        self._warn_of_gradients(
            f"the gradients of {', '.join(names)} do not depend on the loss: a derivative rule "
            f"(jax.custom_vjp) puts them in. Those of the {pieces} microbatches and shards of the "
            f"batch are added up. If they are new values (fp8 scales and amax histories, which "
            f"would be joined by max), return them as module state (state=) instead, or take one "
            f"microbatch; if they are gradients of a mean, divide by the number of microbatches. "
            f"See docs/exactness.md, State and custom gradients"
        )

    def _named(self, units: Iterable[int]) -> tuple[str, list[str]]:
        """Returns how many parameters units belong to, in words, and their names."""
        leaves = {self.staged.units[u].leaf for u in units}
        names = sorted(self.staged.traced.params.names[leaf] for leaf in leaves)
        return f"{len(names)} parameters", names

    def _warn_of_gradients(self, text: str) -> None:
        if self.options.strict:
            raise LossError(text)
        warnings.warn(GradientWarning(text), stacklevel=5)  # compile's or value_and_grad's caller

    def _warn_of_copies(self) -> None:
        """Warns if the ranks together hold clearly more than the model."""
        sizes = unit_bytes(self.staged)
        names = [unit.name for unit in self.staged.units]
        placed = self.plan.placement.stages
        copies = find_copies(names, sizes, self.lowered.step.holders, self.stages[0], placed)
        warn_of_copies(copies, sum(sizes), stacklevel=4)  # compile's or value_and_grad's caller

    def _lower(self, plan: LoweredPlan) -> Lowered:
        costs = self.options.profile or estimate(self._layered, TYPICAL)
        seconds = durations(self.plan, costs)
        return lower(plan, self.stages, fingerprint, self.batch.layouts, seconds, self._spread)

    @cached_property
    def mixed(self) -> dict[int, str]:
        """The units whose elements the optimizer mixes, and by which operation."""
        if self.update is None or not self.options.zero:
            return {}
        return {self.trained[piece]: name for piece, name in mixing(self.update).items()}

    @cached_property
    def param_specs(self) -> ParamSpecs:
        """How each unit lies in the stages' programs, between steps, and at the update."""
        mesh, avals = self.mesh.ranks[0].mesh, self.staged.unit_avals
        return param_specs(self.options.zero, self.unit_specs, avals, mesh, self.mixed)

    @property
    def _spread(self) -> tuple[PartitionSpec, ...]:
        """The specs of all units, where a rank has an axis for XLA to spread over."""
        return self.unit_specs if any(rank.spreads for rank in self.mesh.ranks) else ()

    def home(self, unit: int) -> jax.sharding.Sharding:
        """Returns where a unit lies on the devices of its owner between steps."""
        return self.mesh.ranks[self.owners[unit]].sharding(self.param_specs.stored[unit])

    def gradient_home(self, unit: int) -> jax.sharding.Sharding:
        """Returns where the gradient of a unit lies at the update, and its moments."""
        return self.mesh.ranks[self.owners[unit]].sharding(self.param_specs.gradients[unit])

    # ------------------------------------------------------------------ engines

    @property
    def timeout_s(self) -> float:
        """How long any wait in a step lasts: the option, or what the processes were given."""
        option = self.options.timeout_s
        return step_timeout_s() if option is None else option

    def close(self, what: str = "this step") -> None:
        """Ends threads and transports, after the calls that were made before."""
        why = f"{what} was closed (close(), or the end of its `with` block). Compile another"
        self.calls.close(why, self._release)

    def _release(self) -> None:
        for name in ("trainer", "evaluator"):
            runner = self.__dict__.pop(name, None)
            if runner is not None:
                runner.engine.close()

    @cached_property
    def share(self) -> Share | None:
        """How values reach every process; None in a program of one."""
        return Share(self.mesh, self.timeout_s) if several() else None

    def _agree(self) -> None:
        """Refuses to run unless every process has the same plan, model and versions."""
        step = self.lowered.step
        if not several():
            return
        stages = {
            f"model, stage {s}": portable(stage.forward.jaxpr)
            for s, stage in enumerate(self.stages[0])
        }
        compares = self.options.compare_values
        agree(
            {
                "plan": str(self.plan),
                "lowered plan": str(self.lowered.plan),
                **stages,
                **(constant_facts(self.staged.constants) if compares else {}),
                **(optimizer_facts(self.update) if compares and self.update else {}),
                "compare_values": str(compares),
                "order of transfers": " ".join(step.transfers[k].name for k in step.order),
                "batch": str(self.batch.avals),
                "JAX": jax.__version__,
                "Python": platform.python_version(),
            },
            "the plan",
        )

    @cached_property
    def _model(self) -> Model:
        counters = self.staged.counters
        fixed = tuple(Ref(Role.STATE, leaf) for leaf in counters.leaves)
        reads = (*counters.reads, *(ref for ref in fixed if ref not in counters.reads))
        avals = tuple(
            self.staged.state[r.index].aval
            if r.role is Role.STATE
            else self.staged.unit_avals[r.index]
            for r in reads
        )
        rest = {
            "joins": self.whole.joins,
            "terms": self.staged.terms,
            "trainable": self.trainable,
            "specs": self.param_specs,
        }
        if not counters.leaves:
            return Model(self.staged.unit_avals, **rest)
        advance = counters.jaxpr
        used = len(counters.reads)
        return Model(
            self.staged.unit_avals,
            counters.leaves,
            reads,
            avals,
            lambda *values: evaluate(advance, values[:used], None),
            **rest,
        )

    def _runner(self, lowered: Lowered) -> "Runner":
        self.calls.refuse_if_closed("a program of this step")
        self._agree()
        make = transport(self.options.transport, self.timeout_s)
        where = [rank.replicated for rank in self.mesh.ranks]
        values = {} if self.update is None else values_of(self.update.update, where)
        engine = Engine(lowered, self.mesh, self.batch, self._model, make, self.timeout_s, values)
        with busy("compiling"):
            self.compilations += engine.compile(
                partial(
                    compile_all,
                    progress=self.options.progress,
                    options=self.options.compiler_options,
                )
            )
            _ = self._coefficients
        return Runner(engine, self._sources(engine))

    @cached_property
    def trainer(self) -> "Runner":
        """The training step's engine, compiled."""
        return self._runner(self.lowered)

    @cached_property
    def evaluator(self) -> "Runner":
        """The engine of forwards alone, compiled."""
        return self._runner(self._lower(self.lowered.plan.forwards_only()))

    # ------------------------------------------------------------------ values on devices

    @cached_property
    def owners(self) -> tuple[int, ...]:
        """The rank that keeps each unit; those that no stage reads are on rank 0."""
        return tuple(max(0, owner) for owner in self.lowered.step.owners)

    def source(self, params: Any = None, state: Any = None) -> LeafSource:
        """Returns where the values of all leaves come from; None: from the compiled model itself.

        Either may be a reader (`octojax.api.leaf_sources.Reader`). Raises `ValueError` naming all
        leaves that are not those of the compiled model, or that have no value.
        """
        traced, constants = self.staged.traced, self.staged.constants
        first = len(traced.params)
        parts = (
            (params, traced.params, self.pure.params, "the parameters", 0),
            (state, traced.state, self.pure.state, "the leaves of module state", first),
        )
        sources = [
            (self._source(values, leaves, own, what, at), len(leaves))
            for values, leaves, own, what, at in parts
        ]
        return JoinedLeaves((*sources, (GivenLeaves(constants), len(constants))))

    def _source(
        self, user_values: Any, leaves: Leaves, own: Any, what: str, first: int
    ) -> LeafSource:
        if user_values is None and self.initialization is not None:
            return Tail(self.initialization, first)
        if user_values is not None and is_constructor(user_values):
            reader = ReadLeaves(user_values, leaves, what)
            reader.check()
            return reader
        if user_values is None and (missing := valueless(own)):
            raise ValueError(
                f"the model was compiled from shapes, and has no values for {what}: "
                f"{listed(f'{len(missing)} leaves', missing)}. Give them, or a reader, as in "
                f"step.init(params), or compile a function that makes the model: "
                f"lambda: Model(config, rngs=nnx.Rngs(0))"
            )
        values = leaves_like(own if user_values is None else user_values, leaves, what)
        return GivenLeaves(self._readable(values, leaves.names))

    def _readable(self, values: Sequence[Any], names: Sequence[str]) -> list[Any]:
        """Returns values of the caller's whole; all processes give arrays of the same devices."""
        return readable(values if self.share is None else self.share.whole(values), names)

    @cached_property
    def initialization(self) -> Initialization | None:
        """What makes the model's leaves, where it was given as a function."""
        if self.pure.make is None:
            return None
        traced = self.staged.traced
        return Initialization(self.pure.make, (*traced.params.names, *traced.state.names))

    def place(self, source: LeafSource) -> ModelValues:
        """Returns parameters and module state on the devices of their ranks."""
        return self.calls.run(
            lambda: self.with_copies(self.placed(source)), "the placement of parameters"
        )

    def with_copies(self, model: ModelValues) -> ModelValues:
        """Returns `model` with what its ranks keep of others' parameters. All processes call it."""
        return replace(model, copies=self.copies(model.units))

    def placed(self, source: LeafSource) -> ModelValues:
        """Returns every part that a rank of this process keeps, but for copies: see
        `with_copies`. No other part is asked for."""
        ranks, here = self.mesh.ranks, self.mesh.local_ranks
        first = len(self.staged.traced.params)  # of the leaves of state, in `source`
        owned = [u for u, owner in enumerate(self.owners) if owner in here]
        carried = [
            leaf
            for leaf in self.staged.state
            if leaf.kind is StateKind.CARRIED and self._home(leaf.stage) in here
        ]
        counted = [
            self._part_of(ref, first, ranks[rank].replicated)
            for rank in here
            for ref in self._model.count_reads
        ]
        values = iter(
            source.place(
                [
                    *(self._unit_part(u, self.home(u)) for u in owned),
                    *(
                        Part(first + x.leaf, x.row, ranks[self._home(x.stage)].replicated)
                        for x in carried
                    ),
                    *counted,
                ]
            )
        )
        units: list[jax.Array | None] = [None] * len(self.owners)
        for u in owned:
            units[u] = next(values)
        held_state = {leaf.index: next(values) for leaf in carried}
        counters = tuple(tuple(next(values) for _ in self._model.count_reads) for _ in here)
        return ModelValues(tuple(units), (), held_state, counters)

    @property
    def count_reads(self) -> tuple[Ref, ...]:
        """What the values of a state's `counters` are."""
        return self._model.count_reads

    def _unit_part(self, unit: int, where: jax.sharding.Sharding) -> Part:
        return Part(self.staged.units[unit].leaf, self.staged.units[unit].index, where)

    def _part_of(self, ref: Ref, first: int, where: jax.sharding.Sharding) -> Part:
        if ref.role is Role.PARAM:
            return self._unit_part(ref.index, where)
        leaf = self.staged.state[ref.index]
        return Part(first + leaf.leaf, leaf.row, where)

    def agree_on(self, params: Any, state: Any, topic: str) -> None:
        """Returns if all processes have these parameters and this module state.

        None stands for the compiled model's own. Of leaves that are made or read, the program
        that makes them is compared, and nothing. Raises `MeshError` naming what differs, and
        between which processes.
        """
        if not several() or not self.options.compare_values:
            return
        facts: dict[str, str] = {}
        maker = self.initialization
        if maker is not None and (params is None or state is None):
            facts["the function that makes the model"] = maker.fact
        traced, pure = self.staged.traced, self.pure
        for tree, own, leaves, what in (
            (params, pure.params, traced.params, "the parameters"),
            (state, pure.state, traced.state, "the leaves of module state"),
        ):
            if is_constructor(tree) or (tree is None and maker is not None):
                continue
            values = leaves_like(own if tree is None else tree, leaves, what)
            facts.update(value_facts(leaves.names, values))
        agree(facts, topic, REMEDY)

    def _home(self, stage: int | None) -> int:
        return self.plan.placement.stages[stage or 0][0]

    def copies(self, units: Sequence[jax.Array | None]) -> tuple[tuple[jax.Array, ...], ...]:
        return self.trainer.engine.refresh(units, self.calls.stop)

    def _sources(self, engine: Engine) -> list[list[int]]:
        """Per local rank, where its parameters stand in `units + copies`."""
        at = len(self.staged.units)
        copies: dict[tuple[int, int], int] = {}
        for transfer in self.lowered.step.transfers:
            if transfer.kind is not Cargo.PARAMETERS:
                continue
            for unit in transfer.parts:
                if transfer.target in self.mesh.local_ranks:
                    copies[transfer.target, unit] = at
                    at += 1
        return [
            [copies.get((program.rank, unit), unit) for unit in program.params]
            for program in engine.ranks
        ]

    def run(
        self,
        runner: "Runner",
        model: ModelValues,
        batch: Any,
        record: Recorder | None = None,
        values: Sequence[Any] = (),
    ) -> tuple[Results, Any, Any]:
        """Returns what an engine made of a batch, with loss and aux taken out of it.

        Several processes compare the batch, and `values` with it; see `octojax.api.agreement`.
        """
        return self.calls.run(lambda: self._run(runner, model, batch, record, values), "a step")

    def _run(
        self,
        runner: "Runner",
        model: ModelValues,
        batch: Any,
        record: Recorder | None,
        values: Sequence[Any],
    ) -> tuple[Results, Any, Any]:
        inputs = self._inputs(runner, model, batch)
        stamp = None if self.share is None else self._stamp([*inputs[-1], *values])
        results = runner.engine.run(*inputs, record, self.calls.stop)
        by_leaf = results.emits if stamp is None else self._everywhere(runner, results, stamp)
        emits = [by_leaf[e] for e in range(self.staged.traced.num_emits)]
        for (emit, rank), aval in runner.engine.added.items():
            term = self.layout.from_owner(results.terms.get((emit, rank)), rank, aval)
            emits[emit] = emits[emit] + jax.device_put(term, emits[emit].sharding)
        return results, emits[0], self.staged.traced.aux.unflatten(emits[1:])

    def rehearse(self, model: ModelValues, batch: Any, record: Recorder) -> None:
        """Runs a step without transfers, every rank by itself; see `Engine.rehearse`."""
        inputs = self._inputs(self.trainer, model, batch)
        self.trainer.engine.rehearse(*inputs, record, self.calls.stop)

    def _inputs(
        self, runner: "Runner", model: ModelValues, batch: Any
    ) -> tuple[Any, Any, Any, Any]:
        """What an engine wants: parameters, carried state, counters, and the batch's leaves."""
        leaves = self.batch_leaves(batch)
        check_alive(model)
        flat = [*model.units, *chain.from_iterable(model.copies)]
        params = [[flat[i] for i in where] for where in runner.sources]
        if self._coefficients is not None:
            placed = jax.device_put([raw(jnp.asarray(x)) for x in leaves], self._first_device)
            leaves = [*leaves, *self._coefficients(*placed)]
        return params, [model.carried] * len(runner.sources), model.counters, leaves

    @property
    def _first_device(self) -> jax.sharding.Sharding:
        """A device of this process, for what every process evaluates itself."""
        rank = self.mesh.ranks[self.mesh.local_ranks[0]]
        return jax.sharding.SingleDeviceSharding(rank.local_devices[0])

    @cached_property
    def _coefficients(self) -> Any:
        """The compiled program of what microbatches read of the whole batch; None without any."""
        evaluate = self.whole.evaluate
        if evaluate is None:
            return None
        avals = self.split.avals
        shapes = [
            jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=self._first_device)
            for a in map(stored, avals)
        ]

        def coefficients(*leaves: Any) -> tuple[Any, ...]:
            return tuple(evaluate([unstored(x, a) for x, a in zip(leaves, avals, strict=True)]))

        return jax.jit(coefficients, keep_unused=True).lower(*shapes).compile()

    def _stamp(self, leaves: Sequence[Any]) -> Stamp:
        stamp = Stamp(leaves, thorough=not self._compared, every=self.options.compare_values)
        self._compared = True
        return stamp

    def _everywhere(
        self, runner: "Runner", results: Results, stamp: Stamp
    ) -> Mapping[int, jax.Array]:
        """Returns what the loss returned in every process, from the ranks that made it.

        Raises `MeshError` if another process is at another step or has another batch.
        """
        assert self.share is not None
        runner.engine.drain(results)
        headers, emits = self.share.with_headers(
            stamp.to_bytes(), results.emits, runner.engine.emitted
        )
        names = [*self.batch.names, *(f"value {i}" for i in range(len(stamp.leaves)))]
        stamp.compare(headers, names[: len(stamp.leaves)])
        return emits

    def batch_leaves(self, batch: Any) -> list[Any]:
        leaves, tree = jax.tree.flatten(batch)
        if tree != self.batch_tree:
            expected = Leaves(self.batch_tree, self.split.names, self.split.avals)
            leaves = leaves_like(batch, expected, "the leaves of this batch")
        self.split.check(leaves)
        return self._readable(leaves, self.split.names)

    def next_state(
        self, before: ModelValues, results: Results
    ) -> tuple[Mapping[int, jax.Array], Any]:
        """Returns carried leaves and counters as the step left them."""
        counting = self._model
        places = [counting.count_reads.index(Ref(Role.STATE, leaf)) for leaf in counting.counters]
        counters = []
        for old, new in zip(before.counters, results.counters, strict=True):
            values = list(old)
            for place, value in zip(places, new, strict=True):
                values[place] = value
            counters.append(tuple(values))
        return {**before.carried, **results.state}, tuple(counters)

    # ------------------------------------------------------------------ back to the user's trees

    def filled(self, results: Results) -> list[Any]:
        """Returns a gradient for every unit: zeros where the loss does not depend on it.

        Units that another process owns are None.
        """
        here = self.mesh.local_ranks
        return [
            self._zeros(unit) if gradient is None and owner in here else gradient
            for unit, (gradient, owner) in enumerate(
                zip(results.gradients, self.owners, strict=True)
            )
        ]

    def _zeros(self, unit: int) -> jax.Array:
        if unit not in self._zero_gradients:
            aval = stored(self.staged.unit_avals[unit])
            zeros = np.zeros(aval.shape, aval.dtype)
            self._zero_gradients[unit] = put(zeros, self.gradient_home(unit))
        return self._zero_gradients[unit]

    @cached_property
    def layout(self) -> StateLayout:
        """How a training state of this loss is held."""
        staged = self.staged
        return StateLayout(
            self.mesh,
            self.share,
            staged.traced.params,
            staged.traced.state,
            staged.state,
            staged.units,
            staged.unit_avals,
            self.owners,
            {
                leaf.index: self._home(leaf.stage)
                for leaf in staged.state
                if leaf.kind is StateKind.CARRIED
            },
            self._model.count_reads,
        )

    def tree(self, units: Sequence[Any]) -> Any:
        """Returns values by unit as the user's tree of parameters."""
        return self.layout.tree(units)
