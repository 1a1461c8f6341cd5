"""How long collectives over a group of devices take, in rings.

    all-reduce        2 (n - 1) / n of the bytes, in 2 (n - 1) steps
    reduce-scatter,
    all-gather,         (n - 1) / n of the bytes, in n - 1 steps
    all-to-all

Source: Thakur, Rabenseifner and Gropp, "Optimization of Collective Communication Operations in
MPICH" (2005), section 4.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Group:
    """`size` devices on equal links: each takes `latency_s` a step, and bandwidth each way."""

    size: int
    latency_s: float
    bandwidth_bytes_per_s: float

    def all_reduce_s(self, nbytes: float) -> float:
        """Returns the time until all devices have the sum of their `nbytes`."""
        return 2 * self._ring_s(nbytes)

    def reduce_scatter_s(self, nbytes: float) -> float:
        """Returns the time until each has its share of the sum of all devices' `nbytes`."""
        return self._ring_s(nbytes)

    def all_gather_s(self, nbytes: float) -> float:
        """Returns the time until all have the `nbytes` of which each had a share."""
        return self._ring_s(nbytes)

    def all_to_all_s(self, nbytes: float) -> float:
        """Returns the time until the `nbytes` of each device are spread over all of them."""
        return self._ring_s(nbytes)

    def _ring_s(self, nbytes: float) -> float:
        if self.size == 1:
            return 0.0
        moved = nbytes * (self.size - 1) / self.size
        return (self.size - 1) * self.latency_s + moved / self.bandwidth_bytes_per_s
