"""The default search: many starting points, annealed in parallel, the weak ones dropped."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from octojax.tune.anneal import EVEN_OUT, MOVES, PHASE_OF_MOVE, SPLIT_OR_JOIN, anneal
from octojax.tune.candidate import Candidate
from octojax.tune.constraints import Constraints
from octojax.tune.exact import is_optimal, is_small, solve
from octojax.tune.justify import ROUNDS, justified
from octojax.tune.measure import quick_makespan, stages_of
from octojax.tune.memory import frugal, memory_may_bind
from octojax.tune.problem import Problem
from octojax.tune.search import PHASES, Search
from octojax.tune.starts import fixed_points, starting_points

WORKERS = 2
ROUND_ACTIONS = 500_000
"""Actions that one worker's moves have in one round; fixes a round's number of moves."""
SETTLE_NODES, SETTLE_ASSIGNMENTS = 300_000, 20_000
"""A case is settled by enumeration if it has no more assignments, and within so many nodes."""
STARTS_SHARE = 0.25
"""No further starting points are made when this share of the budget is spent."""
COLD = 2e-5
"""Temperature at the end of each heat, as a share of the makespan."""


@dataclass(frozen=True)
class Heat:
    """Until this share of the budget so many candidates race, cooling down from `hot`: a share of
    what one layer's move changes (the makespan by ranks over layers, about)."""

    until: float
    field: int
    hot: float


HEATS = (Heat(0.1, 16, 0.02), Heat(0.2, 4, 0.03), Heat(1.01, 1, 0.05))
"""Short races choose; one long cooling of the best improves it most."""


@dataclass
class Runner:
    """A candidate of the field: the best it became in this heat, and where it is now."""

    best_s: float
    best: Candidate
    last_s: float
    last: Candidate


CHANCES: dict[str, float] = dict(
    zip(
        MOVES,
        (0.04, 0.05, 0.05, 0.03, 0.12, 0.09, 0.02, 0.02, 0.08, 0.0, 0.0, 0.40),
        strict=True,
    )
)


def move_chances(problem: Problem, phases: frozenset[str]) -> np.ndarray:
    """Returns the cumulated chances of `MOVES` for the phases that may be changed."""
    chances: dict[str, float] = dict(CHANCES)
    if memory_may_bind(problem):
        chances["recompute or keep"] = 0.05
    if (problem.backward_s < problem.input_grad_s + problem.weight_grad_s).any():
        chances["fuse or split a backward"] = 0.04
    if "placement" not in phases:  # stages stay in order, one per rank
        keep = {"move a stage border"} | set(MOVES[SPLIT_OR_JOIN:EVEN_OUT])
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
    return _cumulated(chances)


FROM_A_START = {
    "swap two layers": 0.25,
    "swap two close layers": 0.25,
    "exchange two ranks for a while": 0.1,
    "shift the ranks of a run of layers": 0.1,
    "exchange the ranks of two stages": 0.15,
    "split or join stages": 0.05,
}
"""Chances of the moves that regroup layers where every rank keeps its number of layers."""


def allowed_chances(weights: np.ndarray, constraints: Constraints) -> np.ndarray:
    """Returns `move_chances` less the moves that `constraints` rule out."""
    single = np.diff(weights, prepend=0.0)
    chances: dict[str, float] = dict(zip(MOVES, single.tolist(), strict=True))
    if len(constraints.layers_P):
        kept = {name: c for name, c in chances.items() if PHASE_OF_MOVE[MOVES.index(name)] == 2}
        chances = dict.fromkeys(MOVES, 0.0) | kept | FROM_A_START
    if len(constraints.recompute_S):
        chances["recompute or keep"] = 0.0
    return (
        _cumulated(chances) if len(constraints.recompute_S) + len(constraints.layers_P) else weights
    )


