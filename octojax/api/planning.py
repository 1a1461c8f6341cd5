"""From options to a checked plan: schedule table, partition, placement, recompute."""

import warnings
from collections.abc import Sequence
from pathlib import Path

from octojax.api.options import Options
from octojax.errors import MeshError, PlanError
from octojax.ir import (
    Kind,
    LayerGraph,
    Partition,
    Placement,
    Plan,
    Profile,
    Schedule,
    uniform_partition,
)
from octojax.ir.verify import verify
from octojax.partitioners import partition
from octojax.schedules import generate
from octojax.schedules.options import ranks_of_stages


def choose_schedule(options: Options, num_ranks: int | None, microbatches: int) -> Schedule:
    """Returns the table that the options ask for, checked to be complete and free of deadlock.

    `num_ranks` None: the table may decide. Warns of ranks that hold no stage. Raises
    `ScheduleError` for a broken table, `ValueError` for sizes that a named schedule does not
    allow, `PlanError` for a placement that contradicts the table.
    """
    table = given_schedule(options)
    if table is None:
        arguments = dict(options.schedule_options)
        if options.placement is not None:
            arguments["placement"] = given_placement(options, num_ranks)
        schedule = generate(
            str(options.schedule), num_ranks or 1, microbatches, options.chunks, **arguments
        )
    else:
        schedule = table
        _check_sizes(schedule, num_ranks, microbatches)
        _check_placement(given_placement(options, schedule.num_ranks), schedule)
    verify(schedule, microbatches)
    if empty := schedule.placement.empty_ranks:
        warnings.warn(
            f"placement [{schedule.placement}] leaves rank {', '.join(map(str, empty))} of "
            f"{schedule.num_ranks} without a stage: its devices idle. Place a stage there, or "
            f"use a mesh of {schedule.num_ranks - len(empty)} ranks",
            stacklevel=5,  # the caller of compile or value_and_grad
        )
    return schedule


def given_placement(options: Options, num_ranks: int | None = None) -> Placement | None:
    """Returns the placement in the options, over at least `num_ranks` ranks; None without one."""
    if options.placement is None:
        return None
    placement = ranks_of_stages(options.placement)
    return Placement(placement.stages, max(num_ranks or 0, placement.num_ranks))


def given_schedule(options: Options) -> Schedule | None:
    """Returns the table in the options; None where they name a family to generate."""
    if options.plan is not None:
        return options.plan.schedule
    if isinstance(options.schedule, Schedule):
        return options.schedule
    if isinstance(options.schedule, Path) or options.schedule.endswith(".csv"):
        return Schedule.load(options.schedule)
    return None


def ranks_wanted(options: Options) -> int | None:
    """Returns how many ranks a table or placement in the options has; None without either."""
    table = given_schedule(options)
    if table is not None:
        return table.num_ranks
    placement = given_placement(options)
    return placement.num_ranks if placement is not None else None


def refuse_with_auto(options: Options) -> None:
    """Raises `PlanError` if what the tuner decides was given as well."""
    decided = ("partition", "placement", "chunks", "recompute", "schedule_options")
    conflicts = [f"{name}={value!r}" for name in decided if (value := getattr(options, name))]
    if conflicts:
        raise PlanError(
            f"schedule='auto' searches partition, placement and schedule together, but "
            f"{', '.join(conflicts)} was given too. Leave it out, or name a schedule"
        )


def _check_sizes(schedule: Schedule, num_ranks: int | None, microbatches: int) -> None:
    if num_ranks is not None and schedule.num_ranks != num_ranks:
        raise MeshError(
            f"the schedule is for {schedule.num_ranks} ranks, the mesh has {num_ranks} along its "
            f"pipeline axis. Use a mesh with {schedule.num_ranks} positions there, or a "
            f"schedule for {num_ranks} ranks"
        )
    if schedule.num_microbatches != microbatches:
        raise PlanError(
            f"the schedule runs {schedule.num_microbatches} microbatches, asked for were "
            f"{microbatches}. Pass microbatches={schedule.num_microbatches}, or a schedule for "
            f"{microbatches}"
        )


def layers_wanted(options: Options, schedule: Schedule) -> int:
    """Returns how many layers to look for: one per stage, and as many as a given partition has."""
    sizes = options.partition if options.plan is None else options.plan.partition
    if sizes is None or isinstance(sizes, str):
        return schedule.num_stages
    count = sizes.num_layers if isinstance(sizes, Partition) else sum(sizes)
    return max(schedule.num_stages, count)


