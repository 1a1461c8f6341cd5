"""The optimizer update across ranks.

Any optax transformation is traced once over the user's whole tree and cut into one program per
rank and phase; only small values (partial norms, flags) cross ranks between phases.
"""

from octojax.update.build import GRAD_NORM, build_update, locate_state
from octojax.update.mixing import mixing
from octojax.update.places import Places
from octojax.update.plan import Distributed, End, Role, UpdatePlan, UpdateProgram
from octojax.update.state import OptState, gather_state

__all__ = [
    "GRAD_NORM",
    "Distributed",
    "End",
    "OptState",
    "Places",
    "Role",
    "UpdatePlan",
    "UpdateProgram",
    "build_update",
    "gather_state",
    "locate_state",
    "mixing",
]
