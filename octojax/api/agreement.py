"""What processes compare beside their plans: values. Other seeds, data or settings are an error.

before the first step    optimizer, closed-over constants, first parameters, module state
in every step            number of the call, topic, and a sum of the batch: 64 bytes that travel
                         with the loss, and are compared before the update is applied
"""

import struct
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from octojax.processes import agree, out_of_step, place
from octojax.processes.digest import STEP_BYTES, TOTAL_BYTES, WHOLE_BYTES, checksum, describe
from octojax.stages.fingerprint import portable
from octojax.update.plan import Distributed, UpdatePlan

REMEDY = (
    "Give every process the same values: one seed, one order of the data, one configuration "
    "(machines that round differently: compare_values=0)"
)


def value_facts(names: Sequence[str], leaves: Sequence[Any]) -> dict[str, str]:
    """Returns type, shape and digest of each leaf by its name."""
    limit_bytes = min(WHOLE_BYTES, TOTAL_BYTES // max(1, len(leaves)))
    return {name: describe(x, limit_bytes) for name, x in zip(names, leaves, strict=True)}


def constant_facts(constants: Sequence[Any]) -> dict[str, str]:
    """Returns the digests of the arrays that a loss closes over."""
    return {f"closed-over constant {i}": describe(x) for i, x in enumerate(constants)}


def optimizer_facts(plan: UpdatePlan) -> dict[str, str]:
    """Returns what the optimizer does, with its settings: its programs and their numbers."""
    return {
        "optimizer, its first state": _programs(plan.init),
        "optimizer, its update": _programs(plan.update),
        "optimizer, the numbers in its update": _numbers(plan.update),
        "optimizer, its state": f"{plan.state_names} {plan.state_avals}",
    }


def _programs(distributed: Distributed) -> str:
    return " ".join(
        portable(program.jaxpr) for phase in distributed.phases for program in phase.every_program
    )


def _numbers(distributed: Distributed) -> str:
    """The scalars in the programs, each once: learning rates, decays."""
    numbers: dict[str, None] = {}
    for phase in distributed.phases:
        for program in phase.every_program:
            for eqn in program.jaxpr.jaxpr.eqns:
                for atom in eqn.invars:
                    value = getattr(atom, "val", None)
                    if value is not None and np.ndim(value) == 0:
                        numbers[f"{float(np.real(np.asarray(value, np.complex128))):.6g}"] = None
    return " ".join(numbers)


class Stamp:
    """The header of a step's results: where its process is and which batch it has."""

    FORM = struct.Struct("<I8sI48s")

    def __init__(self, leaves: Sequence[Any], *, thorough: bool, every: int) -> None:
        self.leaves = leaves
        self.number, self.trail, self.topic = place()
        self.sum = 0
        if every and (thorough or self.number % every == 0):
            self.sum = checksum(leaves, WHOLE_BYTES if thorough else STEP_BYTES)

    def to_bytes(self) -> bytes:
        topic = self.topic.encode()[:48]
        return self.FORM.pack(self.number, self.trail.encode()[:8], self.sum, topic)

    def compare(self, headers: Mapping[int, bytes], names: Sequence[str]) -> None:
        """Raises where another process's header says something else: `PeerError` names the
        calls, `MeshError` the leaves of the batch that differ."""
        mine = self.to_bytes()
        if all(header == mine for header in headers.values()):
            return
        said = {process: self.FORM.unpack(header) for process, header in headers.items()}
        if len({(number, trail, topic) for number, trail, _, topic in said.values()}) > 1:
            texts = (
                f"process {p} in its call {number}, {topic.rstrip(bytes(1)).decode()!r}"
                for p, (number, _, _, topic) in sorted(said.items())
            )
            raise out_of_step(", ".join(texts))
        agree(self.facts(names), "the batch", REMEDY)

    def facts(self, names: Sequence[str]) -> Mapping[str, str]:
        return value_facts(names, self.leaves)
