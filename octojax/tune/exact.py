"""The exact optimum of small cases: every assignment of layers to ranks, every active schedule.

A stage of one layer can do whatever a longer one can, so cutting is decided by placement alone.
For an assignment, schedules are enumerated as Giffler and Thompson do for job shops (take the
action that could end first; branch over all that could start on its rank before that), cut
off by bounds. Transfers are pure delays here, so the value is a lower bound wherever links are
shared, and the optimum when the simulator confirms it for the plan found.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numba import njit

from octojax.errors import CapacityError
from octojax.ir.action import Action
from octojax.ir.partition import Partition
from octojax.ir.placement import Placement
from octojax.ir.plan import Plan
from octojax.ir.schedule import Schedule
from octojax.simulate.jit import CALLED, INNER
from octojax.tune.anneal import least_makespan
from octojax.tune.candidate import Candidate, problem_arrays, stage_arrays
from octojax.tune.constraints import Constraints
from octojax.tune.measure import SPLIT
from octojax.tune.problem import Problem
from octojax.tune.search import Search

LARGEST = 96
"""More actions than this are refused: the enumeration would not end."""
NODES = 2_000_000
ASSIGNMENTS = 200_000
"""More ways to give layers to ranks than this are refused likewise."""


@dataclass(frozen=True)
class Exact:
    """The best plan and its value; `proven` if the enumeration came to its end."""

    plan: Plan | None
    makespan_s: float
    proven: bool
    nodes: int


def solve(problem: Problem, upper_s: float = np.inf, nodes: int = NODES) -> Exact:
    """Returns the optimum over all plans with split backward that beat `upper_s`, without
    memory limits; recomputed is all or nothing. `nodes` limits the enumeration.

    Raises `ValueError` for cases that are not small.
    """
    p = problem
    actions = 3 * p.num_layers * p.microbatches
    if not is_small(p):
        raise ValueError(
            f"the exact method is for small cases: {p.num_layers} layers on {p.ranks} ranks are "
            f"{p.ranks}^{p.num_layers} assignments (at most {ASSIGNMENTS} can "
            f"be tried), and with {p.microbatches} microbatches {actions} actions (at most "
            f"{LARGEST} can be enumerated). Use method 'best'"
        )
    if p.recompute.mode == "stages":
        raise ValueError(
            f"the exact method makes every layer a stage, so it cannot recompute stages "
            f"{p.recompute} of another cut. Use method 'best', or recompute all or none"
        )
    arrays = problem_arrays(p)
    rules = Constraints.of_rule(p.recompute, p.num_layers)
    used, best_s, best = 0, upper_s, None
    ordered = sorted(
        (least_makespan(r, arrays[0], p.speeds, p.host_cost_s, p.microbatches), tuple(r.tolist()))
        for r in assignments(p)
    )
    for bound, ranks in ordered:
        if bound >= best_s * (1 - 1e-12):
            break
        if used >= nodes:
            return Exact(best, best_s, False, used)
        rank_L = np.array(ranks, np.int64)
        keys = np.zeros((p.num_layers, 3, p.microbatches))
        one = rules.applied(Candidate.of(rank_L, keys, np.ones(p.num_layers, np.bool_)))
        a = stage_arrays(*one.arrays[:5], *arrays[:7])
        rows = np.zeros((actions, 4), np.int64)
        value, spent = _enumerate(
            rank_L, a[4], a[5].sum(axis=1), a[6].sum(axis=1), p.ranks, p.microbatches, best_s,
            nodes - used, rows,
        )  # fmt: skip
        used += int(spent)
        if value < best_s:
            best_s, best = float(value), _plan(rank_L, rows, p)
    return Exact(best, best_s, used < nodes, used)


def is_small(problem: Problem, assignments: int = ASSIGNMENTS) -> bool:
    """Whether the enumeration can be expected to end."""
    p = problem
    return 3 * p.num_layers * p.microbatches <= LARGEST and p.ranks**p.num_layers <= assignments


def is_optimal(search: Search, exact: Exact) -> bool:
    """Whether a proven enumeration makes the best plan of `search` the optimum of all plans.

    The enumeration has one rank per stage and splits every backward; transfers that share a link
    may take longer in the simulator than in the enumeration. Where all is recomputed, an R ahead of
    its backward, which the enumeration does not know, might do better.
    """
    p = search.problem
    once = search.plan is not None and not search.plan.placement.replicated
    fusing_pays = bool((p.backward_s < p.input_grad_s + p.weight_grad_s).any())
    machine = p.profile.machine
    plain = p.recompute.mode != "all" and not (machine.has_step_ends or machine.overlap_discount)
    return once and plain and not fusing_pays and search.makespan_s <= exact.makespan_s * (1 + 1e-9)


def assignments(problem: Problem) -> Iterator[np.ndarray]:
    """Yields every way to give layers to ranks that leaves no rank idle; if ranks and links
    are alike, only one of those that differ by names.
    """
    p = problem
    apart = ~np.eye(p.ranks, dtype=bool)
    alike = (
        len(set(p.speeds.tolist())) == 1
        and len(set(p.latency_s[apart].tolist())) <= 1
        and len(set(p.s_per_byte[apart].tolist())) <= 1
    )

    def grow(start: list[int]) -> Iterator[list[int]]:
        if len(start) == p.num_layers:
            if len(set(start)) == p.ranks:
                yield start
            return
        top = min(p.ranks, max(start, default=-1) + 2) if alike else p.ranks
        for r in range(top):
            yield from grow([*start, r])

    for ranks in grow([]):
        yield np.array(ranks, np.int64)


@njit(**CALLED)
def _enumerate(rank_S, time_SK, hop_f_S, hop_i_S, ranks, microbatches, upper, nodes, rows):
    """Returns the least makespan below `upper` (else `upper`) and the nodes visited; fills
    `rows` (rank, stage, kind, microbatch) in an order in which they can be issued.
    """
    S, M = rank_S.shape[0], microbatches
    N = 3 * S * M
    tail = np.zeros((S, 3))  # least time from an action's end to the end of its microbatch
    for s in range(1, S):
        tail[s, 1] = hop_i_S[s] + time_SK[s - 1, 1] + tail[s - 1, 1]
        if s == 1:
            tail[s, 1] += time_SK[0, 2]
    tail[0, 1] = time_SK[0, 2]
    for s in range(1, S):
        tail[s, 1] = max(tail[s, 1], time_SK[s, 2])
    for s in range(S - 1, -1, -1):
        if s == S - 1:
            tail[s, 0] = time_SK[s, 1] + tail[s, 1]
        else:
            tail[s, 0] = hop_f_S[s] + time_SK[s + 1, 0] + tail[s + 1, 0]
    done = np.zeros((N + 1, S, 3), np.int64)
    clock = np.zeros((N + 1, ranks))
    end = np.zeros((N + 1, S, 2, M))
    left = np.zeros((N + 1, ranks))
    for s in range(S):
        left[0, rank_S[s]] += M * (time_SK[s, 0] + time_SK[s, 1] + time_SK[s, 2])
    options = np.zeros((N + 1, 3 * S), np.int64)
    count = np.zeros(N + 1, np.int64)
    at = np.zeros(N + 1, np.int64)
    path = np.zeros((N, 4), np.int64)
    depth, best, visited = 0, upper, 0
    fresh = True
    est = np.zeros(3 * S)
    while depth >= 0:
        if fresh:
            visited += 1
            if visited > nodes:
                return best, visited
            count[depth] = 0
            at[depth] = 0
            first_end, on, low = np.inf, 0, 0.0
            for r in range(ranks):
                low = max(low, clock[depth, r] + left[depth, r])
            for s in range(S):
                r = rank_S[s]
                for k in range(3):
                    est[3 * s + k] = np.inf
                    m = done[depth, s, k]
                    if m >= M:
                        continue
                    if k == 0:
                        if s > 0 and done[depth, s - 1, 0] <= m:
                            continue
                        ready = 0.0 if s == 0 else end[depth, s - 1, 0, m] + hop_f_S[s - 1]
                    elif k == 1:
                        if done[depth, s, 0] <= m or (s < S - 1 and done[depth, s + 1, 1] <= m):
                            continue
                        ready = end[depth, s, 0, m]
                        if s < S - 1:
                            ready = max(ready, end[depth, s + 1, 1, m] + hop_i_S[s + 1])
                    else:
                        if done[depth, s, 1] <= m:
                            continue
                        ready = end[depth, s, 1, m]
                    begin = max(ready, clock[depth, r])
                    est[3 * s + k] = begin
                    low = max(low, begin + time_SK[s, k] + (tail[s, k] if k < 2 else 0.0))
                    if begin + time_SK[s, k] < first_end:
                        first_end, on = begin + time_SK[s, k], r
            if low < best * (1 - 1e-12):
                for s in range(S):
                    if rank_S[s] != on:
                        continue
                    for k in range(3):
                        begin = est[3 * s + k]
                        if begin < first_end or (begin == first_end and time_SK[s, k] == 0.0):
                            options[depth, count[depth]] = 3 * s + k
                            count[depth] += 1
                for i in range(1, count[depth]):  # longest tail first
                    o = options[depth, i]
                    j = i - 1
                    while j >= 0 and _later(options[depth, j], o, est, tail):
                        options[depth, j + 1] = options[depth, j]
                        j -= 1
                    options[depth, j + 1] = o
            fresh = False
        if at[depth] >= count[depth]:
            depth -= 1
            continue
        o = options[depth, at[depth]]
        at[depth] += 1
        s, k = o // 3, o % 3
        m, r = done[depth, s, k], rank_S[s]
        ready = 0.0
        if k == 0 and s > 0:
            ready = end[depth, s - 1, 0, m] + hop_f_S[s - 1]
        elif k == 1:
            ready = end[depth, s, 0, m]
            if s < S - 1:
                ready = max(ready, end[depth, s + 1, 1, m] + hop_i_S[s + 1])
        elif k == 2:
            ready = end[depth, s, 1, m]
        stop = max(ready, clock[depth, r]) + time_SK[s, k]
        for q in range(ranks):  # slices would take seconds to compile
            clock[depth + 1, q], left[depth + 1, q] = clock[depth, q], left[depth, q]
        for t in range(S):
            for j in range(3):
                done[depth + 1, t, j] = done[depth, t, j]
            for n in range(M):
                end[depth + 1, t, 0, n], end[depth + 1, t, 1, n] = (
                    end[depth, t, 0, n],
                    end[depth, t, 1, n],
                )
        done[depth + 1, s, k] += 1
        clock[depth + 1, r] = stop
        left[depth + 1, r] -= time_SK[s, k]
        if k < 2:
            end[depth + 1, s, k, m] = stop
        path[depth, 0], path[depth, 1], path[depth, 2], path[depth, 3] = r, s, k, m
        if depth + 1 == N:
            top = 0.0
            for q in range(ranks):
                top = max(top, clock[N, q])
            if top < best * (1 - 1e-12):
                best = top
                for n in range(N):
                    for column in range(4):
                        rows[n, column] = path[n, column]
            continue
        depth += 1
        fresh = True
    return best, visited


@njit(**INNER)
def _later(a, b, est, tail):
    """Whether option `a` should be tried after option `b`."""
    tail_a = tail[a // 3, a % 3] if a % 3 < 2 else 0.0
    tail_b = tail[b // 3, b % 3] if b % 3 < 2 else 0.0
    if est[a] != est[b]:
        return est[a] > est[b]
    return tail_a < tail_b


def _plan(rank_L: np.ndarray, rows: np.ndarray, problem: Problem) -> Plan:
    table: list[list[Action]] = [[] for _ in range(problem.ranks)]
    for rank, stage, kind, microbatch in rows.tolist():
        table[rank].append(Action(stage, SPLIT[kind], microbatch))
    return Plan(
        Partition((1,) * problem.num_layers),
        Placement.of(rank_L.tolist(), problem.ranks),
        Schedule(tuple(map(tuple, table))),
        problem.recompute.flags(problem.num_layers),
        name="exact",
    )


def search_exact(search: Search) -> None:
    """Puts the exact optimum into `search`; stops early only at the limit of nodes.

    Raises `CapacityError` if the optimum, which is sought without regard to memory, does not fit.
    """
    exact = solve(search.problem)
    search.evaluations += exact.nodes
    search.iteration += 1
    for phase in search.counts:
        search.counts[phase] += 1
    if exact.plan is not None and not search.offer(exact.plan, "schedule"):
        raise CapacityError(
            f"the exact method leaves memory out, and the optimum that it found "
            f"({exact.makespan_s * 1e3:.4g} ms) does not fit; method 'best' keeps to capacities"
        )
    if not exact.proven:
        search.stop = "nodes"
    else:
        search.stop = "optimal" if is_optimal(search, exact) else "enumerated"
    search.report("schedule")
