"""How the bytes that ranks offer after a phase reach the ranks that read them."""

from collections.abc import Callable, Mapping, Sequence

import jax

from octojax import compat
from octojax.update.places import Places
from octojax.update.plan import Distributed

Packed = Mapping[int, jax.Array]
"""Per rank of this process that offers something, its byte vector, on that rank's devices."""

Received = Mapping[int, Sequence[jax.Array]]

ExchangeFunction = Callable[[int, Packed], Received]
"""`exchange(phase, packed)` returns, for every rank r of this process, the vectors of the ranks
in `phases[phase].exchange.needs[r]`, in that order, on the devices of r. All vectors of one
exchange have its `width`. Called once per exchange and step, in the same order everywhere."""


def local_exchange(distributed: Distributed, places: Places) -> ExchangeFunction:
    """Returns the exchange for ranks that are all in this process: copies, nobody waits."""
    moves = {
        phase: _Moves(tuple(step.exchange.needs), places)
        for phase, step in enumerate(distributed.phases)
        if step.exchange is not None
    }
    return lambda phase, packed: moves[phase](packed)


class _Moves:
    """The copies of one exchange; a rank's own vector stays where it is."""

    def __init__(self, needs: tuple[tuple[int, ...], ...], places: Places) -> None:
        self._needs = needs
        self._pairs = [
            (s, rank) for rank, sources in enumerate(needs) for s in sources if s != rank
        ]
        shardings = tuple(places.ranks[rank] for _, rank in self._pairs)
        self._copy = compat.copy_to(shardings) if shardings else None  # type: ignore[arg-type]

    def __call__(self, packed: Packed) -> Received:
        copies = self._copy([packed[source] for source, _ in self._pairs]) if self._copy else ()
        moved = dict(zip(self._pairs, copies, strict=True))
        return {
            rank: [packed[s] if s == rank else moved[s, rank] for s in sources]
            for rank, sources in enumerate(self._needs)
        }
