"""What a rank holds beside the slots of its step program."""

from typing import Any

import jax

from octojax.api.pipelined import PipelinedLoss


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
