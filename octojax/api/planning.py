"""From options to a checked plan: schedule table, partition, placement, recompute."""

from collections.abc import Sequence
from pathlib import Path

from octojax.api.options import Options
from octojax.errors import MeshError, PlanError
from octojax.ir import LayerGraph, Partition, Placement, Plan, Schedule
from octojax.ir.verify import verify
from octojax.schedules import generate


def choose_schedule(options: Options, num_ranks: int | None, microbatches: int) -> Schedule:
    """Returns the table that the options ask for, checked to be complete and free of deadlock.

    `num_ranks` None: the table may decide. Raises `ScheduleError` for a broken table,
    `ValueError` for sizes that a named schedule does not allow.
    """
    table = given_schedule(options)
    if table is None:
        schedule = generate(
            str(options.schedule),
            num_ranks or 1,
            microbatches,
            options.chunks,
            **options.schedule_options,
        )
    else:
        schedule = table
        _check_sizes(schedule, num_ranks, microbatches)
    verify(schedule, microbatches)
    return schedule


def given_schedule(options: Options) -> Schedule | None:
    """Returns the table in the options; None where they name a family to generate."""
    if options.plan is not None:
        return options.plan.schedule
    if isinstance(options.schedule, Schedule):
        return options.schedule
    if isinstance(options.schedule, Path) or options.schedule.endswith(".csv"):
        return Schedule.load(options.schedule)
    return None


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


def make_plan(options: Options, schedule: Schedule, graph: LayerGraph) -> Plan:
    """Returns the plan for the layers found in the model. Raises `PlanError` if none fits."""
    if options.plan is not None:
        found = options.plan.partition.num_layers
        if found != graph.num_layers:
            raise PlanError(
                f"the plan is for a model of {found} layers, this one has {graph.num_layers}; it "
                f"was made for another model or another microbatch size. Tune again, or pass "
                f"only its schedule= and placement="
            )
        return options.plan
    stages = schedule.num_stages
    partition = _partition(options.partition, graph, stages)
    if partition.num_stages != stages or partition.num_layers != graph.num_layers:
        raise PlanError(
            f"the partition [{partition}] has {partition.num_stages} stages of "
            f"{partition.num_layers} layers in all; the schedule runs {stages} stages and the "
            f"model has {graph.num_layers} layers. Give {stages} sizes that add up to "
            f"{graph.num_layers}"
        )
    _check_placement(options.placement, schedule)
    return Plan(partition, schedule.placement, schedule, _recompute(options.recompute, stages))


def _partition(
    wanted: str | Partition | Sequence[int] | None, graph: LayerGraph, stages: int
) -> Partition:
    if isinstance(wanted, Partition):
        return wanted
    if wanted is not None and not isinstance(wanted, str):
        return Partition(tuple(wanted))
    if graph.num_layers < stages:
        raise PlanError(
            f"the schedule runs {stages} stages, but the model has only {graph.num_layers} "
            f"layer(s), and a stage needs at least one. Use fewer ranks or chunks, or mark more "
            f"borders in the model with octopipe.boundary"
        )
    if wanted in (None, "balanced"):
        return balanced(tuple(layer.flops for layer in graph.layers), stages)
    if wanted == "uniform":
        each, more = divmod(graph.num_layers, stages)
        return Partition(tuple(each + (s < more) for s in range(stages)))
    raise PlanError(
        f"unknown partition {wanted!r}; give 'balanced', 'uniform', or layers per stage"
    )


def balanced(costs: Sequence[float], stages: int) -> Partition:
    """Returns the partition whose costliest stage is cheapest; then with least spread.

    Dynamic program over (stages, layers): minimises the largest stage, ties by the sum of
    squared stage costs. Every layer counts a little beside its cost, so that layers without
    operations are spread evenly too.
    """
    floor = max(sum(costs), 1.0) * 1e-6 / len(costs)
    sums = [0.0]
    for cost in costs:
        sums.append(sums[-1] + cost + floor)
    best: list[tuple[float, float, tuple[int, ...]]] = [
        (sums[n], sums[n] ** 2, (n,)) for n in range(len(sums))
    ]
    for stage in range(1, stages):
        best = [
            min(
                (
                    max(best[k][0], sums[n] - sums[k]),
                    best[k][1] + (sums[n] - sums[k]) ** 2,
                    (*best[k][2], n - k),
                )
                for k in range(stage, n)
            )
            if n > stage
            else (float("inf"), float("inf"), ())
            for n in range(len(sums))
        ]
    return Partition(best[-1][2])


def _check_placement(wanted: Placement | str | Sequence[int] | None, schedule: Schedule) -> None:
    if wanted is None:
        return
    if isinstance(wanted, str):
        wanted = Placement.parse(wanted, schedule.num_ranks)
    elif not isinstance(wanted, Placement):
        wanted = Placement.of(tuple(wanted), schedule.num_ranks)
    if wanted != schedule.placement:
        raise PlanError(
            f"the schedule holds its stages on ranks [{schedule.placement}], asked for was "
            f"[{wanted}]. Give a schedule table or plan made for that placement"
        )


def _recompute(wanted: bool | Sequence[bool] | None, stages: int) -> tuple[bool, ...]:
    if wanted is None or wanted is False:
        return ()
    if wanted is True:
        return (True,) * stages
    if len(wanted) != stages:
        raise PlanError(f"recompute has {len(wanted)} entries for {stages} stages")
    return tuple(wanted)
