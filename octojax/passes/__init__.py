"""Rewrites of plans: each is a frozen record of options whose call is `Plan -> Plan`."""

from octojax.passes.lower_transfers import LowerTransfers
from octojax.passes.merge_backward import MergeBackward
from octojax.passes.recompute import Recompute
from octojax.passes.reorder_comm import ReorderComm, Reordered, transfer_order
from octojax.passes.split_backward import SplitBackward

__all__ = [
    "LowerTransfers",
    "MergeBackward",
    "Recompute",
    "ReorderComm",
    "Reordered",
    "SplitBackward",
    "transfer_order",
]
