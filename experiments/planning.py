"""Choosing the plan of a run: profile, tune, and what to compare the outcome with."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import jax
from runner import Settings

import octojax as octopipe
from octojax.ir import LayerCost, LayerGraph, Machine, Placement, Plan, Profile, uniform_partition
from octojax.profiling import measure
from octojax.report import Panel
from octojax.schedules import generate
from octojax.simulate import simulate
from octojax.tune import TuneResult, tune
from octojax.tune.mesh_costs import MeshSizes, on_mesh

OPERATIONS_PER_S = 5e9  # only sets the unit of time where nothing was measured


@dataclass(frozen=True)
class Plans:
    """What `octopipe.compile` is told, and how it was arrived at.

    `profile` and `result` are there where the plan was tuned.
    """

    chosen: dict[str, Any]
    profile: Profile | None = None
    result: TuneResult | None = None
    others: dict[str, Plan] = field(default_factory=dict)

    def pictures(self, plan: Plan, profile: Profile) -> tuple[list[Panel], list[str]]:
        """Returns the panels to draw and the lines to print under them."""
        basis = "measured layers" if self.profile else "operation counts"
        bound = self.result.lower_bound_s if self.result else None
        name = plan.name or str(self.chosen.get("schedule", "plan"))
        panels = [Panel(f"{name}, simulated", simulate(plan, profile), bound)]
        lines = [f"simulated from {basis}"]
        for name, other in self.others.items():
            timeline = simulate(other, profile)
            panels.append(Panel(f"{name}, simulated", timeline))
            ratio = timeline.makespan_s / panels[0].timeline.makespan_s
            lines.append(f"simulated speedup over {name}: [bold]{ratio:.2f}x[/]")
        return panels, lines

    def summary(self, plan: Plan, profile: Profile) -> dict[str, Any]:
        """Returns makespans as JSON data."""
        found: dict[str, Any] = {"makespan_s": simulate(plan, profile).makespan_s}
        for name, other in self.others.items():
            found[name] = simulate(other, profile).makespan_s
        if self.result:
            found["lower_bound_s"] = self.result.lower_bound_s
        return found


def from_operations(layers: LayerGraph, settings: Settings) -> Profile:
    """Returns a profile in which time is operations: backward halves cost what F costs."""
    return Profile(
        f"{settings.name} by operation counts",
        tuple(
            LayerCost(
                layer.kind,
                *(max(layer.flops, 1e4) / OPERATIONS_PER_S for _ in range(3)),
                param_bytes=layer.param_bytes,
                state_bytes=4 * layer.param_bytes,
                output_bytes=layer.output_bytes,
            )
            for layer in layers.layers
        ),
        Machine("this one, as counted"),
        settings.ranks,
        settings.microbatches,
    )


def measured(model: Any, loss: Any, optimizer: Any, batch: Any, settings: Settings) -> Profile:
    """Returns the profile of the model's layers, for one microbatch: measured on the first device,
    with its share of the batch, and divided over the tensor axis as `octojax.tune.mesh_costs` says.
    An expert axis divides experts alone, which the profile counts whole.
    """
    axes = settings.axes
    data, tensor = axes.get("data", 1), axes.get("tensor", 1)
    rows = -(-settings.batch // settings.microbatches // data)
    profile = measure(
        octopipe.adapt(model, loss),
        jax.tree.map(lambda x: x[:rows], batch),
        optimizer=optimizer,
        devices=jax.devices()[: settings.ranks],
        min_layers=settings.ranks,
        name=settings.name,
        ranks=settings.ranks,
        microbatches=settings.microbatches,
        rounds=9,
        target_s=0.0,  # layers find the caches as a step leaves them: full of the others' values
    )
    if len(axes) == 1:
        return profile
    alike = profile.on(replace(profile.machine, speeds=()))
    samples = dict(profile.extra).get("microbatch_size", 1)
    sizes = MeshSizes(settings.ranks, tensor, data, samples=samples)
    return replace(on_mesh(alike, sizes), microbatches=settings.microbatches)


FIRST_USE = """
from octojax.ir import LayerCost, Machine, Profile
from octojax.tune import tune
tune(Profile("x", (LayerCost("x", 1.0, 1.0, 1.0),) * 2, Machine()), 2, 1, seconds=0.1)
"""


@contextmanager
def tuner_compilation() -> Iterator[None]:
    """Has another process compile the tuner meanwhile, once for all runs: a new clone's first
    plan waits for that otherwise, while one core is idle."""
    process = subprocess.Popen(
        [sys.executable, "-c", FIRST_USE], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        yield
        process.wait(60)
    except subprocess.TimeoutExpired:
        pass  # the tuner compiles what it finds missing
    finally:
        process.kill()
        process.wait()


def tuned(profile: Profile, settings: Settings) -> Plans:
    """Returns the tuner's plan for a profile, with 1F1B on uniform stages to compare with.

    This is what `octopipe.compile(..., schedule="auto")` does inside; here the profile and the
    tuner's account are wanted too.
    """
    result = tune(profile, seconds=settings.tune_seconds, seed=settings.seed, replicated=False)
    return Plans({"plan": result.plan}, profile, result, {"1f1b": one_f_one_b(profile, settings)})


def one_f_one_b(profile: Profile, settings: Settings) -> Plan:
    """Returns what a user without a tuner would run: equal numbers of layers, fused backward."""
    return Plan(
        uniform_partition(profile.kinds, settings.ranks),
        Placement.sequential(settings.ranks),
        generate("1f1b", settings.ranks, settings.microbatches),
        name="1f1b, uniform",
    )
