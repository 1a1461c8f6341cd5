"""Algorithm 1 of the OctoPipe paper (section VI): tune the phase whose bubbles are largest.

    gap between the ranks' bubbles > a layer of the   partition: migrate and measure again
                           most loaded rank
    else boundary bubbles > residual bubbles          placement: deal anew, disperse, exchange
    else                                              schedule: F and I earlier, W later, overlap

Where the paper leaves something open, this is what the figures in
`docs/results/tuner.md` (TABLE V) made us choose:

* Its bound of the gap is the lightest layer of the model. Where one is light (an embedding), whole
  layers never come so close, and partition would be tuned for ever: here it is the lightest layer
  that the most loaded rank could give.
* A phase that improves nothing passes its turn to the next one, until something improves.
* The best candidate of an iteration is taken though it is a little slower, by a heat that cools
  down over the budget: a search that only improves ends where it came to rest first, and then all
  phases come in turn.

`by_chance` draws the phase instead (the paper's random search). Starts from 1F1B with split
backward on a uniform partition.
"""

from collections.abc import Iterator
from dataclasses import replace
from itertools import islice

import numpy as np

from octojax.ir.partition import uniform_partition
from octojax.tune.candidate import Candidate, anchored, stage_arrays
from octojax.tune.justify import ROUNDS, justified
from octojax.tune.keys import ONE_F_ONE_B, by_formula
from octojax.tune.measure import run
from octojax.tune.memory import frugal
from octojax.tune.moves import (
    TRIED,
    Account,
    account,
    advance,
    deal,
    disperse,
    exchange,
    migrate,
    overlap,
)
from octojax.tune.problem import Problem
from octojax.tune.search import PHASES, Search

STALL = 100
"""Stop after so many iterations in which nothing better than the best was found, as the paper does
"for several"; not where iterations are limited."""
JUSTIFICATION = 4 * ROUNDS
"""Schedules that one forward-backward justification makes, at most."""
HOT = 0.1
"""Heat at first, as a share of what moving a layer changes (the makespan by ranks over layers)."""


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
    best_s, failures, stalled = seen.makespan_s, 0, 0
    while not search.finished():
        phase = choose(current, seen, problem, phases, failures, rng if by_chance else None)
        heat = HOT * problem.ranks / problem.num_layers * (1 - search.share) ** 1.5
        limit = seen.makespan_s * (1 + heat * rng.exponential())
        step = stepped(phase, current, seen, search, rng, overlap)
        search.iteration += 1
        search.counts[phase] += 1
        failures, stalled = failures + 1, stalled + 1
        if step is not None and step[1].makespan_s <= limit:
            if step[1].makespan_s < seen.makespan_s * (1 - 1e-9):
                failures = 0
            current, seen = step
        if seen.makespan_s < best_s * (1 - 1e-9):
            best_s, stalled = seen.makespan_s, 0
            search.offer_candidate(current, best_s, phase)
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
    current: Candidate,
    seen: Account,
    problem: Problem,
    phases: frozenset[str],
    failures: int,
    rng: np.random.Generator | None,
) -> str:
    """Returns the phase of this iteration: lines 9 to 17 of Algorithm 1, or one by chance.

    After each of `failures` in a row, the next phase has its turn.
    """
    allowed = [phase for phase in PHASES if phase in phases]
    if rng is not None:
        return allowed[int(rng.integers(len(allowed)))]
    gap = seen.bubble_s.max() - seen.bubble_s.min()
    movable = problem.compute_s[current.rank_L == int(seen.busy_s.argmax())]
    if gap > movable.min(initial=np.inf) * problem.microbatches:
        first = "partition"
    elif seen.boundary_s.sum() > seen.residual_s.sum():
        first = "placement"
    else:
        first = "schedule"
    order = PHASES[PHASES.index(first) :] + PHASES[: PHASES.index(first)]
    usable = [phase for phase in order if phase in phases]
    return usable[failures % len(usable)]


def stepped(
    phase: str,
    current: Candidate,
    seen: Account,
    search: Search,
    rng: np.random.Generator,
    hide: bool,
) -> tuple[Candidate, Account] | None:
    """Returns the best candidate of one round of a phase's moves, be it slower than the present
    one; None if the phase has no move.
    """
    best: tuple[Candidate, Account] | None = None
    for candidate in tries(phase, current, seen, search, rng, hide):
        outcome = look(candidate, search)
        if best is None or outcome.makespan_s < best[1].makespan_s:
            best = candidate, outcome
    return best


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
        yield from allowed(deal(current, seen, p, rng))
        yield from _sample(allowed(disperse(current, seen, p)), TRIED, rng)
        yield from _sample(allowed(exchange(current, seen, p)), TRIED, rng)
    else:
        makespan_s, dense = justified(current, seen.makespan_s, p, search.arrays)
        search.evaluations += JUSTIFICATION
        if makespan_s < seen.makespan_s:
            yield dense
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
