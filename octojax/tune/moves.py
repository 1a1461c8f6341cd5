"""The moves of the paper's Algorithm 1 (section VI, Fig. 7), on candidates.

    partition   migrate          layers from the most to the least loaded rank
    placement   deal             all layers anew, in several turns over the ranks
                disperse         a stage of several layers becomes single layers on other ranks
                exchange         a layer of a rank with long bubbles against a heavier one
    schedule    advance, delay   F and I earlier, W later
                overlap          other work between two actions that wait for a transfer

Advancing W against running out of memory is part of the list scheduler: where a forward does
not fit, W runs first. Each function yields the candidates to try, most promising first; the
caller measures them.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from octojax.tune.candidate import Candidate
from octojax.tune.keys import FORMULAS, by_formula
from octojax.tune.measure import stages_of
from octojax.tune.problem import Problem

TRIED = 24
"""At most so many candidates per move and iteration."""
DEALT = 3
"""Numbers of turns that one iteration deals all layers in."""


@dataclass(frozen=True, eq=False)
class Account:
    """Where a simulated candidate's time went; seconds, arrays are (ranks,).

    `rows` are (rank, stage, kind, microbatch) in order of start, `starts`, `ends` their times.
    """

    makespan_s: float
    rows: np.ndarray
    starts: np.ndarray
    ends: np.ndarray
    busy_s: np.ndarray
    boundary_s: np.ndarray
    residual_s: np.ndarray

    @property
    def bubble_s(self) -> np.ndarray:
        return self.boundary_s + self.residual_s


def account(
    makespan_s: float, rows: np.ndarray, starts: np.ndarray, ends: np.ndarray, ranks: int
) -> Account:
    """Returns the account of one simulated schedule."""
    busy, first, last = np.zeros(ranks), np.full(ranks, makespan_s), np.zeros(ranks)
    np.add.at(busy, rows[:, 0], ends - starts)
    np.minimum.at(first, rows[:, 0], starts)
    np.maximum.at(last, rows[:, 0], ends)
    boundary = first + (makespan_s - last)
    return Account(makespan_s, rows, starts, ends, busy, boundary, makespan_s - busy - boundary)


def migrate(candidate: Candidate, seen: Account, problem: Problem) -> Iterator[Candidate]:
    """Yields candidates with a layer fewer on the most loaded rank: handed from neighbour to
    neighbour down to the least loaded rank, or put there directly.
    """
    most, least = int(seen.busy_s.argmax()), int(seen.busy_s.argmin())
    rank_L = candidate.rank_L
    for layer in range(len(rank_L) - 1):
        for gives, takes in ((layer, layer + 1), (layer + 1, layer)):
            if rank_L[gives] == most and rank_L[takes] != most:
                moved = rank_L.copy()
                moved[gives] = rank_L[takes]
                yield _moved(candidate, moved)
    yield from _handed_on(candidate, most, least)
    for layer in np.flatnonzero(rank_L == most):
        moved = rank_L.copy()
        moved[layer] = least
        yield _moved(candidate, moved)


def _handed_on(candidate: Candidate, most: int, least: int) -> Iterator[Candidate]:
    """Yields candidates in which every stage between two ranks passes one layer on."""
    first, rank_S = stages_of(candidate)
    for a in np.flatnonzero(rank_S == most):
        for b in np.flatnonzero(rank_S == least):
            moved = candidate.rank_L.copy()
            if a < b:
                for s in range(a, b):
                    moved[first[s + 1] - 1] = rank_S[s + 1]
            else:
                for s in range(a, b, -1):
                    moved[first[s]] = rank_S[s - 1]
            yield _moved(candidate, moved)


def deal(
    candidate: Candidate, seen: Account, problem: Problem, rng: np.random.Generator
) -> Iterator[Candidate]:
    """Yields candidates with every stage dispersed: balanced pieces dealt in several turns over the
    ranks, as a loop or a wave. A few by chance of all numbers of turns and formulas of keys.
    """
    p = problem
    turns = np.arange(2, p.num_layers // p.ranks + 1)
    for n in rng.permutation(turns)[:DEALT].tolist():
        ranks = np.arange(p.ranks)
        back = ranks[::-1] if rng.random() < 0.5 else ranks
        order = np.concatenate([back if turn % 2 else ranks for turn in range(n)])
        rank_L = np.repeat(order, p.balanced_sizes(n * p.ranks))
        for row in rng.permutation(FORMULAS)[:2]:
            yield replace(candidate, rank_L=rank_L, key_LKM=by_formula(p, row))


def disperse(candidate: Candidate, seen: Account, problem: Problem) -> Iterator[Candidate]:
    """Yields candidates with one stage cut into single layers, dealt to ranks in turn."""
    first, _ = stages_of(candidate)
    sizes = np.diff(first)
    work = np.add.reduceat(problem.compute_s, first[:-1])
    for stage in np.argsort(-work, kind="stable"):
        if sizes[stage] < 2:
            continue
        for turn in range(problem.ranks):
            moved = candidate.rank_L.copy()
            for i, layer in enumerate(range(first[stage], first[stage + 1])):
                moved[layer] = (turn + i) % problem.ranks
            yield _moved(candidate, moved)


def exchange(candidate: Candidate, seen: Account, problem: Problem) -> Iterator[Candidate]:
    """Yields candidates in which the rank with the longest bubbles gives a layer for a heavier
    one of another rank, those of the most similar load first.
    """
    idle = int(seen.bubble_s.argmax())
    others = sorted(
        (r for r in range(problem.ranks) if r != idle),
        key=lambda r: abs(seen.busy_s[r] - seen.busy_s[idle]),
    )
    work = problem.compute_s
    for other in others:
        for mine in np.flatnonzero(candidate.rank_L == idle):
            for theirs in np.flatnonzero(candidate.rank_L == other):
                if work[theirs] > work[mine]:
                    moved = candidate.rank_L.copy()
                    moved[mine], moved[theirs] = other, idle
                    yield _moved(candidate, moved)


def advance(
    candidate: Candidate, seen: Account, problem: Problem, rng: np.random.Generator
) -> Iterator[Candidate]:
    """Yields candidates in which what follows a residual bubble is asked for earlier, on its
    rank and upstream, or a W before it later.
    """
    for n in _waits(seen, rng):
        _, stage, kind, microbatch = seen.rows[n].tolist()
        by = problem.compute_s.mean() * rng.exponential()
        if kind == 2:
            continue
        layers = _upstream(candidate, stage, kind, int(rng.integers(1, 4)))
        keys = candidate.key_LKM.copy()
        keys[layers, kind, microbatch] -= by
        yield replace(candidate, key_LKM=keys)


def overlap(
    candidate: Candidate, seen: Account, problem: Problem, rng: np.random.Generator
) -> Iterator[Candidate]:
    """Yields candidates in which another stage's action is moved into a wait for a transfer."""
    for n in _waits(seen, rng):
        rank, stage, _kind, _microbatch = seen.rows[n].tolist()
        later = np.flatnonzero(
            (seen.rows[:, 0] == rank)
            & (seen.starts > seen.starts[n])
            & (seen.rows[:, 1] != stage)
            & (seen.rows[:, 2] != 2)
        )[:4]
        for other in later:
            _, s, k, m = seen.rows[other].tolist()
            keys = candidate.key_LKM.copy()
            keys[_upstream(candidate, s, k, 1), k, m] -= 1.01 * (
                seen.starts[other] - seen.starts[n]
            )
            yield replace(candidate, key_LKM=keys)
    waits = problem.latency_s.max() + problem.output_bytes.max() * problem.s_per_byte.max()
    yield replace(candidate, patience_s=np.array([waits * rng.random() * 2]))


def _moved(candidate: Candidate, rank_L: np.ndarray) -> Candidate:
    return replace(candidate, rank_L=rank_L)


def _waits(seen: Account, rng: np.random.Generator) -> list[int]:
    """Returns rows that begin after a wait on their rank, long waits more often first."""
    end = np.zeros(len(seen.busy_s))
    waits = []
    for n in range(len(seen.rows)):
        rank = seen.rows[n, 0]
        gap = seen.starts[n] - end[rank]
        if gap > 1e-12 * seen.makespan_s and end[rank] > 0:
            waits.append((gap * rng.exponential(), n))
        end[rank] = seen.ends[n]
    return [n for _, n in sorted(waits, reverse=True)[:8]]


def _upstream(candidate: Candidate, stage: int, kind: int, stages: int) -> slice:
    """Returns the layers of a stage and of those whose results it waits for."""
    first, rank_S = stages_of(candidate)
    last = len(rank_S)
    if kind == 0:
        return slice(first[max(0, stage - stages + 1)], first[stage + 1])
    return slice(first[stage], first[min(last, stage + stages)])
