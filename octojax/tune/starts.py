"""Starting points: layers dealt to ranks in turn, in pieces of nearly equal time.

If every rank's stage takes equally long in each turn, microbatches flow without waiting for
each other, as in interleaved 1F1B on a homogeneous model. So borders are moved until turns are
even and loads, with the head's, are balanced.

The first turn decides how late the last rank starts: P - 1 stages of it. So turns should begin
small and grow. While the first microbatch takes (P - 1) * s_t to reach the last rank in turn t,
ranks can be busy with the M * s_(t-1) of the turn before, so s_t may be M / (P - 1) times
s_(t-1): with twice as many microbatches as ranks, stages of 1, 2, 4, 8 layers.
"""

from collections.abc import Callable, Iterator

import numpy as np
from numba import njit

from octojax.ir.partition import uniform_partition
from octojax.schedules import generate
from octojax.simulate.jit import CALLED, INNER
from octojax.tune.candidate import Candidate, problem_arrays
from octojax.tune.keys import FORMULAS, ONE_F_ONE_B, Published, by_formula, by_table
from octojax.tune.measure import quick_makespan
from octojax.tune.problem import Problem

TURNS = (1, 2, 3, 4, 5, 6, 8)
EVENNESS = (1.0, 5.0)
GROWTHS = (1.0, 1.35, 1.5, 1.65, 1.8, 2.0)


def starting_points(
    problem: Problem,
    seed: int = 0,
    steps: int = 20_000,
    enough: Callable[[], bool] = lambda: False,
) -> list[Candidate]:
    """Returns candidates with their best priorities each, the quickest first.

    Sequences of ranks are tried until `enough()`, at least one.
    """
    arrays = problem_arrays(problem)
    best = []
    steps = min(steps, 2000 * problem.num_layers)
    for order, growths in orders(problem):
        if best and enough():
            break
        cuts = [
            dealt(problem, order, growth, evenness, seed, steps)
            for growth in growths
            for evenness in (EVENNESS if len(order) > problem.ranks else (0.1,))
        ]
        cuts.append(np.array(problem.balanced_sizes(len(order))))
        known = published_orders(problem, order, enough)
        for sizes in {tuple(c.tolist()): c for c in cuts}.values():
            rank_L = np.repeat(np.array(order), sizes)
            candidates = [
                Candidate.of(rank_L, keys)
                for keys in priorities(problem, tuple(sizes.tolist()), known)
            ]
            timed = [(quick_makespan(c, problem, arrays), i, c) for i, c in enumerate(candidates)]
            best.append(min(timed, key=lambda t: t[:2]))
    best.sort(key=lambda t: t[0])
    return [c for _, _, c in best]


def priorities(
    problem: Problem, sizes: tuple[int, ...], known: list[Published]
) -> Iterator[np.ndarray]:
    """Yields keys to try on these pieces: the formulas, and published tables of their form."""
    for row in FORMULAS:
        yield by_formula(problem, row)
    if min(sizes) > 0:
        for table in known:
            yield by_table(problem, table, sizes)


def published_orders(
    problem: Problem, order: list[int], enough: Callable[[], bool] = lambda: False
) -> list[Published]:
    """Returns the published tables whose stages are dealt to ranks in this order, as many as
    were made before `enough()`.
    """
    p, turns = problem, len(order) // problem.ranks
    tables = []
    for name in ("1f1b", "interleaved", "zb-v", "dualpipe-v", "looped-bfs", "dynapipe"):
        if enough():
            break
        try:
            table = generate(name, p.ranks, p.microbatches, turns)
        except ValueError:
            continue
        if [holders[0] for holders in table.placement.stages] == order:
            tables.append(Published.of(name, table))
    return tables


def orders(problem: Problem) -> list[tuple[list[int], tuple[float, ...]]]:
    """Returns sequences of ranks in which layers are dealt, loops and waves, each with the
    growths to try: by how much the pieces of a turn are larger than those of the turn before.
    """
    ranks = range(problem.ranks)
    sequences: list[tuple[list[int], tuple[float, ...]]] = []
    for turns in TURNS:
        if turns > 1 and turns * problem.ranks > problem.num_layers:
            break
        sequences.append((list(ranks) * turns, GROWTHS[::2] if turns > 1 else (1.0,)))
        if turns > 1 and problem.ranks > 2:
            down_up = [*ranks, *reversed(ranks)]
            sequences.append(((down_up * turns)[: turns * problem.ranks], GROWTHS))
    return sequences


