"""A machine's ranks and links as arrays."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from octojax.errors import ProfileError
from octojax.ir import Machine

Floats = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Links:
    """Speeds of the ranks (ranks,), latency and bandwidth of every link (ranks, ranks), and the
    share of its shorter half that an overlapped pair saves."""

    speed: Floats
    latency_s: Floats
    bandwidth_bytes_per_s: Floats
    host_cost_s: float
    overlap_discount: float = 0.0

    @classmethod
    def of(cls, machine: Machine | None, num_ranks: int) -> "Links":
        """Returns the links between the first `num_ranks` ranks; None is an ideal machine."""
        machine = fitting(machine, num_ranks)
        pairs = [[machine.link(a, b) for b in range(num_ranks)] for a in range(num_ranks)]
        table = np.array(pairs, dtype=np.float64).reshape(num_ranks, num_ranks, 2)
        return cls(
            np.array([machine.speed(r) for r in range(num_ranks)], dtype=np.float64),
            np.ascontiguousarray(table[:, :, 0]),
            np.ascontiguousarray(table[:, :, 1]),
            float(machine.host_cost_s),
            float(machine.overlap_discount),
        )


def fitting(machine: Machine | None, num_ranks: int) -> Machine:
    """Returns the machine, None being an ideal one. Raises `ProfileError` if it lacks ranks."""
    machine = machine or Machine()
    for name, values in (("speeds", machine.speeds), ("capacities", machine.capacities_bytes)):
        if values and len(values) < num_ranks:
            raise ProfileError(
                f"machine {machine.name!r} gives the {name} of {len(values)} ranks, but the "
                f"schedule has {num_ranks}; give one of the {name} per rank, or none"
            )
    return machine
