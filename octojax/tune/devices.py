"""How many devices go along the pipeline, the tensor and the data axis, with the plan for each."""

import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from octojax.errors import CapacityError
from octojax.ir.partition import Partition
from octojax.ir.plan import Plan
from octojax.ir.profile import Profile
from octojax.schedules import generate
from octojax.simulate import simulate
from octojax.tune.bound import lower_bound
from octojax.tune.measure import fits, measure
from octojax.tune.memory import size
from octojax.tune.mesh_costs import Base, MeshSizes, on_mesh, step_ends
from octojax.tune.problem import Problem
from octojax.tune.result import TuneResult
from octojax.tune.sizes_table import DevicesResult, Weighed
from octojax.tune.tuner import tune

DEFAULT_SECONDS = 60.0
MOST_MICROBATCHES = 256
MOST_TENSOR = 8
"""By default a tensor axis is no wider than that, or than a node."""
SEARCHED, FINALISTS = 6, 2
"""Plans are searched for so many meshes, each with the microbatches and `zero` that are quickest
with 1F1B, for three fifths of the time; then for so many of the best again, with what is left."""
LEAST_SECONDS = 0.5
NOT_SEARCHED = ", not searched"


@dataclass(frozen=True)
class _Choice:
    """Sizes with their problem, before a plan is searched."""

    sizes: MeshSizes
    microbatches: int
    profile: Profile
    bound_s: float


def tune_devices(
    profile: Profile,
    devices: int,
    global_batch: int,
    *,
    max_tensor: int | None = None,
    zero: Iterable[int] = (0, 1),
    capacity_bytes: float | None = None,
    seconds: float | None = None,
    iterations: int | None = None,
    seed: int = 0,
    progress: Callable[[str], None] | None = None,
) -> DevicesResult:
    """Returns the quickest way found to train `global_batch` samples a step on `devices`.

    Weighed are all pipeline x tensor x data whose product is `devices`, numbers of samples in a
    microbatch that are powers of two, and the `zero` levels; each with a plan of its own (`tune`:
    partition, placement, schedule, recompute). `profile` has the costs on one device (or on
    `tensor_parallel`) for `microbatch_size` samples; see `octojax.tune.mesh_costs`. All sizes are
    measured with 1F1B; plans are searched for those that are quickest then, unless their proven
    bound is above what another reached. With `iterations` alone the result depends on `seed` only.

    Raises `ValueError` for sizes that make no sense, `CapacityError` where nothing fits, saying
    for each what is lacking.
    """
    _check(devices, global_batch, max_tensor)
    most = max_tensor or min(MOST_TENSOR, profile.machine.ranks_per_node or MOST_TENSOR)
    rows: list[Weighed] = []
    open_: list[_Choice] = []
    for sizes, microbatches in candidates(profile, devices, global_batch, most, tuple(zero)):
        choice = _choice(profile, sizes, microbatches, capacity_bytes)
        if isinstance(choice, Weighed):
            rows.append(choice)
        else:
            open_.append(choice)
    open_.sort(key=lambda c: (c.bound_s / global_batch, c.sizes))
    budget = DEFAULT_SECONDS if seconds is None and iterations is None else seconds
    search = _Search(profile, global_batch, capacity_bytes, budget, iterations, seed, progress)
    search.measure(open_)
    search.search()
    rows += search.rows
    if search.best is None:
        raise CapacityError(_nothing_fits(profile, devices, global_batch, rows))
    order = sorted(rows, key=lambda r: (r.step_s is None, r.step_s or r.bound_s, r.sizes))
    return DevicesResult(profile.name, devices, global_batch, tuple(order), *search.best)


