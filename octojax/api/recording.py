"""The timeline of a recorded step, with all that its ranks held."""

from typing import Any

import jax

from octojax.api.pipelined import PipelinedLoss
from octojax.executor.recorded import Recorder, timeline_of
from octojax.ir import Timeline


def recorded_timeline(
    loss: PipelinedLoss, recorder: Recorder, held_bytes: dict[int, int]
) -> Timeline:
    """Returns what `recorder` saw, on all ranks; `held_bytes` as `beside_slots` returns them."""
    return timeline_of(recorder, loss.lowered, loss.schedule, held_bytes)


def beside_slots(loss: PipelinedLoss, opt_state: Any) -> dict[int, int]:
    """Returns the bytes of optimizer state on each local rank's devices, per device."""
    found = dict.fromkeys(loss.mesh.local_ranks, 0)
    homes = {
        device: rank for rank in found for device in loss.mesh.ranks[rank].replicated.device_set
    }
    for leaf in jax.tree.leaves(opt_state):
        if not isinstance(leaf, jax.Array):
            continue
        ranks = {homes[s.device] for s in leaf.addressable_shards if s.device in homes}
        for rank in ranks:
            found[rank] += leaf.nbytes
    return found
