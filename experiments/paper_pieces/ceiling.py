"""The ceiling: what the best balance of whole layers would give without any fill or drain."""

import random

from octojax.ir import Profile

TRIES, EXCHANGED = 200, 6
"""After each descent so many layers are thrown to other ranks, and the next one begins there."""
EFFORT = 20_000
"""Tries times layers of the model: many tries for small models, few for large ones."""


def balanced_load_s(profile: Profile) -> float:
    """Returns the least load of the busiest rank that is found, in seconds of one microbatch;
    layers are whole and may lie on any rank.

    Longest first, then moves and swaps between the busiest rank and the others until none helps,
    and again after random changes.
    """
    assert profile.ranks is not None
    chance = random.Random(0)
    costs = sorted((layer.compute_s for layer in profile.layers), reverse=True)
    ranks: list[list[float]] = [[] for _ in range(profile.ranks)]
    for cost in costs:
        min(ranks, key=sum).append(cost)
    best = float("inf")
    for _ in range(min(TRIES, EFFORT // (len(costs) * profile.ranks))):
        while _improve(ranks):
            pass
        best = min(best, max(map(sum, ranks)))
        for _ in range(EXCHANGED):
            source, target = chance.sample(ranks, 2)
            if source:
                target.append(source.pop(chance.randrange(len(source))))
    return best


def _improve(ranks: list[list[float]]) -> bool:
    """Moves or swaps one layer of the busiest rank, if that lowers the larger of two loads."""
    ranks.sort(key=sum)
    busiest = ranks[-1]
    load = sum(busiest)
    best: tuple[float, int, float, float] | None = None
    for at, other in enumerate(ranks[:-1]):
        room = sum(other)
        for out in {*busiest}:
            for back in {*other, 0.0}:
                larger = max(load - out + back, room + out - back)
                if larger < (best[0] if best else load) * (1 - 1e-12):
                    best = larger, at, out, back
    if best is None:
        return False
    _, at, out, back = best
    busiest.remove(out)
    ranks[at].append(out)
    if back:
        ranks[at].remove(back)
        busiest.append(back)
    return True


def ceiling(profile: Profile, base_s: float) -> float:
    """Returns the speedup over a step of `base_s` seconds that balance alone would allow."""
    assert profile.microbatches is not None
    return base_s / (profile.microbatches * balanced_load_s(profile))
