"""Algorithm 1 of the OctoPipe paper (section VI): tune the phase whose bubbles are largest.

    gap between the ranks' bubbles > lightest layer    partition: migrate and measure again
    else boundary bubbles > residual bubbles           placement: disperse, exchange
    else                                               schedule: advance F and I, delay W, overlap

The paper leaves open what happens when the phase so chosen finds nothing: here its turn passes
to the next one until something improves. `by_chance` draws the phase instead (the paper's
random search). Starts from 1F1B with split backward on a uniform partition.
"""

from collections.abc import Iterator
from dataclasses import replace
from itertools import islice

import numpy as np

from octojax.ir.partition import uniform_partition
from octojax.tune.candidate import Candidate, anchored, stage_arrays
from octojax.tune.keys import ONE_F_ONE_B, by_formula
from octojax.tune.measure import run
from octojax.tune.memory import frugal
from octojax.tune.moves import (
    TRIED,
    Account,
    account,
    advance,
    disperse,
    exchange,
    migrate,
    overlap,
)
from octojax.tune.search import PHASES, Search

STALL = 30
"""Stop after so many iterations without improvement, as the paper does."""


def search_octopipe(
    search: Search,
    phases: frozenset[str],
    seed: int,
    by_chance: bool = False,
    overlap: bool = True,
) -> None:
    """Improves `search` by Algorithm 1 until a limit is reached or nothing improves."""
    problem, rng = search.problem, np.random.default_rng(seed)
    current = first_candidate(search)
    seen = look(current, search)
    current, seen = fitted(current, seen, search)
    stalled = 0
    while not search.finished():
        phase = choose(seen, problem, phases, stalled, rng if by_chance else None)
        step = tuned(phase, current, seen, search, rng, overlap)
        search.iteration += 1
        search.counts[phase] += 1
        if step is not None:
            current, seen = step
            search.offer_candidate(current, seen.makespan_s, phase)
            stalled = 0
        else:
            stalled += 1
        search.report(phase)
        if stalled >= STALL and search.limits.iterations is None:
            search.stop = "no improvement"


def first_candidate(search: Search) -> Candidate:
    """Returns what was asked for, or split 1F1B on the uniform partition, as priorities."""
    if search.start:
        return search.constraints.applied(search.start[0])
    p = search.problem
    sizes = uniform_partition(p.profile.kinds, p.ranks).sizes
    keys = by_formula(p, ONE_F_ONE_B, late_weights=False)
    return search.constraints.applied(Candidate.of(np.repeat(np.arange(p.ranks), sizes), keys))


def choose(
    seen: Account,
    problem,
    phases: frozenset[str],
    stalled: int,
    rng: np.random.Generator | None,
) -> str:
    """Returns the phase of this iteration: lines 9 to 17 of Algorithm 1, or one by chance."""
    allowed = [phase for phase in PHASES if phase in phases]
    if rng is not None:
        return allowed[int(rng.integers(len(allowed)))]
    gap = seen.bubble_s.max() - seen.bubble_s.min()
    if gap > problem.compute_s.min() * problem.microbatches:
        first = "partition"
    elif seen.boundary_s.sum() > seen.residual_s.sum():
        first = "placement"
    else:
        first = "schedule"
    order = PHASES[PHASES.index(first) :] + PHASES[: PHASES.index(first)]
    usable = [phase for phase in order if phase in phases]
    return usable[stalled % len(usable)]


def tuned(
    phase: str,
    current: Candidate,
    seen: Account,
    search: Search,
    rng: np.random.Generator,
    hide: bool,
) -> tuple[Candidate, Account] | None:
    """Returns the best candidate that one phase's moves reach, or None if none is better.

    Partition repeats migrate-and-reevaluate until no better partition is found; the others
    take the best of a bounded number of candidates.
    """
    start = seen.makespan_s
    while True:
        best: tuple[Candidate, Account] | None = None
        for candidate in tries(phase, current, seen, search, rng, hide):
            outcome = look(candidate, search)
            if outcome.makespan_s < (best[1] if best else seen).makespan_s * (1 - 1e-9):
                best = candidate, outcome
        if best is None:
            return (current, seen) if seen.makespan_s < start else None
        current, seen = best
        if phase != "partition" or search.finished():
            return current, seen


def tries(
    phase: str,
    current: Candidate,
    seen: Account,
    search: Search,
    rng: np.random.Generator,
    hide: bool,
) -> Iterator[Candidate]:
    """Yields the candidates that one phase measures in one round."""
    p, rules = search.problem, search.constraints

    def allowed(moves: Iterator[Candidate]) -> Iterator[Candidate]:
        return (c for c in map(rules.applied, moves) if rules.allow(c))

    if phase == "partition":
        yield from _sample(allowed(migrate(current, seen, p)), TRIED, rng)
    elif phase == "placement":
        if len(rules.layers_P):
            yield from _sample(map(rules.applied, search.start), TRIED, rng)
        yield from _sample(allowed(disperse(current, seen, p)), TRIED, rng)
        yield from _sample(allowed(exchange(current, seen, p)), TRIED, rng)
    else:
        timed = _anchor(current, seen)
        yield from islice(advance(timed, seen, p, rng), TRIED)
        if hide:
            yield from islice(overlap(timed, seen, p, rng), TRIED)


def _sample(moves: Iterator[Candidate], many: int, rng: np.random.Generator) -> list[Candidate]:
    """Returns the first third as they come, and others by chance."""
    every = list(islice(moves, 50 * many))
    if len(every) <= many:
        return every
    head = many // 3
    rest = rng.permutation(len(every) - head)[: many - head] + head
    return every[:head] + [every[i] for i in rest]


def look(candidate: Candidate, search: Search) -> Account:
    """Returns the simulated account of a candidate; infinite makespan if it does not fit."""
    p = search.problem
    makespan, rows, starts, _ = run(candidate, p, search.arrays)
    search.evaluations += 1
    if makespan == np.inf:
        none = np.zeros(p.ranks)
        return Account(makespan, rows[:0], starts[:0], starts[:0], none, none, none)
    times = stage_arrays(*candidate.arrays[:5], *search.arrays[:7])[4]
    ends = starts + times[rows[:, 1], rows[:, 2]]
    return account(makespan, rows, starts, ends, p.ranks)


def _anchor(candidate: Candidate, seen: Account) -> Candidate:
    keys = anchored(
        candidate.rank_L, candidate.cut_L, candidate.key_LKM, seen.rows, seen.starts, len(seen.rows)
    )
    return replace(candidate, key_LKM=keys)


def fitted(candidate: Candidate, seen: Account, search: Search) -> tuple[Candidate, Account]:
    """Returns the candidate with W advanced and, if need be, stages recomputed until it fits.

    Later schedules advance W by themselves: a rank whose memory is full runs W before F.
    """
    if seen.makespan_s < np.inf:
        search.offer_candidate(candidate, seen.makespan_s, "schedule")
        return candidate, seen
    lean = candidate
    for lean in map(search.constraints.applied, frugal(candidate)):
        if not search.constraints.allow(lean):
            continue
        seen = look(lean, search)
        if seen.makespan_s < np.inf:
            search.offer_candidate(lean, seen.makespan_s, "schedule")
            break
    return lean, seen
