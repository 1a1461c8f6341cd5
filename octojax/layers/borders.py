"""Where a chain of equations may be cut: after an equation with few live bytes.

    live bytes   N   2N  4N  2N   N   2N  6N   N
                 x   norm qkv  o  x'  norm up   x''
                 ^                ^             ^        borders of a residual stream

Between two heavy equations (contractions, loops, embedding look-ups) the narrowest position is
a candidate. A candidate is a border if nothing narrower lies on one of its two sides; what is
hidden in a hill between two borders is cut further only if more layers are asked for, or if the
hill holds a large share of the model (a U-Net, whose skips make one hill of everything).
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from types import MappingProxyType

TOLERANCE = 1.1  # widths within this factor are equal: a scalar more does not matter
LARGE = ((0.25, 8), (0.6, 4))
"""A segment is cut further if it has one of these shares of the model's operations and so many
heavy equations with weights."""


@dataclass(frozen=True)
class Step:
    """One activation equation, as far as cutting is concerned.

    `live_bytes` cross a cut after it, `made_bytes` are its own results. `reads_params` says
    whether it reads values made of parameters alone, `begins` whether it looks like the start
    of a layer (a norm), so that it never closes the layer before it. After a step that is
    `inseparable` from the next there is no border: both do the same, in two passes of one model.
    """

    live_bytes: int
    made_bytes: int
    work: float
    heavy: bool
    reads_params: bool
    embeds: bool = False
    begins: bool = False
    marked: bool = False
    inseparable: bool = False


@dataclass(frozen=True)
class Segment:
    """Steps `start` to `stop - 1`."""

    start: int
    stop: int


def find_borders(
    steps: Sequence[Step], min_layers: int = 1, before: float = math.inf
) -> tuple[int, ...]:
    """Returns the positions p, ascending, such that a cut after step p separates two layers.

    Marked steps are borders always. If fewer than `min_layers` segments result, the
    candidates with fewest bytes for the work that they part become borders, until there are
    enough or none is left. `before` are the bytes alive before the first step.
    """
    marks = _marks(steps)
    candidates = _candidates(steps)
    ends = {p: float(steps[p].live_bytes) for p in marks}
    ends |= {-1: before, len(steps) - 1: _last_made(steps)}
    borders = set(marks)
    for segment in _segments(len(steps), marks):
        borders |= _visible(steps, candidates, segment, ends)
    borders -= _between_embeddings(steps, borders, marks)
    borders = _cut_large(steps, candidates, borders)
    return tuple(sorted(_refine(steps, candidates, borders, min_layers)))


def _last_made(steps: Sequence[Step]) -> float:
    """Returns the bytes of the last heavy step's result: how wide the model is where it ends.

    Behind it everything shrinks to the loss, which says nothing about its layers.
    """
    return next((float(s.made_bytes) for s in reversed(steps) if s.heavy), math.inf)


def _marks(steps: Sequence[Step]) -> set[int]:
    """Returns the last step of every run of marks, but not the last step of all."""
    last = len(steps) - 1
    return {
        p
        for p in range(last)
        if steps[p].marked and not steps[p + 1].marked and not steps[p].inseparable
    }


def _candidates(steps: Sequence[Step]) -> list[int]:
    """One position per pair of neighbouring heavy steps, unless the user marked one there."""
    heavy = [p for p, step in enumerate(steps) if step.heavy]
    return [
        _narrowest(steps, start, stop)
        for start, stop in pairwise(heavy)
        if not any(step.marked for step in steps[start:stop])
        and not all(step.inseparable for step in steps[start:stop])
    ]


def _narrowest(steps: Sequence[Step], start: int, stop: int) -> int:
    """Returns the position in `[start, stop)` to cut at: the first run of least width, to its end.

    Then on over whatever reads no parameters: a bias and an activation function stay with
    their matrix, a norm goes with the layer that it feeds.
    """
    free = [p for p in range(start, stop) if not steps[p].inseparable]
    least = min(steps[p].live_bytes for p in free) * TOLERANCE
    position = next(p for p in free if steps[p].live_bytes <= least)
    run = True  # unbroken so far
    for p in range(position + 1, stop):
        narrow = steps[p].live_bytes <= least and not steps[p].inseparable
        run = run and narrow
        if steps[p].begins or (steps[p].reads_params and not run):
            break
        if narrow:
            position = p
    return position


def _visible(
    steps: Sequence[Step],
    candidates: Sequence[int],
    segment: Segment,
    ends: Mapping[int, float] = MappingProxyType({}),
) -> set[int]:
    """Returns the candidates in a segment with nothing narrower before them, or nothing after.

    `ends` are the widths of positions that count as ends of the segment.
    """
    inner = _within(candidates, segment)
    visible: set[int] = set()
    for order, end in ((inner, segment.start - 1), (inner[::-1], segment.stop - 1)):
        least = ends.get(end, math.inf)
        for p in order:
            least = min(least, steps[p].live_bytes)
            if steps[p].live_bytes <= least * TOLERANCE:
                visible.add(p)
    return visible


def _between_embeddings(steps: Sequence[Step], borders: set[int], marks: set[int]) -> set[int]:
    """Returns borders between look-ups with no other heavy step near: one embedding layer."""
    inner: set[int] = set()
    segments = _segments(len(steps), borders)
    for left, right in pairwise(segments):
        both = [x for x in steps[left.start : right.stop] if x.heavy]
        if both and all(x.embeds for x in both):
            inner.add(right.start - 1)
    return inner - marks


def _cut_large(steps: Sequence[Step], candidates: Sequence[int], borders: set[int]) -> set[int]:
    total = sum(step.work for step in steps)
    queue = list(_segments(len(steps), borders))
    while queue:
        segment = queue.pop()
        inside = steps[segment.start : segment.stop]
        weighty = sum(step.heavy and step.reads_params for step in inside)
        work = sum(x.work for x in inside)
        if not any(weighty >= count and work >= share * total for share, count in LARGE):
            continue
        visible = _visible(steps, candidates, segment)
        borders = borders | visible
        if visible:
            queue += [x for x in _segments(len(steps), borders) if _inside(x, segment)]
    return borders


def _refine(
    steps: Sequence[Step], candidates: Sequence[int], borders: set[int], min_layers: int
) -> set[int]:
    while len(borders) + 1 < min_layers:
        costs = {
            p: _split_cost(steps, segment, p)
            for segment in _segments(len(steps), borders)
            for p in _within(candidates, segment)
        }
        if not costs:
            break
        borders = borders | {min(costs, key=lambda p: costs[p])}
    return borders


def _split_cost(steps: Sequence[Step], segment: Segment, p: int) -> float:
    """Width over evenness: a narrow cut near the middle of a large segment is cheapest."""
    left = _work(steps, Segment(segment.start, p + 1))
    right = _work(steps, Segment(p + 1, segment.stop))
    return steps[p].live_bytes / max(min(left, right), 1e-9)


def _work(steps: Sequence[Step], segment: Segment) -> float:
    return sum(step.work for step in steps[segment.start : segment.stop])


def _segments(count: int, borders: set[int]) -> list[Segment]:
    ends = [*(p + 1 for p in sorted(borders)), count]
    return [Segment(start, stop) for start, stop in zip([0, *ends], ends) if start < stop]


def _within(candidates: Sequence[int], segment: Segment) -> list[int]:
    """Returns the candidates that cut a segment in two."""
    return [p for p in candidates if segment.start <= p < segment.stop - 1]


def _inside(inner: Segment, outer: Segment) -> bool:
    return outer.start <= inner.start and inner.stop <= outer.stop and inner != outer