def _cumulated(chances: dict[str, float]) -> np.ndarray:
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
    weights = allowed_chances(move_chances(problem, phases), search.constraints)
    field = _runners(search, phases, starts)
    rounds = ROUNDS if "schedule" in phases else 0
    for runner in field:  # transfer buffers may push the quickest over a capacity
        if search.offer_candidate(runner.best, runner.best_s, "schedule"):
            break
    if weights[-1] == 0 or not field:
        search.stop = search.stop or "nothing to change"
        return
    if phases == frozenset(PHASES) and not search.finished() and settle(search):
        return
    actions = 3 * len(stages_of(field[0].best)[1]) * problem.microbatches
    steps = min(2000, max(20, ROUND_ACTIONS // actions))
    try:
        _race(search, field, lambda: _runners(search, phases, starts), weights, rounds, steps, seed)
    finally:  # interrupted or not
        search.offer_proposed(at_once=True)


def _race(
    search: Search,
    field: list[Runner],
    afresh: Callable[[], list[Runner]],
    weights: np.ndarray,
    rounds: int,
    steps: int,
    seed: int,
) -> None:
    """Anneals the field in heats until a limit is reached. `afresh` makes the field again where
    nothing of it fits into memory any more.
    """
    binding = memory_may_bind(search.problem)
    turn, heat, room_before = 0, -1, search.slack
    room = affordable(0.0, search.limits.share(0.0, 1))
    with ThreadPoolExecutor(WORKERS) as pool:
        while not search.finished():
            share = search.share
            number = next(n for n, h in enumerate(HEATS) if share < h.until)
            if room_before is not search.slack:  # less memory is left than the field was judged by
                room_before = search.slack
                field = remeasured(field, search)
                if not field:
                    heat, field = -1, afresh()
                if not field:
                    search.stop = "memory"
                    return
            if number != heat:
                heat = number
                field = restarted(field, min(room, HEATS[heat].field))
            jobs = []
            for w in range(WORKERS):
                at = (turn + w) % len(field)
                seeds = (seed, turn, w)
                warmth = degree(share, search.problem)
                arguments = (field[at], search, weights, rounds, steps, warmth, seeds)
                jobs.append((at, pool.submit(_anneal, *arguments)))
            turn += WORKERS
            search.offer_proposed(at_once=binding)  # while the workers run
            phase, moved = PHASES[0], set[int]()
            for at, job in jobs:
                runner, counts = job.result()
                search.evaluations += int(counts.sum())
                for phase, count in zip(PHASES, counts.tolist(), strict=True):
                    search.counts[phase] += count
                phase = PHASES[int(counts.argmax())]
                search.propose(runner.best, runner.best_s, phase)
                field[at] = better(field[at], runner, keep=at in moved)
                moved.add(at)
            search.iteration += 1
            room = affordable(share, search.share)
            search.report(phase)


def settle(search: Search) -> bool:
    """Enumerates a small case within `SETTLE_NODES`; returns whether what is best now is the
    proven optimum.

    The enumeration splits every backward, and leaves memory and shared links out: nothing below
    the present makespan is then a proof, something below it that fits is a better plan.
    """
    problem = search.problem
    if problem.recompute.mode == "stages" or not is_small(problem, SETTLE_ASSIGNMENTS):
        return False
    exact = solve(problem, search.makespan_s, SETTLE_NODES)
    search.evaluations += exact.nodes
    if exact.plan is not None:
        search.offer(exact.plan, "schedule")
    if exact.proven and is_optimal(search, exact):
        search.stop = "optimal"
    return bool(search.stop)


def _runners(search: Search, phases: frozenset[str], starts: list[Candidate]) -> list[Runner]:
    """Returns the starting candidates that fit, the quickest first."""
    problem = search.problem
    timed = [(quick_makespan(c, problem, search.arrays), c) for c in starts]
    timed = sorted((t for t in timed if t[0] < np.inf), key=lambda t: t[0])
    search.evaluations += len(timed)
    if "schedule" in phases:
        for at, (makespan, candidate) in enumerate(timed):
            if at >= HEATS[0].field and search.time_share > STARTS_SHARE:
                break
            timed[at] = justified(candidate, makespan, problem, search.arrays)
    return [Runner(t, c, t, c) for t, c in sorted(timed, key=lambda t: t[0])]


def restarted(field: list[Runner], keep: int) -> list[Runner]:
    """Returns the best of a heat, each at the best point it reached."""
    ranked = sorted(field, key=lambda r: r.best_s)[:keep]
    return [Runner(r.best_s, r.best, r.best_s, r.best) for r in ranked]


def better(before: Runner, after: Runner, keep: bool = False) -> Runner:
    """Returns the runner after a round: where it is now, and the best it ever was. `keep`: it
    has moved in this round already, and moves again only to a better place.
    """
    last = before if keep and before.last_s <= after.last_s else after
    best = after if after.best_s < before.best_s else before
    return Runner(best.best_s, best.best, last.last_s, last.last)


def remeasured(field: list[Runner], search: Search) -> list[Runner]:
    """Returns the runners that still fit after less memory was left for them."""
    fitting = []
    for runner in field:
        timed = [
            (quick_makespan(c, search.problem, search.arrays), c)
            for c in (runner.best, runner.last)
        ]
        timed = sorted((t for t in timed if t[0] < np.inf), key=lambda t: t[0])
        if timed:
            fitting.append(Runner(*timed[0], *timed[-1]))
    return fitting


def degree(share: float, problem: Problem) -> float:
    """Returns the temperature, as a share of the makespan, when so much of the budget is spent."""
    begun = 0.0
    for heat in HEATS:
        if share < heat.until:
            left = (heat.until - share) / (heat.until - begun)
            return heat.hot * problem.ranks / problem.num_layers * left**1.5 + COLD
        begun = heat.until
    return COLD


def affordable(before: float, after: float) -> int:
    """Returns how many candidates a budget has room for, if a round takes it from one share
    spent to another.
    """
    rounds = (1 - after) / max(after - before, 1e-9)
    return int(min(HEATS[0].field, max(1, rounds * WORKERS // 8)))


def _anneal(
    runner: Runner, search: Search, weights, rounds: int, steps: int, heat: float, seed: tuple
):
    """Returns the runner after one round, and evaluations per phase."""
    number = int(np.random.default_rng(seed).integers(2**31))
    start_s = runner.last_s
    arguments = (
        *runner.last.arrays, *search.arrays, *search.constraints.arrays, weights, rounds, steps,
        heat * start_s, 0.7 * heat * start_s, number,
    )  # fmt: skip
    best_s, best, last_s, last, counts = anneal(*arguments)
    return Runner(best_s, Candidate(*best), last_s, Candidate(*last)), counts


def starts_for(search: Search, phases: frozenset[str], seed: int) -> list[Candidate]:
    """Returns starting candidates that respect the phases that may not be changed; fewer
    where the budget is short.
    """
    problem = search.problem

    def enough() -> bool:
        return search.time_share > STARTS_SHARE

    if search.start and phases != frozenset(PHASES):
        starts = list(search.start)
    else:
        starts = [*search.start, *fixed_points(problem, phases, enough)]
        if phases >= {"partition", "placement"}:
            starts = starting_points(problem, seed, enough=enough) + starts
    if "schedule" in phases and memory_may_bind(problem):
        starts += [less for candidate in [*starts[:6], starts[-1]] for less in frugal(candidate)]
    rules = search.constraints
    return [c for c in map(rules.applied, starts) if rules.allow(c)]
