"""A makespan that no plan can beat, from layers, ranks and microbatches alone.

The derivation, with every step proved, is `docs/lower_bound.md`. Memory is left out: it can
only make plans slower, so the bound stays valid.
"""

from dataclasses import dataclass, replace

import numpy as np

from octojax.tune.problem import Problem

UNITS = 1 << 18
"""Resolution of the rounded subset sums, in parts of the mean load of a rank."""
EXACT_SUMS = 300_000
"""Up to so many different sums are kept exactly, which few kinds of layers allow."""
SAFETY = 1 - 1e-12
"""Rounding of floating point sums never lifts the bound above the truth."""


@dataclass(frozen=True)
class LowerBound:
    """`seconds` holds for plans that keep every layer on one rank; `replicated_s` for those
    that hold stages on two ranks too. `parts` are the bounds whose maximum `seconds` is.
    """

    seconds: float
    replicated_s: float
    parts: tuple[tuple[str, float], ...]

    @property
    def binding(self) -> str:
        """The part that gives the bound."""
        return max(self.parts, key=lambda part: part[1])[0]


def lower_bound(problem: Problem) -> LowerBound:
    """Returns the bound of `docs/lower_bound.md` and its parts, in seconds.

    An overlapped pair saves at most `overlap_discount` of its forward: the bound is that of
    forwards that are so much shorter. What ends a step only adds to it.
    """
    discount = problem.profile.machine.overlap_discount
    if discount:
        return lower_bound(_with_forwards(problem, 1 - discount))
    parts = (
        ("critical path", critical_path_s(problem)),
        ("one layer", heaviest_layer_s(problem, holders=1)),
        ("average load and fill", average_load_s(problem)),
        ("whole layers and fill", whole_layers_s(problem)),
        ("whole backwards after the first gradient", backwards_s(problem)),
    )
    shared = max(
        critical_path_s(problem),
        heaviest_layer_s(problem, holders=2),
        float(problem.microbatches * problem.compute_s.sum() / problem.speeds.sum()),
    )
    best = max(value for _, value in parts)
    return LowerBound(best * SAFETY, shared * SAFETY, parts)


def _with_forwards(problem: Problem, share: float) -> Problem:
    """The problem with shorter forwards, and without a discount."""
    profile = problem.profile
    layers = tuple(replace(x, forward_s=share * x.forward_s) for x in profile.priced_layers)
    machine = replace(profile.machine, overlap_discount=0.0, expert_parallel=False)
    return replace(problem, profile=replace(profile, layers=layers, machine=machine))


def critical_path_s(problem: Problem) -> float:
    """Returns the time of one microbatch alone, on the fastest rank, without transfers."""
    p = problem
    backward = np.minimum(p.input_grad_s, p.backward_s)
    last = min(p.input_grad_s[0] + p.weight_grad_s[0], p.backward_s[0])
    return float((p.forward_s.sum() + backward[1:].sum() + last) / p.speeds.max())


