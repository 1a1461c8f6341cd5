"""Checkpoints in the user's own layout, so that they reload under any plan.

    PATH/octojax.json    step, plan, and of all leaves names, shapes, types and digests
    PATH/tree/           an Orbax checkpoint of nested dicts: {"params": ..., "opt_state": ...}
    PATH/octojax.lock    while a process writes: which, since when, and what

Nothing in them depends on ranks, partition or schedule. Without octojax, the trees are read by
`orbax.checkpoint.PyTreeCheckpointer().restore(PATH / "tree")`; octojax.json names the folder, which
is called `tree-` and eight digits once the checkpoint was overwritten. See docs/checkpoints.md.
"""

from octojax.checkpoint.sharded import opened, save_shards
from octojax.checkpoint.store import Checkpoint, check_writable, load, save

__all__ = ["Checkpoint", "check_writable", "load", "opened", "save", "save_shards"]