def candidates(
    profile: Profile, devices: int, global_batch: int, max_tensor: int, zero: Sequence[int]
) -> Iterator[tuple[MeshSizes, int]]:
    """Yields all sizes, and the number of microbatches that each has."""
    made_for = Base.of(profile).tensor  # good for that tensor axis alone, unless it is one device
    for tensor in _divisors(devices) if made_for == 1 else [made_for] * (devices % made_for == 0):
        for data in _divisors(devices // tensor):
            pipeline = devices // tensor // data
            if (
                tensor > max(max_tensor, made_for)
                or pipeline > profile.num_layers
                or global_batch % data
            ):
                continue
            per_shard = global_batch // data
            for samples in (b for b in _divisors(per_shard) if b & (b - 1) == 0):
                if per_shard // samples > MOST_MICROBATCHES:
                    continue
                for level in sorted(set(zero)) if data > 1 else (0,):
                    yield MeshSizes(pipeline, tensor, data, samples, level), per_shard // samples


def _divisors(number: int) -> list[int]:
    return [d for d in range(1, number + 1) if number % d == 0]


def _choice(
    profile: Profile, sizes: MeshSizes, microbatches: int, capacity_bytes: float | None
) -> _Choice | Weighed:
    """The sizes with their bound, or why no plan of theirs fits."""
    mine = replace(on_mesh(profile, sizes), microbatches=microbatches)
    try:
        problem = Problem.of(mine, sizes.pipeline, microbatches, capacity_bytes)
    except CapacityError as error:
        return Weighed(sizes, microbatches, math.inf, note=_first_line(error))
    bound_s = lower_bound(problem).seconds
    short = float(problem.state_bytes.sum() - problem.capacity_bytes.sum()) / sizes.pipeline
    if short > 0:
        return Weighed(
            sizes,
            microbatches,
            bound_s,
            note=f"weights, gradients and optimizer state alone lack {size(short)} a device",
        )
    return _Choice(sizes, microbatches, mine, bound_s)


@dataclass(frozen=True)
class _Reached:
    """What a choice came to: by the search, or (`result` None) by 1F1B on a balanced partition."""

    row: Weighed
    choice: _Choice
    result: TuneResult | None = None

    @property
    def step_s(self) -> float:
        return math.inf if self.row.step_s is None else self.row.step_s


class _Search:
    """The plans of the open choices; lives for one call of `tune_devices`."""

    def __init__(
        self,
        profile: Profile,
        global_batch: int,
        capacity_bytes: float | None,
        seconds: float | None,
        iterations: int | None,
        seed: int,
        progress: Callable[[str], None] | None,
    ) -> None:
        self.profile, self.global_batch = profile, global_batch
        self.capacity_bytes, self.seed = capacity_bytes, seed
        self.seconds, self.iterations, self.progress = seconds, iterations, progress
        self.begun = time.perf_counter()
        self.reached: dict[MeshSizes, _Reached] = {}

    @property
    def rows(self) -> list[Weighed]:
        return [outcome.row for outcome in self.reached.values()]

    @property
    def best(self) -> tuple[Weighed, TuneResult, Profile] | None:
        searched = [f for f in self.reached.values() if f.result is not None]
        if not searched:
            return None
        best = min(searched, key=lambda f: (f.step_s, f.row.sizes))
        assert best.result is not None
        return best.row, best.result, best.choice.profile

    def measure(self, choices: Sequence[_Choice]) -> None:
        """Notes what 1F1B takes with every choice, recomputing everything where it must."""
        for choice in choices:
            self.reached[choice.sizes] = _Reached(self._first_row(choice), choice)

    def search(self) -> None:
        """Searches plans for the choices that promise most, then longer for the best of them."""
        ranked = sorted(
            self.reached.values(), key=lambda f: (f.step_s, f.choice.bound_s, f.row.sizes)
        )
        shapes: dict[tuple[int, int, int], _Choice] = {}
        for choice in ranked:  # the best of every mesh
            s = choice.row.sizes
            shapes.setdefault((s.pipeline, s.tensor, s.data), choice.choice)
        chosen = list(shapes.values())[:SEARCHED]
        self._each(chosen, 0.6)
        if self.best is None:  # what fits is harder to find than with 1F1B
            self._each([f.choice for f in ranked if f.choice not in chosen], 0.9)
        if self.seconds is not None:
            searched = [f for f in self.reached.values() if f.result is not None]
            best = sorted(searched, key=lambda f: f.step_s)[:FINALISTS]
            self._each([f.choice for f in best], 1.0)

    def _each(self, choices: Sequence[_Choice], until: float) -> None:
        for at, choice in enumerate(choices):
            best_s = math.inf if self.best is None else self.best[0].step_s or math.inf
            if choice.bound_s >= best_s:
                continue
            if self.seconds is None:
                self._tune(choice, None)
                continue
            left = until * self.seconds - (time.perf_counter() - self.begun)
            share = left / (len(choices) - at)
            if share > LEAST_SECONDS or self.best is None:
                self._tune(choice, max(share, LEAST_SECONDS))

    def _first_row(self, choice: _Choice) -> Weighed:
        sizes, microbatches = choice.sizes, choice.microbatches
        problem = Problem.of(choice.profile, sizes.pipeline, microbatches, self.capacity_bytes)
        partition = Partition(problem.balanced_sizes(sizes.pipeline))
        table = generate("1f1b", sizes.pipeline, microbatches)
        for recompute in ((), (True,) * sizes.pipeline):
            plan = Plan(partition, table.placement, table, recompute)
            evaluation = measure(plan, problem)
            if fits(evaluation, problem):
                ends = step_ends(self.profile, sizes, _layers_of_ranks(plan))
                return Weighed(
                    sizes,
                    microbatches,
                    choice.bound_s,
                    float(evaluation.makespan_s) + max(ends.after_s) + max(ends.before_s),
                    float(evaluation.makespan_s),
                    float(evaluation.peak_bytes.max()),
                    sum(recompute),
                    plan.num_stages,
                    f"1F1B{NOT_SEARCHED}",
                )
        over = float((evaluation.peak_bytes - problem.capacity_bytes).max())
        note = f"1F1B lacks {size(over)} a device, all recomputed"
        return Weighed(sizes, microbatches, choice.bound_s, note=f"{note}{NOT_SEARCHED}")

    def _tune(self, choice: _Choice, seconds: float | None) -> None:
        sizes = choice.sizes
        before = self.reached[sizes]
        if self.progress is not None:
            best = self.best
            so_far = "" if best is None else f", best {best[0].step_s or 0:.4g} s a step"
            self.progress(f"{row_name(sizes)}{so_far}")
        try:
            result = tune(
                choice.profile,
                sizes.pipeline,
                choice.microbatches,
                seconds=seconds,
                iterations=self.iterations,
                seed=self.seed,
                capacity_bytes=self.capacity_bytes,
                replicated=False,
            )
        except CapacityError:
            note = before.row.note.replace(NOT_SEARCHED, ", and no plan was found that fits")
            self.reached[sizes] = replace(before, row=replace(before.row, note=note))
            return
        step_s = self._step_s(result.plan, choice)
        if before.result is not None and before.step_s <= step_s:
            return
        row = Weighed(
            sizes,
            choice.microbatches,
            choice.bound_s,
            step_s,
            result.makespan_s,
            max(result.peak_bytes),
            sum(result.plan.recompute),
            result.plan.num_stages,
        )
        self.reached[sizes] = _Reached(row, choice, result)

    def _step_s(self, plan: Plan, choice: _Choice) -> float:
        """The simulated step with what the data axis adds at its ends."""
        timeline = simulate(plan, choice.profile)
        ranks = range(plan.num_ranks)
        spans = [[a for a in timeline.actions if a.rank == rank] for rank in ranks]
        first = [min((a.start_s for a in own), default=0.0) for own in spans]
        last = [max((a.end_s for a in own), default=0.0) for own in spans]
        ends = step_ends(self.profile, choice.sizes, _layers_of_ranks(plan))
        return ends.step_s(first, last)


def _layers_of_ranks(plan: Plan) -> list[list[int]]:
    """The layers that each rank holds."""
    return [
        [
            at
            for stage, homes in enumerate(plan.placement.stages)
            if rank in homes
            for at in plan.partition.layers(stage)
        ]
        for rank in range(plan.num_ranks)
    ]


def row_name(sizes: MeshSizes) -> str:
    """Returns the sizes as text for progress."""
    return (
        f"pipeline {sizes.pipeline} x tensor {sizes.tensor} x data {sizes.data}, "
        f"{sizes.samples} samples a microbatch"
    )


def _check(devices: int, global_batch: int, max_tensor: int | None) -> None:
    for name, value in (
        ("devices", devices),
        ("global_batch", global_batch),
        ("max_tensor", 1 if max_tensor is None else max_tensor),
    ):
        if value < 1:
            raise ValueError(f"{name} = {value}, expected a number >= 1")


def _nothing_fits(
    profile: Profile, devices: int, global_batch: int, rows: Sequence[Weighed]
) -> str:
    if not rows:
        return (
            f"there is no way to divide {devices} devices and a global batch of {global_batch} "
            f"samples: pipeline ranks are at most the {profile.num_layers} layers of "
            f"{profile.name!r}, the data axis divides the batch, and a step has at most "
            f"{MOST_MICROBATCHES} microbatches. Choose another batch"
        )
    lines = [f"no plan of {profile.name!r} fits on {devices} devices:"]
    lines += [f"  {row_name(r.sizes)}, zero {r.sizes.zero}: {r.note}" for r in rows]
    lines.append("What would help: more devices, a wider tensor axis (max_tensor), smaller batches")
    return "\n".join(lines)


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0]
