"""`schedule="auto"`: measure the model's layers on the devices, then search for a plan."""

import json
from contextlib import nullcontext
from typing import Any

import jax
import optax

from octojax.api.options import Options
from octojax.frontends import PureLoss
from octojax.ir import Plan, Profile
from octojax.mesh import PipelineMesh
from octojax.processes import busy, everyone
from octojax.profiling.together import measure_together
from octojax.programs.microbatch import Microbatches
from octojax.tune import tune
from octojax.tune.ticker import Ticker


def tuned_plan(
    pure: PureLoss,
    batch: Microbatches,
    tree: Any,
    mesh: PipelineMesh,
    options: Options,
    optimizer: optax.GradientTransformation | None = None,
) -> Plan:
    """Returns the tuner's plan for this model, these ranks and microbatches.

    The profile is `options.profile`, or measured on the ranks' devices, with the state that
    `optimizer` keeps for each layer. Of several processes the
    first one searches, and all run its plan.
    """
    profile = options.profile or measure_together(
        pure, tree.unflatten(batch.shapes(0)), mesh, optimizer=optimizer, microbatches=batch.count
    )
    plan = None
    if jax.process_index() == 0:
        with busy("searching a plan"):
            plan = _search(profile, mesh, batch, options)
    text = "" if plan is None else json.dumps(plan.to_json())
    answer = everyone(text, "the tuned plan", patience_s=options.tune_seconds)[0]
    return plan or Plan.from_json(json.loads(answer))


def _search(profile: Profile, mesh: PipelineMesh, batch: Microbatches, options: Options) -> Plan:
    with Ticker(options.tune_seconds, None) if options.progress else nullcontext() as ticker:
        return tune(
            profile,
            mesh.num_ranks,
            batch.count,
            seconds=options.tune_seconds,
            seed=options.seed,
            replicated=False,
            progress=None if ticker is None else ticker.show,
        ).plan
