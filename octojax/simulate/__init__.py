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
    from octojax.simulate.dag import build_dag, find_cycle, longest_path_s
    from octojax.simulate.evaluation import Evaluation, evaluate
    from octojax.simulate.links import Links

__all__ = [
    "Evaluation",
    "LayerCosts",
    "Links",
    "StageCosts",
    "Table",
    "build_dag",
    "check_capacity",
    "evaluate",
    "find_cycle",
    "longest_path_s",
    "simulate",
]

_LATER = {
    "Evaluation": "evaluation",
    "Links": "links",
    "build_dag": "dag",
    "check_capacity": "capacity",
    "evaluate": "evaluation",
    "find_cycle": "dag",
    "longest_path_s": "dag",
}


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_LATER[name]}"), name)
