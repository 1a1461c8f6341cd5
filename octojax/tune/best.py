"""The default search: many starting points, annealed in parallel, the weak ones dropped."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np

from octojax.tune.anneal import MOVES, PHASE_OF_MOVE, anneal
from octojax.tune.candidate import Candidate
from octojax.tune.justify import justified
from octojax.tune.measure import quick_makespan, stages_of
from octojax.tune.memory import frugal, memory_may_bind
from octojax.tune.problem import Problem
from octojax.tune.search import PHASES, Search
from octojax.tune.starts import fixed_points, starting_points

WORKERS = 2
ROUND_ACTIONS = 1_500_000
"""Actions simulated by one worker in one round; fixes a round's number of moves."""
HOT, COLD = 3e-3, 3e-5
"""Temperatures of the annealing, as shares of the makespan."""
FIELD = ((0.25, 8), (0.5, 4), (0.75, 2), (1.01, 1))
"""Until this share of the budget, so many candidates are kept."""

CHANCES = dict(
    zip(
        MOVES,
        (0.04, 0.05, 0.05, 0.03, 0.12, 0.09, 0.02, 0.02, 0.08, 0.10, 0.0, 0.0, 0.40),
        strict=True,
    )
)


def move_chances(problem: Problem, phases: frozenset[str]) -> np.ndarray:
    """Returns the cumulated chances of `MOVES` for the phases that may be changed."""
    chances = dict(CHANCES)
    if memory_may_bind(problem):
        chances["recompute or keep"] = 0.05
    if (problem.backward_s < problem.input_grad_s + problem.weight_grad_s).any():
        chances["fuse or split a backward"] = 0.04
    if "placement" not in phases:  # stages stay in order, one per rank
        keep = {"move a stage border"} | set(MOVES[7:12])
        chances = {name: c if name in keep else 0.0 for name, c in chances.items()}
        chances["split or join stages"] = 0.0
    if "partition" not in phases:  # stages stay whole
        for name, phase in zip(MOVES, PHASE_OF_MOVE, strict=True):
            if phase == 0 or name in ("exchange two ranks for a while", "split or join stages"):
                chances[name] = 0.0
    if "placement" in phases and "partition" not in phases:
        chances["exchange the ranks of two stages"] = 0.5
    if "schedule" not in phases:
        for name, phase in zip(MOVES, PHASE_OF_MOVE, strict=True):
            if phase == 2:
                chances[name] = 0.0
    summed = np.cumsum([chances[name] for name in MOVES])
    if summed[-1] == 0:
        return summed
    summed /= summed[-1]
    summed[-1] = 1.0
    return summed


def search_best(search: Search, phases: frozenset[str], starts: list[Candidate], seed: int) -> None:
    """Improves `search` until a limit is reached. With the same seed and a limit of
    iterations alone, always in the same way.
    """
    problem = search.problem
    weights = move_chances(problem, phases)
    field = [(quick_makespan(c, problem, search.arrays), c) for c in starts]
    field = sorted((t for t in field if t[0] < np.inf), key=lambda t: t[0])
    if "schedule" in phases:
        field = [justified(c, t, problem, search.arrays) for t, c in field[:16]]
    search.evaluations += len(field)
    field = sorted((t for t in field if t[0] < np.inf), key=lambda t: t[0])
    for makespan, found in field[:1]:
        search.offer_candidate(found, makespan, "schedule")
    if weights[-1] == 0 or not field:
        search.stop = search.stop or "nothing to change"
        return
    actions = 3 * len(stages_of(field[0][1])[1]) * problem.microbatches
    steps = min(2000, max(20, ROUND_ACTIONS // actions))
    turn, room = 0, affordable(0.0, search.limits.share(0.0, 1))
    with ThreadPoolExecutor(WORKERS) as pool:
        while not search.finished():
            share = search.share
            keep = min(room, next(n for until, n in FIELD if share < until))
            field = field[:keep] if len(field) > keep else field
            picks = [(turn + w) % len(field) for w in range(WORKERS)]
            heat = HOT * (1 - share) ** 1.5 + COLD
            jobs = [
                pool.submit(_anneal, field[at], search, weights, steps, heat, (seed, turn, w))
                for w, at in enumerate(picks)
            ]
            turn += len(jobs)
            phase, moved = PHASES[0], set()
            for at, job in zip(picks, jobs, strict=True):
                best_s, best, last_s, last, counts = job.result()
                search.evaluations += int(counts.sum())
                for phase, count in zip(PHASES, counts.tolist(), strict=True):
                    search.counts[phase] += count
                phase = PHASES[int(counts.argmax())]
                search.offer_candidate(best, best_s, phase)
                end = (best_s, best) if share > 0.6 else (last_s, last)
                if at not in moved or end[0] < field[at][0]:
                    field[at] = end
                moved.add(at)
            if turn % max(len(field), 2) == 0:
                field.sort(key=lambda t: t[0])
            search.iteration += 1
            room = affordable(share, search.share)
            search.report(phase)


def affordable(before: float, after: float) -> int:
    """Returns how many candidates a budget has room for, if a round takes it from one share
    spent to another.
    """
    rounds = (1 - after) / max(after - before, 1e-9)
    return int(min(FIELD[0][1], max(1, rounds * WORKERS // 16)))


def _anneal(start, search: Search, weights, steps: int, heat: float, seed: tuple):
    """Returns best and last candidate of one round with their makespans, and counts."""
    makespan, found = start
    number = int(np.random.default_rng(seed).integers(2**31))
    arguments = (
        *found.arrays, *search.arrays, weights, steps, heat * makespan, 0.5 * heat * makespan,
        number,
    )  # fmt: skip
    best_s, best, last_s, last, counts = anneal(*arguments)
    return best_s, Candidate(*best), last_s, Candidate(*last), counts


def starts_for(problem: Problem, phases: frozenset[str], seed: int) -> list[Candidate]:
    """Returns starting candidates that respect the phases that may not be changed."""
    made = fixed_points(problem, phases)
    if phases >= {"partition", "placement"}:
        made = starting_points(problem, seed)[:12] + made
    if "schedule" in phases and memory_may_bind(problem):
        made += [less for found in [*made[:6], made[-1]] for less in frugal(found)]
    return made
