"""From a plan to what every rank executes: each pass is a frozen record of options, and callable.

`lowered(plan)` runs a pipeline of them; `octojax.passes.pipeline` says how they go together.
"""

from octojax.passes.join_actions import JoinActions
from octojax.passes.merge_backward import MergeBackward
from octojax.passes.pipeline import Pipeline, lowered
from octojax.passes.place_exchanges import PlaceExchanges
from octojax.passes.place_transfers import PlaceTransfers
from octojax.passes.recompute import Recompute
from octojax.passes.reorder_comm import ReorderComm
from octojax.passes.split_backward import SplitBackward

__all__ = [
    "JoinActions",
    "MergeBackward",
    "Pipeline",
    "PlaceExchanges",
    "PlaceTransfers",
    "Recompute",
    "ReorderComm",
    "SplitBackward",
    "lowered",
]
