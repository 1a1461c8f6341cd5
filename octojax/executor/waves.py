"""Compiles the programs of a step, each once it is known how its arguments lie.

    wave 0   F of every stage      writes residuals where XLA wants them
    wave 1   B or I                reads them there; writes what is kept for W
    wave 2   W

Where no axis is XLA's to spread over there is one wave.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jax.extend.core import ClosedJaxpr
from jax.sharding import PartitionSpec

from octojax import compat
from octojax.mesh import DATA_AXIS, Rank
from octojax.programs.build import Job
from octojax.programs.recipe import WHOLE, Recipe, on_rank, result_places

CompileJobs = Callable[[Sequence[Job]], list[Any]]


@dataclass(frozen=True)
class Compiled:
    """`programs[k]` is that of recipe k, `specs[n]` what XLA made of number n of
    `Recipe.specs`, `others` the further programs in their order."""

    programs: Mapping[int, Any]
    specs: Mapping[int, PartitionSpec]
    others: list[Any]
    compilations: int


def compile_in_waves(
    recipes: Mapping[int, tuple[Rank, Recipe]],
    names: Sequence[str],
    jaxprs: Sequence[ClosedJaxpr],
    others: Sequence[Job],
    compile_jobs: CompileJobs,
) -> Compiled:
    """Returns the compiled recipes, and `others`, which are compiled with the first of them.

    The first program that writes a value decides how all such values lie; one of the same wave
    that would have it otherwise is compiled again. Values that depend on each other in a circle
    are whole.
    """
    specs: dict[int, PartitionSpec] = {}
    programs: dict[int, Any] = {}
    further: list[Any] = []
    pending, count, first = list(recipes), 0, True
    while pending or first:
        wave = [k for k in pending if _is_ready(*recipes[k], specs)]
        if pending and not wave:
            wave = pending[:1]
            specs |= {n: WHOLE for n in _numbers(recipes[wave[0]][1].specs) if n not in specs}
        jobs = [_job(*recipes[k], names[k], jaxprs, specs) for k in wave]
        compiled = compile_jobs([*jobs, *(others if first else ())])
        count += len(compiled)
        if first:
            further, first = compiled[len(jobs) :], False
        for k, job, program in zip(wave, jobs, compiled, strict=False):
            if _agrees(*recipes[k], job, program, specs):
                programs[k] = program
        pending = [k for k in pending if k not in programs]
    return Compiled(programs, specs, further, count)


def _numbers(specs: Sequence[Any]) -> list[int]:
    return [spec for spec in specs if isinstance(spec, int)]


def _is_ready(rank: Rank, recipe: Recipe, specs: Mapping[int, PartitionSpec]) -> bool:
    return not rank.spreads or all(n in specs for n in _numbers(recipe.specs))


def _job(
    rank: Rank,
    recipe: Recipe,
    name: str,
    jaxprs: Sequence[ClosedJaxpr],
    specs: Mapping[int, PartitionSpec],
) -> Job:
    function, arguments = on_rank(recipe, jaxprs, rank, specs)
    function.__name__ = "run_" + "".join(c if c.isalnum() else "_" for c in name)
    where = result_places(recipe, jaxprs, rank, specs)
    return Job(f"{name} on rank {rank.index}", function, arguments, recipe.donated, where)


def _agrees(
    rank: Rank, recipe: Recipe, job: Job, program: Any, specs: dict[int, PartitionSpec]
) -> bool:
    """Whether a program writes where others expect it; notes what it is the first to decide."""
    agrees = True
    for at, spec in enumerate(recipe.output_specs):
        if not isinstance(spec, int) or job.out_shardings[at] is not None:
            continue
        actual = compat.spec_of(program.output_shardings[at])
        if rank.data_size > 1:
            assert actual[0] in (DATA_AXIS, (DATA_AXIS,)), actual
            actual = PartitionSpec(*actual[1:])
        agrees &= specs.setdefault(spec, actual) == actual
    return agrees