def make_plan(options: Options, schedule: Schedule, graph: LayerGraph) -> Plan:
    """Returns the plan for the layers found in the model. Raises `PlanError` if none fits."""
    if options.profile is not None and options.profile.num_layers != graph.num_layers:
        raise PlanError(
            f"the profile {options.profile.name!r} is of {options.profile.num_layers} layers, "
            f"this model has {graph.num_layers}; it was made for another model or another "
            f"microbatch size. Profile this one (octopipe profile), or leave profile= out"
        )
    if options.plan is not None:
        _check_partition(options.partition, options.plan.partition)
        num_layers = options.plan.partition.num_layers
        if num_layers != graph.num_layers:
            raise PlanError(
                f"the plan is for a model of {num_layers} layers, this one has "
                f"{graph.num_layers}; it was made for another model or another microbatch size. "
                f"Tune again, or pass only its schedule= and placement="
            )
        return options.plan
    stages = schedule.num_stages
    sizes = _partition(options.partition, graph, options.profile, stages, schedule.num_microbatches)
    if sizes.num_stages != stages or sizes.num_layers != graph.num_layers:
        raise PlanError(
            f"the partition [{sizes}] has {sizes.num_stages} stages of "
            f"{sizes.num_layers} layers in all; the schedule runs {stages} stages and the "
            f"model has {graph.num_layers} layers. Give {stages} sizes that add up to "
            f"{graph.num_layers}"
        )
    recompute = _recompute(options.recompute, schedule)
    return Plan(sizes, schedule.placement, schedule, recompute)


def _partition(
    option: str | Partition | Sequence[int] | None,
    graph: LayerGraph,
    profile: Profile | None,
    stages: int,
    microbatches: int,
) -> Partition:
    """Returns the partition asked for; a named partitioner sees the profile, or operations."""
    if isinstance(option, Partition):
        return option
    if option is not None and not isinstance(option, str):
        return Partition(tuple(option))
    if graph.num_layers < stages:
        raise PlanError(
            f"the schedule runs {stages} stages, but the model has only {graph.num_layers} "
            f"layer(s), and a stage needs at least one. Use fewer ranks or chunks, or mark more "
            f"borders in the model with octopipe.boundary. Inside a loop they count only if it "
            f"runs over stacked layers, or over chunks and carries nothing but sums: a loop that "
            f"carries more, a cond or a custom_vjp belongs inside the layers. Use jax.vmap over "
            f"chunks, or leave chunks to microbatches="
        )
    if option == "uniform":
        return uniform_partition([layer.kind for layer in graph.layers], stages)
    operations = tuple(float(layer.flops) for layer in graph.layers)
    return partition(option or "balanced", profile or operations, stages, microbatches)


def _check_placement(placement: Placement | None, schedule: Schedule) -> None:
    if placement is not None and placement != schedule.placement:
        raise PlanError(
            f"the schedule holds its stages on ranks [{schedule.placement}], asked for was "
            f"[{placement}]. Give a schedule table or plan made for that placement, or name a "
            f"schedule, such as schedule='1f1b', to have an order made for it"
        )


def _check_partition(option: str | Partition | Sequence[int] | None, planned: Partition) -> None:
    if option is None:
        return
    sizes = option if isinstance(option, (str, Partition)) else Partition(tuple(option))
    if sizes != planned:
        raise PlanError(
            f"the plan has the partition [{planned}], asked for was [{sizes}]. Leave partition "
            f"out, or pass the plan's schedule= alone with it"
        )


def check_recompute(plan: Plan) -> None:
    """Raises `PlanError` for an R of a stage that stores its residuals, and so rebuilds none."""
    vain = {a for _, _, a in plan.schedule.actions() if a.kind is Kind.RECOMPUTE}
    vain = {a for a in vain if not plan.recomputes[a.stage]}
    if vain:
        stages = ", ".join(map(str, sorted({a.stage for a in vain})))
        raise PlanError(
            f"the table rebuilds residuals of stage {stages} ({min(vain)} and {len(vain) - 1} "
            f"more), but these stages are not recomputed. Leave recompute out, so that the table "
            f"decides, or take these actions out of the table"
        )


def _recompute(option: bool | Sequence[bool] | None, schedule: Schedule) -> tuple[bool, ...]:
    """Returns which stages are recomputed; without a word, those that the table has an R for."""
    stages = schedule.num_stages
    if option is None:
        again = {a.stage for _, _, a in schedule.actions() if a.kind is Kind.RECOMPUTE}
        return tuple(s in again for s in range(stages)) if again else ()
    if option is False:
        return ()
    if option is True:
        return (True,) * stages
    if len(option) != stages:
        raise PlanError(f"recompute has {len(option)} entries for {stages} stages")
    return tuple(option)
