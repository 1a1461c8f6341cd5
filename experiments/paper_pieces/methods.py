"""The paper's baselines as plans: what it compares OctoPipe with, section VIII.

All split their backward, W right after I, as the paper does. Stages are uniform but for Mist's:
inner layers evenly by count, embedding with the first, head with the last.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from octojax.ir import Placement, Plan, Profile, Schedule, Timeline, uniform_partition
from octojax.partitioners import partition
from octojax.schedules import generate
from octojax.simulate import simulate
from octojax.tune.baselines import split

METHODS = ("1F1B", "Interleaved", "Tessel", "Mist", "OctoPipe")
TESSEL_COSTS = (((1,), (1,)), ((1,), (2,)), ((2,), (3,)))
"""Slots of F and B that the repetend is searched for; the best table is Tessel's."""


@dataclass(frozen=True)
class Method:
    """A baseline's plan, and its step on the profile."""

    name: str
    plan: Plan
    timeline: Timeline

    @property
    def makespan_s(self) -> float:
        return self.timeline.makespan_s


def baselines(profile: Profile, recompute: bool = False, quick: bool = False) -> dict[str, Method]:
    """Returns 1F1B, Interleaved, Tessel and Mist on the profile's ranks and microbatches.

    Interleaved has one inner layer in a stage (56 stages of Nemotron-H Small, TABLE III); Tessel
    the best of its configurations, which the paper tries as well. With `recompute` every stage
    of every plan computes its forward again.
    """
    made = {}
    for name, plans in (
        ("1F1B", one_f_one_b(profile)),
        ("Interleaved", interleaved(profile)),
        ("Tessel", tessel(profile, quick)),
        ("Mist", mist(profile)),
    ):
        methods = [simulated(name, plan, profile, recompute) for plan in plans]
        if methods:
            made[name] = min(methods, key=lambda method: method.makespan_s)
    return made


def simulated(name: str, plan: Plan, profile: Profile, recompute: bool = False) -> Method:
    """Returns the method with its simulated step."""
    if recompute:
        plan = replace(plan, recompute=(True,) * plan.num_stages)
    return Method(name, plan, simulate(plan, profile))


def one_f_one_b(profile: Profile) -> Iterator[Plan]:
    ranks, microbatches = _sizes(profile)
    yield _uniform(
        "1F1B", profile, generate("1f1b", ranks, microbatches), Placement.sequential(ranks)
    )


def interleaved(profile: Profile, chunks: int | None = None) -> Iterator[Plan]:
    """Yields the table with so many chunks a rank; by default with one inner layer in a stage."""
    ranks, microbatches = _sizes(profile)
    chunks = chunks or (profile.num_layers - 2) // ranks
    rows = generate("interleaved", ranks, microbatches, chunks=chunks)
    yield _uniform(f"interleaved {chunks}", profile, rows, Placement.loop(ranks, chunks))


def best_interleaved(profile: Profile) -> Method:
    """Returns the quickest of all chunk counts that divide the inner layers evenly."""
    ranks, _ = _sizes(profile)
    most = (profile.num_layers - 2) // ranks
    plans = [p for c in range(2, most + 1) if most % c == 0 for p in interleaved(profile, c)]
    methods = [simulated("best interleaved", plan, profile) for plan in plans]
    return min(methods, key=lambda method: method.makespan_s)


def tessel(profile: Profile, quick: bool = False) -> Iterator[Plan]:
    """Yields tables on a V of two stages a rank (8 stages of Nemotron-H Small, TABLE III)."""
    ranks, microbatches = _sizes(profile)
    places = (*range(ranks), *reversed(range(ranks)))
    for forward, backward in TESSEL_COSTS[: 1 if quick else None]:
        rows = generate(
            "tessel", ranks, microbatches, placement=places, forward=forward, backward=backward,
            memory=(3 * ranks,),
        )  # fmt: skip
        placement = Placement(tuple((rank,) for rank in places), ranks)
        yield _uniform(f"tessel {forward[0]}:{backward[0]}", profile, rows, placement)


def mist(profile: Profile) -> Iterator[Plan]:
    """Yields 1F1B on Mist's partition."""
    ranks, microbatches = _sizes(profile)
    sizes = partition("mist", profile, ranks, microbatches)
    rows = split(generate("1f1b", ranks, microbatches))
    yield Plan(sizes, Placement.sequential(ranks), rows, name="mist")


def tokens_per_gpu_s(profile: Profile, step_s: float, data: int = 1) -> float:
    """Returns the paper's TGS: tokens of a step by the devices of one pipeline and its seconds.

    The profile says how many devices a rank has and how long its sequences are; of `data`
    pipelines each has the profile's microbatches, and `step_s` is the step of all of them.
    """
    extra = dict(profile.extra)
    ranks, microbatches = _sizes(profile)
    tokens = microbatches * extra["microbatch_size"] * extra["sequence"] * data
    return tokens / (step_s * ranks * extra["tensor_parallel"] * data)


def _uniform(name: str, profile: Profile, rows: Schedule, placement: Placement) -> Plan:
    sizes = uniform_partition(profile.kinds, placement.num_stages)
    return Plan(sizes, placement, split(rows), name=name)


def _sizes(profile: Profile) -> tuple[int, int]:
    assert profile.ranks is not None
    assert profile.microbatches is not None
    return profile.ranks, profile.microbatches
