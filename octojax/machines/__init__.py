"""Machines by name: what their devices compute and hold, and what their links carry.

One TOML file each, with the source of every constant; a user's own file has the same form.
"""

from octojax.machines.device import Device
from octojax.machines.library import Hardware, describe, load, names

__all__ = ["Device", "Hardware", "describe", "load", "names"]