def heaviest_layer_s(problem: Problem, holders: int) -> float:
    """Returns the bound from one layer that `holders` ranks share: forwards before it reaches
    the layer, all microbatches through the layer, input gradients from there to the front.
    """
    p, speed = problem, float(problem.speeds.max())
    before = np.concatenate([[0.0], np.cumsum(p.forward_s)[:-1]])
    backward = np.minimum(p.input_grad_s, p.backward_s)
    behind = np.concatenate([[0.0], np.cumsum(backward)[:-1]])
    turns = -(-p.microbatches // holders)
    through = before + turns * (p.forward_s + backward + p.again_s) + behind
    work = before + turns * p.compute_s
    return float(np.maximum(through, work).max() / speed)


def entries_s(problem: Problem) -> np.ndarray:
    """Returns when the k-th rank to start can start at the earliest: k layers and k transfers
    lie before the first layer it holds.
    """
    p = problem
    if p.ranks == 1:
        return np.zeros(1)
    before = np.concatenate([[0.0], np.cumsum(p.forward_s)])[: p.ranks]
    return before / p.speeds.max() + _hop_s(p) * np.arange(p.ranks)


def _hop_s(problem: Problem) -> float:
    """Returns the least time of sending a value to another rank."""
    p = problem
    apart = ~np.eye(p.ranks, dtype=bool)
    latency = p.latency_s[apart].min()
    return latency + p.output_bytes[:-1].min() * p.s_per_byte[apart].min() + p.host_cost_s


def average_load_s(problem: Problem) -> float:
    """Returns the time in which all ranks together can do all work, each from its entry on."""
    p = problem
    work = p.microbatches * p.compute_s.sum()
    host = p.microbatches * 4 * p.host_cost_s * (p.ranks - 1)
    if len(set(p.speeds.tolist())) > 1:
        return float(work / p.speeds.sum())
    return float((work / p.speeds[0] + host + entries_s(p).sum()) / p.ranks)


def gradients_s(problem: Problem) -> np.ndarray:
    """Returns when the k-th rank can have its first gradient at the earliest, in the order of the
    last layers that they hold: after all forwards, and the input gradients of k layers.
    """
    p = problem
    speed = float(p.speeds.max())
    turn = float(p.forward_s.sum()) / speed
    if p.ranks == 1:
        return np.full(1, turn)
    backward = np.minimum(p.input_grad_s, p.backward_s)[::-1]
    after = np.concatenate([[0.0], np.cumsum(backward)])[: p.ranks] / speed
    return turn + after + _hop_s(p) * (p.ranks - 1 + np.arange(p.ranks))


def whole_layers_s(problem: Problem) -> float:
    """Returns the least T for which whole layers could fill the ranks' time: bisection on the
    necessary condition of `docs/lower_bound.md`, section 4.
    """
    p = problem
    fill = _Fill(p, p.compute_s, entries_s(p), 0, 2)
    return _least(fill, average_load_s(p))


def backwards_s(problem: Problem) -> float:
    """Returns the least T for which the backwards of whole layers could fill the ranks' time after
    their first gradient (`docs/lower_bound.md`, section 5).
    """
    p = problem
    work = p.compute_s - p.forward_s - p.again_s
    gradients = gradients_s(p)
    fill = _Fill(p, work, gradients, p.num_layers - 1, 1)
    share = p.microbatches * float(work.sum())
    even = share / float(p.speeds.sum()) + float(gradients.min())
    return _least(fill, even)


def _least(fill: "_Fill", low: float) -> float:
    """Returns the largest T above `low` that is known to be impossible; `low` without one."""
    if fill.possible(low):
        return low
    high = low
    while not fill.possible(high):
        high *= 1.25
    for _ in range(40):
        middle = 0.5 * (low + high)
        if fill.possible(middle):
            high = middle
        else:
            low = middle
    return low  # proven impossible, so every plan takes longer


class _Fill:
    """How much of the layers' `work` can be put into a given time on the ranks, from above.

    The k-th rank may begin at `entry[k]`; the first of them in that order holds layer `first`, and
    each does at least `transfers` of a microbatch, on the host's account.
    """

    def __init__(
        self, problem: Problem, work: np.ndarray, entry: np.ndarray, first: int, transfers: int
    ) -> None:
        p = self.problem = problem
        self.work, self.first = work, first
        self.host_s = transfers * p.host_cost_s if p.ranks > 1 else 0.0
        self.total = float(work.sum())
        self.unit = self.total / p.ranks / UNITS
        equal = len(set(p.speeds.tolist())) == 1
        self.entry = entry if equal else np.full(p.ranks, entry.min())
        rest = [i for i in range(p.num_layers) if i != first]
        self.big = max(rest, key=lambda i: work[i]) if rest else first
        others = np.array([w for i, w in enumerate(work) if i not in (first, self.big)])
        kinds, counts = np.unique(others, return_counts=True)
        self.exact = None
        if np.prod(counts + 1.0) <= EXACT_SUMS:
            sums = np.zeros(1)
            for kind, count in zip(kinds, counts, strict=True):
                sums = (sums[:, None] + kind * np.arange(count + 1)).ravel()
            self.exact = np.unique(sums)
            return
        self.smallest = np.cumsum(np.sort(others))
        rounded = 1
        limit = (1 << (4 * UNITS)) - 1
        for w in others:
            rounded |= (rounded << int(w / self.unit)) & limit
        self.rounded = rounded

    def most(self, room: float) -> float:
        """Returns at least the largest sum of the other layers that is <= `room`."""
        if room < 0:
            return -np.inf
        if self.exact is not None:
            at = int(np.searchsorted(self.exact, room * (1 + 1e-12), side="right"))
            return float(self.exact[at - 1])
        count = int(np.searchsorted(self.smallest, room, side="right"))
        below = self.rounded & ((1 << min(int(room / self.unit) + 1, 4 * UNITS)) - 1)
        return min(room, (below.bit_length() - 1 + count) * self.unit)

    def possible(self, makespan_s: float) -> bool:
        """Whether the condition holds: false proves that no plan is that fast."""
        p = self.problem
        room = ((makespan_s - self.entry) / p.microbatches - self.host_s) * p.speeds
        if (room < 0).any():
            return False
        plain = np.array([self.most(x) for x in room])
        first = float(self.work[self.first])
        big = float(self.work[self.big]) if self.big != self.first else 0.0
        equal = len(set(p.speeds.tolist())) == 1
        best = -np.inf
        for front in range(1 if equal else p.ranks):  # who holds the first of the order's layers
            for holder in range(p.ranks):  # who holds the heaviest other layer
                filled = plain.copy()
                if holder == front:
                    filled[front] = first + big + self.most(room[front] - first - big)
                else:
                    filled[front] = first + self.most(room[front] - first)
                    filled[holder] = big + self.most(room[holder] - big)
                best = max(best, float(filled.sum()))
        return best >= self.total * (1 - 1e-12)
