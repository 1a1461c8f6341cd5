"""The meaning of a distributed function: its programs one after the other, in one place.

Nothing is compiled and nothing leaves its device; `octojax.executor.update` does the same with
compiled programs on the ranks' devices.
"""

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from jax.extend.core import jaxpr_as_fun

from octojax.update.plan import Distributed, End, Role


def evaluate(distributed: Distributed, inputs: Mapping[End, Any]) -> dict[End, jax.Array]:
    """Returns every end that the programs write, given all that they read from outside."""
    ranks: list[dict[End, Any]] = [{} for _ in range(distributed.num_ranks)]
    outputs: dict[End, jax.Array] = {}

    def read(rank: int, end: End) -> Any:
        if end in ranks[rank]:
            return ranks[rank][end]
        return np.int32(end.index) if end.role is Role.ROW else inputs[end]

    for k, phase in enumerate(distributed.phases):
        for program in phase.every_program:
            run = jaxpr_as_fun(program.jaxpr)
            for binding in program.bindings:
                results = run(*(read(program.rank, end) for end in binding.reads))
                by_end = dict(zip(binding.writes, results, strict=True))
                ranks[program.rank].update(by_end)
                outputs.update(by_end)
        for message in distributed.messages[k]:
            values = [ranks[message.source][end] for end in message.sent]
            ranks[message.target].update(zip(message.copies, values, strict=True))
        for rank, values in enumerate(ranks):
            if rank in distributed.sources(k, rank):
                values[distributed.gathered(k, rank)] = values[End(Role.PACKED, k)]
    return outputs
