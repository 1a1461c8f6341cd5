"""Bytes of optimizer state on every rank, which a recorded step counts besides its own buffers."""

from typing import Any

import jax

from octojax.api.pipelined import PipelinedLoss


def optimizer_bytes_per_rank(loss: PipelinedLoss, opt_state: Any) -> dict[int, int]:
    """Returns the bytes of optimizer state on each local rank's devices, per device."""
    bytes_by_rank = dict.fromkeys(loss.mesh.local_ranks, 0)
    homes = {
        device: rank
        for rank in bytes_by_rank
        for device in loss.mesh.ranks[rank].replicated.device_set
    }
    for leaf in jax.tree.leaves(opt_state):
        if not isinstance(leaf, jax.Array):
            continue
        ranks = {homes[s.device] for s in leaf.addressable_shards if s.device in homes}
        for rank in ranks:
            bytes_by_rank[rank] += leaf.nbytes
    return bytes_by_rank
