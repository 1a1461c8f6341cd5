"""Plain data that every part shares: frozen, validated when built, text that parses back.

Nothing here imports JAX, so reading, checking and simulating plans stays fast.
"""

from octojax.ir.action import Action, Item, Kind, Overlap, parse_action, parse_item
from octojax.ir.graph import Layer, LayerGraph
from octojax.ir.instruction import Instruction, Receive, Run, Send, Update
from octojax.ir.lowered import LoweredPlan
from octojax.ir.partition import Partition, uniform_partition
from octojax.ir.placement import Placement
from octojax.ir.plan import Plan
from octojax.ir.prediction import Prediction
from octojax.ir.profile import LayerCost, Machine, Profile
from octojax.ir.schedule import Schedule
from octojax.ir.timeline import ActionSpan, Cause, Gap, RankSummary, Timeline, TransferSpan
from octojax.ir.transfer import Cargo, Transfer
from octojax.ir.wiring import Unit, Wiring

__all__ = [
    "Action",
    "ActionSpan",
    "Cargo",
    "Cause",
    "Gap",
    "Instruction",
    "Item",
    "Kind",
    "Layer",
    "LayerCost",
    "LayerGraph",
    "LoweredPlan",
    "Machine",
    "Overlap",
    "Partition",
    "Placement",
    "Plan",
    "Prediction",
    "Profile",
    "RankSummary",
    "Receive",
    "Run",
    "Schedule",
    "Send",
    "Timeline",
    "Transfer",
    "TransferSpan",
    "Unit",
    "Update",
    "Wiring",
    "parse_action",
    "parse_item",
    "uniform_partition",
]
