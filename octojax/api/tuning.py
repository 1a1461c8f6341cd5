"""`schedule="auto"`: measure the model's layers on the devices, then search for a plan."""

from typing import Any

from octojax.api.options import Options
from octojax.errors import PlanError
from octojax.frontends import PureLoss
from octojax.ir import Plan
from octojax.mesh import PipelineMesh
from octojax.processes import several
from octojax.profiling import measure
from octojax.programs.microbatch import Microbatches
from octojax.tune import tune


def tuned_plan(
    pure: PureLoss,
    batch: Microbatches,
    tree: Any,
    mesh: PipelineMesh,
    options: Options,
) -> Plan:
    """Returns the tuner's plan for this model, these ranks and microbatches.

    The profile is `options.profile`, or measured on the first ranks' devices. Raises
    `PlanError` in a run of several processes, which would each measure something else.
    """
    if several() and options.profile is None:
        raise PlanError(
            "schedule='auto' measures the model, and several processes would each find another "
            "plan. Tune once (octopipe.compile in one process, or octopipe tune) and pass the "
            "plan as plan=, or pass profile= to tune from in every process alike"
        )
    profile = options.profile
    if profile is None:
        profile = measure(
            pure,
            tree.unflatten(batch.shapes(0)),
            devices=[rank.devices[0] for rank in mesh.ranks],
            min_layers=mesh.num_ranks,
        )
    result = tune(
        profile,
        mesh.num_ranks,
        batch.count,
        seconds=options.tune_seconds,
        seed=options.seed,
        replicated=False,
    )
    return result.plan
