"""Cuts the equations of a backward pass into those others wait for and those nobody waits for.

    dh = dot dy w2';  dw2 = dot h dy;  da = mul dh g;  dx = dot da w1';  dw1 = dot x da
      I   dh, da, dx                       writes dx, keeps da
      W   dw2 = dot h dy, dw1 = dot x da

Plain dead-code elimination on both sides would repeat dh and da in W; the values that cross
are kept instead. W holds the final contraction of each weight gradient and what follows it.
A gradient whose operands take more bytes to keep than its contraction is worth (a bias, a
norm's scale, a depthwise convolution) is finished in I.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from jax.extend.core import JaxprEqn, Var

from octojax.jaxprs.choose_residuals import from_alone
from octojax.jaxprs.dataflow import Atom, free_vars, is_var, makers, needed_for, var_bytes
from octojax.jaxprs.operations import VIEWS, contraction_work, is_contraction, is_opaque

MIN_WORK_PER_BYTE = 1.5
"""Operations a contraction must do per byte kept for it, or it is finished in I.

A weight gradient of a d x d matrix in float32 does d/4 per byte, a depthwise convolution of
width 4 one, a scale one half: the bound lies between those and the smallest toy matrices.
"""


@dataclass(frozen=True)
class Cut:
    """Equation indices of both parts (each in order) and the positions of W's outputs."""

    first: tuple[int, ...]
    second: tuple[int, ...]
    second_outputs: tuple[int, ...]


def partition_backward(
    eqns: Sequence[JaxprEqn],
    urgent: Sequence[Atom],
    deferrable: Sequence[Atom],
    at_hand: set[Var],
) -> Cut:
    """Returns the cut of live `eqns`: `urgent` outputs are I's, W makes of `deferrable` what pays.

    `at_hand` are the values that W can read without anything being kept (weights, batch,
    stage inputs). What prints or calls back for its effect is I's. `second_outputs` are
    positions in `deferrable`.
    """
    producer = makers(eqns)
    needed = needed_for(eqns, urgent)
    live = needed_for(eqns, [*urgent, *deferrable], keep_effects=True)
    tail = sorted(live - needed)
    second: set[int] = set()
    available = at_hand | from_alone(eqns, set())
    for group in _groups(eqns, tail, producer):
        work = sum(contraction_work(eqns[at]) for at in group)
        crossing = {
            _root(eqns, producer, v)
            for at in group
            for v in eqns[at].invars
            if is_var(v) and producer.get(v) not in group
        } - available
        if work >= MIN_WORK_PER_BYTE * sum(map(var_bytes, crossing)):
            second |= group
            available |= crossing
    outputs = tuple(i for i, v in enumerate(deferrable) if is_var(v) and producer.get(v) in second)
    first = needed_for(
        eqns,
        [
            *urgent,
            *(v for i, v in enumerate(deferrable) if i not in outputs),
            *free_vars([eqns[at] for at in sorted(second)]),
        ],
        keep_effects=True,
    )
    return Cut(tuple(sorted(first)), tuple(sorted(second)), outputs)


def _groups(
    eqns: Sequence[JaxprEqn], tail: Sequence[int], producer: dict[Var, int]
) -> list[set[int]]:
    """Returns what may be deferred together: final contractions with all that follows them.

    Contractions that meet (a weight used twice) form one group. Heaviest first.
    """
    inside = set(tail)
    readers: dict[int, set[int]] = {at: set() for at in tail}
    for at in tail:
        for v in eqns[at].invars:
            if is_var(v) and producer.get(v) in inside:
                readers[producer[v]].add(at)
    followers: dict[int, set[int]] = {}
    for at in reversed(tail):
        followers[at] = set().union(*({r} | followers[r] for r in readers[at]))
    final = [
        at
        for at in tail
        if is_contraction(eqns[at]) and not any(_stops(eqns[f]) for f in followers[at])
    ]
    groups: list[set[int]] = []
    for at in final:
        group = {at} | followers[at]
        for other in [g for g in groups if g & group]:
            group |= other
            groups.remove(other)
        groups.append(group)
    return sorted(groups, key=lambda g: -sum(contraction_work(eqns[at]) for at in g))


def _root(eqns: Sequence[JaxprEqn], producer: dict[Var, int], value: Var) -> Var:
    """Returns what would be kept for the value: the smallest of those it is a view of."""
    best = value
    while value in producer and eqns[producer[value]].primitive.name in VIEWS:
        operand = eqns[producer[value]].invars[0]
        if not is_var(operand):
            break
        value = operand
        if var_bytes(value) <= var_bytes(best):
            best = value
    return best


def _stops(eqn: JaxprEqn) -> bool:
    return is_contraction(eqn) or is_opaque(eqn)
