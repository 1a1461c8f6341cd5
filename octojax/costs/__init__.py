"""What layers cost on a described device, from their equations alone: no run, no device."""

from octojax.costs.blocks import blocks_of
from octojax.costs.estimate import LayerOperations, estimate, layer_operations
from octojax.machines import Device

__all__ = ["Device", "LayerOperations", "blocks_of", "estimate", "layer_operations"]