def dealt(
    problem: Problem, order: list[int], growth: float, evenness: float, seed: int, steps: int
) -> np.ndarray:
    """Returns how many layers each piece has when pieces go to ranks in `order`.

    Pieces may be empty. Borders start where pieces of each turn are `growth` times those of
    the turn before; `evenness` weighs even turns against balanced loads.
    """
    p = problem
    hot = float(p.compute_s.mean() * p.microbatches / 4)
    weights = growth ** (np.arange(len(order)) // p.ranks)
    borders = _deal(
        np.array(order, np.int64), np.cumsum(weights) / weights.sum(), p.ranks, p.forward_s,
        p.input_grad_s + p.again_s, p.compute_s, p.speeds, p.microbatches, p.host_cost_s, evenness,
        steps, seed, hot,
    )  # fmt: skip
    return np.diff(borders)


@njit(**CALLED)
def _deal(
    order, share_S, ranks, forward_s, input_grad_s, work_s, speed_P, microbatches, host_s,
    evenness, steps, seed, hot,
):  # fmt: skip
    """Returns where pieces begin (and the layers) after annealing the borders between them."""
    np.random.seed(seed)
    layers, pieces = work_s.shape[0], order.shape[0]
    sum_f, sum_i, sum_w = np.zeros(layers + 1), np.zeros(layers + 1), np.zeros(layers + 1)
    for layer in range(layers):
        sum_f[layer + 1] = sum_f[layer] + forward_s[layer]
        sum_i[layer + 1] = sum_i[layer] + input_grad_s[layer]
        sum_w[layer + 1] = sum_w[layer] + work_s[layer]
    border = np.zeros(pieces + 1, np.int64)
    for s in range(1, pieces):
        border[s] = border[s - 1]
        while sum_w[border[s]] < sum_w[layers] * share_S[s - 1] - 1e-15:
            border[s] += 1
    border[pieces] = layers
    best, best_value, value = border.copy(), np.inf, np.inf
    for step in range(steps):
        heat = hot * (1 - step / steps) ** 2 + 1e-12
        old = border.copy()
        if step > 0:
            _shift(border, layers)
        cost = _judge(
            border, order, ranks, sum_f, sum_i, sum_w, speed_P, microbatches, host_s, evenness
        )
        if cost <= value or np.random.random() < np.exp((value - cost) / heat):
            value = cost
            if cost < best_value:
                best_value, best = cost, border.copy()
        else:
            border = old
    return best


@njit(**INNER)
def _shift(border, layers):
    """Moves one border, or several neighbours, by a layer; pieces may become empty."""
    pieces = border.shape[0] - 1
    if pieces < 2:
        return
    many = 1 if np.random.random() < 0.5 else 1 + np.random.randint(pieces // 2 + 1)
    a = 1 + np.random.randint(pieces - 1)
    b = min(pieces - 1, a + many - 1)
    by = 1 if np.random.random() < 0.5 else -1
    if border[a] + by < 0 or border[b] + by > layers:
        return
    for s in range(a, b + 1):
        border[s] += by
    s = a - 1
    while s >= 1 and border[s] > border[a]:
        border[s] = border[a]
        s -= 1
    s = b + 1
    while s < pieces and border[s] < border[b]:
        border[s] = border[b]
        s += 1


@njit(**INNER)
def _judge(border, order, ranks, sum_f, sum_i, sum_w, speed_P, microbatches, host_s, evenness):
    """Returns the busiest rank's time, plus what uneven turns make the others wait."""
    pieces = order.shape[0]
    load, entry = np.zeros(ranks), np.full(ranks, np.inf)
    uneven = 0.0
    for turn in range(pieces // ranks):
        most_f = most_i = all_f = all_i = 0.0
        for s in range(turn * ranks, (turn + 1) * ranks):
            a, b = border[s], border[s + 1]
            if a == b:
                continue
            r = order[s]
            f, i = (sum_f[b] - sum_f[a]) / speed_P[r], (sum_i[b] - sum_i[a]) / speed_P[r]
            most_f, most_i = max(most_f, f), max(most_i, i)
            all_f += f
            all_i += i
            load[r] += (sum_w[b] - sum_w[a]) / speed_P[r] + 4 * host_s
            entry[r] = min(entry[r], sum_f[a] / speed_P[r])
        if turn < pieces // ranks - 1:  # the last turn holds the head
            uneven += ranks * (most_f + most_i) - all_f - all_i
    top = square = 0.0
    for r in range(ranks):
        if load[r] == 0.0:
            return 1e18  # an idle rank
        time = microbatches * load[r] + entry[r]
        top = max(top, time)
        square += time * time
    return top + 0.3 * np.sqrt(square / ranks) + evenness * uneven


def fixed_points(
    problem: Problem, phases: frozenset[str], enough: Callable[[], bool] = lambda: False
) -> list[Candidate]:
    """Returns starting candidates of plain form: stages in order, one or more per rank; once
    `enough()`, no more than the first.

    Uniform partitions where the partition may not change, else balanced ones; a loop over
    the ranks where placement may change; 1F1B's order where the schedule may not.
    """
    p = problem
    candidates = []
    per_rank = max(1, p.num_layers // p.ranks)
    turns = [t for t in (1, 2, 4, per_rank) if t <= per_rank] if "placement" in phases else [1]
    for t in dict.fromkeys(turns):
        stages = t * p.ranks
        cuts = [uniform_partition(p.profile.kinds, stages).sizes]
        if "partition" in phases and t == 1:
            cuts.append(p.balanced_sizes(stages))
        for sizes in dict.fromkeys(cuts):
            if candidates and enough():
                return candidates
            rank_L = np.repeat(np.arange(stages) % p.ranks, sizes)
            begins = np.zeros(p.num_layers, np.bool_)
            begins[np.cumsum(sizes)[:-1]] = True
            if "schedule" not in phases:
                keys = by_formula(p, ONE_F_ONE_B, late_weights=False)
                candidates.append(Candidate.of(rank_L, keys, begins))
                continue
            order = [s % p.ranks for s in range(stages)]
            known = published_orders(p, order, enough)
            for keys in priorities(p, tuple(sizes), known):
                candidates.append(Candidate.of(rank_L, keys, begins))
    return candidates
