"""The simulator: a plan and its costs in, a timeline out. Its exact meaning: `simulator.py`.

The compiled parts are imported when they are first asked for, since that takes a moment.
"""

import importlib
from typing import TYPE_CHECKING, Any

from octojax.simulate.costs import LayerCosts, StageCosts
from octojax.simulate.simulator import simulate
from octojax.simulate.table import Table

if TYPE_CHECKING:
    from octojax.simulate.capacity import check_capacity
    from octojax.simulate.critical import Chains, Losses, chains_of, losses_of
    from octojax.simulate.dag import build_dag, find_cycle, longest_path_s
    from octojax.simulate.evaluation import Evaluation, evaluate
    from octojax.simulate.links import Links

__all__ = [
    "Chains",
    "Evaluation",
    "LayerCosts",
    "Links",
    "Losses",
    "StageCosts",
    "Table",
    "build_dag",
    "chains_of",
    "check_capacity",
    "evaluate",
    "find_cycle",
    "longest_path_s",
    "losses_of",
    "simulate",
]

_LATER = {
    "Chains": "critical",
    "Evaluation": "evaluation",
    "Links": "links",
    "Losses": "critical",
    "build_dag": "dag",
    "chains_of": "critical",
    "check_capacity": "capacity",
    "evaluate": "evaluation",
    "find_cycle": "dag",
    "longest_path_s": "dag",
    "losses_of": "critical",
}


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_LATER[name]}"), name)
