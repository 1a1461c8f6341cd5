"""How the bytes that ranks offer after a phase reach the ranks that read them."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import jax

from octojax import compat
from octojax.update.places import Places
from octojax.update.plan import Distributed

Packed = Mapping[int, jax.Array]
"""Per rank of this process that offers something, its byte vector, on that rank's devices."""

Received = Mapping[int, Sequence[jax.Array]]


class ExchangeFunction(Protocol):
    """How values cross ranks. Called once per exchange and step, in one order everywhere."""

    def __call__(self, phase: int, packed: Packed) -> Received:
        """Returns, for every rank r of this process, the vectors of the ranks in
        `phases[phase].exchange.needs[r]`, in that order, on the devices of r. All vectors of
        one exchange have its `width`."""
        ...

    def move(self, phase: int, rows: Sequence[jax.Array | None]) -> Sequence[jax.Array | None]:
        """Returns the rows of `phases[phase].exchange.moves` on their targets.

        `rows[i]` is what move i takes, None where its source is another process's; so is what
        is returned where the target is.
        """
        ...


def local_exchange(distributed: Distributed, places: Places) -> ExchangeFunction:
    """Returns the exchange for ranks that are all in this process: copies, nobody waits."""
    return _LocalExchange(distributed, places)


class _LocalExchange:
    def __init__(self, distributed: Distributed, places: Places) -> None:
        self._copies: dict[int, _Copies] = {}
        self._moves: dict[int, Any] = {}
        for phase, step in enumerate(distributed.phases):
            if step.exchange is None:
                continue
            self._copies[phase] = _Copies(tuple(step.exchange.needs), places)
            if step.exchange.moves:
                shardings = tuple(places.ranks[move.target] for move in step.exchange.moves)
                self._moves[phase] = compat.copy_to(shardings)  # type: ignore[arg-type]

    def __call__(self, phase: int, packed: Packed) -> Received:
        return self._copies[phase](packed)

    def move(self, phase: int, rows: Sequence[jax.Array | None]) -> Sequence[jax.Array | None]:
        return self._moves[phase](rows)


class _Copies:
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
